// NaN and infinity reach only the rows that selected the key or own the query (SPEC section 6). In
// the backward SPEC asks it of the invariant mode; every engine holds it in all of them.

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
AttentionProblem neighbours(std::uint64_t seed, std::int64_t heads = 3) {
  AttentionProblem problem =
      random_attention({.t_q = 6, .t_k = 90, .heads = heads, .topk = 70}, seed);
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

// Element [first, first + count) of `to` as in `from`.
void copy_elements(const HostTensor& from, HostTensor& to, std::int64_t first, std::int64_t count) {
  for (std::int64_t i = first; i < first + count; ++i) to.set(i, from.get(i));
}

// Rows of the first axis for which `wanted` holds.
template <typename Wanted>
void copy_rows(const HostTensor& from, HostTensor& to, const Wanted& wanted) {
  const std::int64_t width = from.elements() / from.size(0);
  for (std::int64_t row = 0; row < from.size(0); ++row) {
    if (wanted(row)) copy_elements(from, to, row * width, width);
  }
}

// The same where gradients have no bits of their own: `got` is right but for what `rows` may spoil.
void expect_gradients_within_spec_but_of(const AttentionProblem& clean, const AttentionResult& got,
                                         const AttentionResult& want,
                                         const std::set<std::int64_t>& rows) {
  AttentionResult mended = got;
  mended.out = want.out, mended.lse = want.lse, mended.max_logits = want.max_logits;
  const auto touched = keys_of(clean, rows);
  copy_rows(want.grad_q, mended.grad_q, [&](std::int64_t t) { return rows.count(t) > 0; });
  copy_rows(want.grad_kv, mended.grad_kv, [&](std::int64_t s) { return touched.count(s) > 0; });
  EXPECT_TRUE(within_spec(clean, mended));
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
      if (gradients_repeat(mode)) {
        expect_gradients_of_only_rows(spoilt, got, want, rows);
      } else {
        expect_gradients_within_spec_but_of(clean, got, want, rows);
      }
    }
    return got;
  }
};

INSTANTIATE_TEST_SUITE_P(Every, AttentionNonFinite, ::testing::ValuesIn(engines()), engine_name);

TEST_P(AttentionNonFinite, NanKeyReachesOnlyRowsThatSelectedIt) {
  for (const std::int64_t heads : {3, 33}) {
    const AttentionResult got = expect_only_rows(
        neighbours(96, heads), {1, 4}, [](AttentionProblem& problem) { problem.set_key(3, kNan); });
    for (const std::int64_t t : {1, 4}) {
      EXPECT_TRUE(all_nan(got.out.rows(t, 1)));
      EXPECT_TRUE(all_nan(got.lse.rows(t, 1)));
      EXPECT_TRUE(all_nan(got.grad_q.rows(t, 1)));
    }
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

// Of its row the other heads stay right, and of the keys those that the row did not select.
TEST_P(AttentionNonFinite, NanInOneHeadReachesThatHeadAlone) {
  for (const std::int64_t heads : {3, 33, 72}) {
    const AttentionProblem clean =
        random_attention({.t_q = 2, .t_k = 90, .heads = heads, .topk = 70}, 105);
    const std::int64_t vector = 2 * heads - 2;  // of row 1, the last head but one
    const auto expect_one_head = [&](const AttentionProblem& spoilt, Mode mode) {
      const AttentionResult want = run_attention(clean, runtime(mode));
      AttentionResult got = run_attention(spoilt, runtime(mode));
      EXPECT_TRUE(std::isnan(got.grad_q.get(vector * 576)));
      copy_elements(want.out, got.out, vector * 512, 512);
      copy_elements(want.lse, got.lse, vector, 1);
      copy_elements(want.max_logits, got.max_logits, vector, 1);
      copy_elements(want.grad_q, got.grad_q, vector * 576, 576);
      const auto touched = keys_of(clean, {1});
      copy_rows(want.grad_kv, got.grad_kv, [&](std::int64_t s) { return touched.count(s) > 0; });
      EXPECT_TRUE(within_spec(clean, got));
    };
    for (const Mode mode : modes()) {
      AttentionProblem spoilt = clean;
      spoilt.q.set(vector * 576 + 40, kNan);
      expect_one_head(spoilt, mode);
      spoilt = clean;
      spoilt.grad_out.set(vector * 512 + 300, kNan);
      expect_one_head(spoilt, mode);
    }
  }
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
  for (const std::int64_t heads : {3, 33}) {
    AttentionProblem problem =
        random_attention({.t_q = 4, .t_k = 20, .heads = heads, .topk = 9}, 102);
    problem.set_lengths({9, 0, 9, 9});
    problem.set_row(2, {});
    std::vector<double> sinks(static_cast<std::size_t>(heads), 0.5);
    sinks[1] = 1, sinks.back() = -1;
    problem.set_sink(sinks);
    const AttentionProblem clean = problem;
    for (const std::int64_t t : {1, 2}) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t c = 0; c < 576; ++c) problem.q.set({t, h, c}, kNan);
        for (std::int64_t c = 0; c < 512; ++c) problem.grad_out.set({t, h, c}, kNan);
      }
    }
    for (const Mode mode : kModes) {
      const AttentionResult got = run_attention(problem, runtime(mode));
      expect_result(clean, got, run_attention(clean, runtime(mode)), mode);
      EXPECT_TRUE(within_spec(clean, got));
    }
  }
}

TEST_P(AttentionNonFinite, EmptyRowIgnoresItsForwardResults) {
  for (const std::int64_t heads : {3, 33, 72}) {
    AttentionProblem problem =
        random_attention({.t_q = 2, .t_k = 20, .heads = heads, .topk = 9}, 103);
    problem.set_lengths({9, 0});
    for (const Mode mode : modes()) {
      const AttentionResult clean = run_attention(problem, runtime(mode));
      AttentionResult got = empty_result(problem, clean.backend);
      got.out = clean.out, got.lse = clean.lse;
      for (std::int64_t h = 0; h < heads; ++h) {
        got.lse.set({1, h}, kNan);
        for (std::int64_t c = 0; c < 512; ++c) got.out.set({1, h, c}, kNan);
      }
      run_placed(backward_args(problem, got), runtime(mode));
      got.out = clean.out, got.lse = clean.lse, got.max_logits = clean.max_logits;
      expect_result(problem, got, clean, mode);
    }
  }
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
