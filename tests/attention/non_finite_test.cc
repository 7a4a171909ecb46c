// NaN and infinity reach only the rows that selected the key or own the query (SPEC section 6): in
// the forward always, in the backward in the modes that promise it.

#include <cmath>
#include <limits>
#include <set>

#include "tests/attention/fixture.h"

namespace flashdsa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Mode kModes[] = {Mode::kDefault, Mode::kDeterministic, Mode::kInvariant};

// Six rows of neighbours that share most keys; rows 1 and 4 alone select key 3.
AttentionProblem neighbours(std::uint64_t seed) {
  AttentionProblem problem = random_attention({.t_q = 6, .t_k = 90, .heads = 3, .topk = 70}, seed);
  for (std::int64_t t = 0; t < 6; ++t) {
    std::vector<std::int32_t> keys;
    for (std::int32_t s = 0; s < 75; ++s) {
      const bool wanted = s == 3 ? t == 1 || t == 4 : s % 15 != t;
      if (wanted && keys.size() < 68) keys.push_back(s);
    }
    if (t == 1 || t == 4) keys.push_back(80 + static_cast<std::int32_t>(t));
    problem.set_row(t, keys);
  }
  return problem;
}

std::set<std::int64_t> keys_of(const AttentionProblem& problem,
                               const std::set<std::int64_t>& rows) {
  std::set<std::int64_t> keys;
  for (const std::int64_t t : rows) {
    for (const std::int64_t key : problem.keys_of_row(t)) keys.insert(key);
  }
  return keys;
}

// Rows outside `rows` have the bits of the clean problem.
void expect_forward_of_only_rows(const AttentionResult& got, const AttentionResult& clean,
                                 const std::set<std::int64_t>& rows) {
  for (std::int64_t t = 0; t < got.out.size(0); ++t) {
    if (rows.count(t) > 0) continue;
    EXPECT_TRUE(same_bits(got.out.rows(t, 1), clean.out.rows(t, 1))) << "row " << t;
    EXPECT_TRUE(same_bits(got.lse.rows(t, 1), clean.lse.rows(t, 1))) << "row " << t;
    EXPECT_TRUE(same_bits(got.max_logits.rows(t, 1), clean.max_logits.rows(t, 1))) << "row " << t;
  }
}

// The same of grad_q, and of the gradients of keys that `rows` did not select.
void expect_gradients_of_only_rows(const AttentionProblem& problem, const AttentionResult& got,
                                   const AttentionResult& clean,
                                   const std::set<std::int64_t>& rows) {
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    if (rows.count(t) > 0) continue;
    EXPECT_TRUE(same_bits(got.grad_q.rows(t, 1), clean.grad_q.rows(t, 1))) << "row " << t;
  }
  const auto touched = keys_of(problem, rows);
  for (std::int64_t s = 0; s < problem.t_k(); ++s) {
    if (touched.count(s) > 0) continue;
    EXPECT_TRUE(same_bits(got.grad_kv.rows(s, 1), clean.grad_kv.rows(s, 1))) << "key " << s;
  }
}

bool all_nan(const HostTensor& tensor) {
  for (const double value : tensor.values()) {
    if (!std::isnan(value)) return false;
  }
  return true;
}

class AttentionNonFinite : public Attention {
 protected:
  // Makes `spoil`'s change to `clean` and runs both in every mode: what differs lies in `rows`.
  // Returns the result of the last mode.
  template <typename Spoil>
  AttentionResult expect_only_rows(const AttentionProblem& clean,
                                   const std::set<std::int64_t>& rows, const Spoil& spoil) const {
    AttentionProblem spoilt = clean;
    spoil(spoilt);
    AttentionResult got;
    for (const Mode mode : kModes) {
      const AttentionResult want = run_attention(clean, runtime(mode));
      got = run_attention(spoilt, runtime(mode));
      expect_forward_of_only_rows(got, want, rows);
      if (gradients_stay_apart(mode)) expect_gradients_of_only_rows(spoilt, got, want, rows);
    }
    return got;
  }
};

INSTANTIATE_TEST_SUITE_P(Every, AttentionNonFinite, ::testing::ValuesIn(engines()), engine_name);

TEST_P(AttentionNonFinite, NanKeyReachesOnlyRowsThatSelectedIt) {
  const AttentionResult got = expect_only_rows(
      neighbours(96), {1, 4}, [](AttentionProblem& problem) { problem.set_key(3, kNan); });
  for (const std::int64_t t : {1, 4}) {
    EXPECT_TRUE(all_nan(got.out.rows(t, 1)));
    EXPECT_TRUE(all_nan(got.lse.rows(t, 1)));
    EXPECT_TRUE(all_nan(got.grad_q.rows(t, 1)));
  }
}

TEST_P(AttentionNonFinite, OneNanChannelOfAKeyReachesOnlyRowsThatSelectedIt) {
  for (const std::int64_t channel : {0, 511, 512, 575}) {
    const AttentionResult got =
        expect_only_rows(neighbours(97), {1, 4},
                         [&](AttentionProblem& problem) { problem.kv.set({3, 0, channel}, kNan); });
    EXPECT_TRUE(all_nan(got.out.rows(1, 1)));  // its logit is NaN, hence every probability
  }
}

TEST_P(AttentionNonFinite, InfiniteKeyReachesOnlyRowsThatSelectedIt) {
  for (const double value : {kInf, -kInf, 3.3e38}) {
    expect_only_rows(neighbours(98), {1, 4},
                     [&](AttentionProblem& problem) { problem.set_key(3, value); });
  }
}

TEST_P(AttentionNonFinite, NanQueryReachesOnlyItsRow) {
  for (const double value : {kNan, kInf}) {
    const AttentionResult got = expect_only_rows(
        neighbours(99), {2}, [&](AttentionProblem& problem) { problem.q.set({2, 1, 40}, value); });
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(got.out.get({2, 1, 0})));
      EXPECT_TRUE(std::isnan(got.lse.get({2, 1})));
      EXPECT_TRUE(std::isnan(got.grad_q.get({2, 1, 0})));
    }
  }
}

TEST_P(AttentionNonFinite, NanGradOutReachesOnlyItsRow) {
  expect_only_rows(neighbours(100), {2},
                   [](AttentionProblem& problem) { problem.grad_out.set({2, 1, 40}, kNan); });
}

TEST_P(AttentionNonFinite, NanKeyThatNobodySelectedReachesNothing) {
  const AttentionProblem clean = neighbours(101);
  AttentionProblem spoilt = clean;
  spoilt.set_key(89, kNan);
  EXPECT_TRUE(
      same_result_bits(run_attention(spoilt, repeatable()), run_attention(clean, repeatable())));
}

// "Rows whose length is 0 contribute nothing, even when their inputs hold NaN."
TEST_P(AttentionNonFinite, EmptyRowOfNanContributesNothing) {
  AttentionProblem problem = random_attention({.t_q = 4, .t_k = 20, .heads = 3, .topk = 9}, 102);
  problem.set_lengths({9, 0, 9, 9});
  problem.set_row(2, {});
  problem.set_sink({0.5, 1, -1});
  const AttentionProblem clean = problem;
  for (const std::int64_t t : {1, 2}) {
    for (std::int64_t h = 0; h < 3; ++h) {
      for (std::int64_t c = 0; c < 576; ++c) problem.q.set({t, h, c}, kNan);
      for (std::int64_t c = 0; c < 512; ++c) problem.grad_out.set({t, h, c}, kNan);
    }
  }
  for (const Mode mode : kModes) {
    const AttentionResult got = run_attention(problem, runtime(mode));
    const AttentionResult want = run_attention(clean, runtime(mode));
    EXPECT_TRUE(same_forward_bits(got, want));
    EXPECT_TRUE(within_spec(clean, got));
    if (gradients_repeat(mode)) {
      EXPECT_TRUE(same_result_bits(got, want));
    }
  }
}

TEST_P(AttentionNonFinite, EmptyRowIgnoresItsForwardResults) {
  AttentionProblem problem = random_attention({.t_q = 2, .t_k = 20, .heads = 3, .topk = 9}, 103);
  problem.set_lengths({9, 0});
  const AttentionResult clean = run_attention(problem, repeatable());
  HostTensor out = clean.out, lse = clean.lse;
  for (std::int64_t h = 0; h < 3; ++h) {
    lse.set({1, h}, kNan);
    for (std::int64_t c = 0; c < 512; ++c) out.set({1, h, c}, kNan);
  }
  const HostTensor grad_q(DType::kBFloat16, clean.grad_q.shape());
  const HostTensor grad_kv(DType::kBFloat16, clean.grad_kv.shape());
  AttentionBackwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = problem.inputs();
  args.out = out;
  args.lse = lse;
  args.grad_out = problem.grad_out;
  args.grad_q = grad_q;
  args.grad_kv = grad_kv;
  run_placed(args, repeatable());
  EXPECT_TRUE(same_bits(grad_q, clean.grad_q));
  EXPECT_TRUE(same_bits(grad_kv, clean.grad_kv));
}

// A logit of -inf has weight zero: it must not turn the other keys' weights into NaN.
TEST_P(AttentionNonFinite, LogitOfMinusInfinityLeavesTheOthersTheirWeight) {
  AttentionProblem problem = random_attention({.t_q = 1, .t_k = 4, .heads = 1, .topk = 4}, 104);
  problem.q.fill(0);
  problem.q.set({0, 0, 575}, 1);  // a rope channel, so that the value stays finite
  problem.kv.set({0, 0, 575}, -kInf);
  for (std::int64_t s = 1; s < 4; ++s) problem.kv.set({s, 0, 575}, 0);
  const AttentionResult result = run_forward(problem, runtime());
  EXPECT_NEAR(result.lse.get({0, 0}), std::log(3.0), log_absolute(result.backend));
  EXPECT_EQ(result.max_logits.get({0, 0}), 0);
  for (std::int64_t c = 0; c < 512; ++c) {
    const double mean =
        (problem.kv.get({1, 0, c}) + problem.kv.get({2, 0, c}) + problem.kv.get({3, 0, c})) / 3;
    ASSERT_NEAR(result.out.get({0, 0, c}), mean, 0.02) << c;
  }
}

}  // namespace
}  // namespace flashdsa::test
