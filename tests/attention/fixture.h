#pragma once

#include <iterator>

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

  /// Modes that reach every kernel of the engine: the first whose gradients repeat and, where that
  /// is another, the default.
  std::vector<Mode> modes() const {
    if (is_on_device()) return {Mode::kDeterministic, Mode::kDefault};
    return {Mode::kDefault};
  }

  /// Forward and grad_q have the bits of `want`, and so has the rest where the mode promises it;
  /// where not, it is held to SPEC section 8.
  void expect_result(const AttentionProblem& problem, const AttentionResult& got,
                     const AttentionResult& want, Mode mode) const {
    if (gradients_repeat(mode)) {
      EXPECT_TRUE(same_result_bits(got, want)) << problem.describe();
      return;
    }
    EXPECT_TRUE(same_forward_bits(got, want)) << problem.describe();
    EXPECT_TRUE(same_bits(got.grad_q, want.grad_q)) << problem.describe();
    EXPECT_TRUE(within_spec(problem, got));
  }
};

/// Rows of no key, of one tile, and of up to five behind one another, so that a row begins at any
/// place of what a kernel keeps of the rows before.
inline AttentionProblem rows_of_many_lengths(std::int64_t t_q, std::int64_t heads,
                                             std::uint64_t seed) {
  constexpr std::int64_t kLengths[] = {0, 1, 65, 0, 2, 64, 130, 3, 20, 193, 63, 7, 257};
  constexpr std::int64_t kWidth = 260;
  AttentionProblem problem =
      random_attention({.t_q = t_q, .t_k = 300, .heads = heads, .topk = kWidth}, seed);
  for (std::int64_t t = 0; t < t_q; ++t) {
    for (std::int64_t j = kLengths[t % std::ssize(kLengths)]; j < kWidth; ++j) {
      problem.topk_indices.set({t, 0, j}, -1);
    }
  }
  return problem;
}

/// What only host engines have: threads, and modes that are all one.
class AttentionOnHost : public Attention {};

}  // namespace flashdsa::test
