#pragma once

#include "tests/support/attention_problem.h"
#include "tests/support/compare.h"
#include "tests/support/engines.h"
#include "tests/support/placement.h"

namespace flashdsa::test {

/// The attention on every engine; engines_test.cc lists them.
class Attention : public EngineTest {
 protected:
  /// Forward and backward on this engine, held to SPEC section 8.
  void expect_within_spec(const AttentionProblem& problem) const {
    EXPECT_TRUE(within_spec(problem, run_attention(problem, runtime())));
  }
};

/// What only host engines have: threads, and modes that are all one.
class AttentionOnHost : public Attention {};

}  // namespace flashdsa::test
