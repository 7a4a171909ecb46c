#pragma once

#include "tests/support/compare.h"
#include "tests/support/engines.h"
#include "tests/support/placement.h"
#include "tests/support/score_gradients.h"
#include "tests/support/topk_problem.h"

namespace flashdsa::test {

/// The indexer on every engine; engines_test.cc lists them.
class TopK : public EngineTest {
 protected:
  /// The selection is the brute force's, index by index, with and without scores.
  void expect_exactly_best(const TopkProblem& problem) const {
    EXPECT_TRUE(exactly_best(problem, run_topk(problem, runtime(), WantScores::kYes)));
    EXPECT_TRUE(exactly_best(problem, run_topk(problem, runtime(), WantScores::kNo)));
  }
};

/// What only host engines have: threads and progress.
class TopKOnHost : public TopK {};

/// What the reference does not promise: bounded scratch.
class TopKBounded : public TopK {};

/// The gradient of the scores, likewise.
class IndexerBackward : public EngineTest {};
class IndexerBackwardOnHost : public IndexerBackward {};
class IndexerBackwardBounded : public IndexerBackward {};

}  // namespace flashdsa::test
