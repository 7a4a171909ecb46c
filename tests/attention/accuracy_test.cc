// Every engine against float64 on the same BF16 inputs, within SPEC section 8.

#include <cmath>
#include <numeric>

#include "tests/attention/fixture.h"
#include "tests/support/property.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

TEST_P(Attention, AgreesWithFloat64AtBothHeadDims) {
  for (const std::int64_t dim : {512, 576}) {
    expect_within_spec(random_attention({6, 100, 8, 70, dim}, 21));
  }
}

TEST_P(Attention, AnyHeadCountIsRight) {
  for (const std::int64_t heads :
       {1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 64, 96, 127, 128}) {
    expect_within_spec(random_attention({.t_q = 2, .t_k = 24, .heads = heads, .topk = 11}, 22));
  }
}

TEST_P(Attention, AnyWidthIsRight) {
  for (const std::int64_t topk : {1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 257}) {
    for (const std::int64_t heads : {2, 11, 25, 40}) {
      expect_within_spec(
          random_attention({.t_q = 2, .t_k = 260, .heads = heads, .topk = topk}, 23));
    }
  }
}

TEST_P(Attention, RowsOfSeveralTilesAreRightAtAnyHeadCount) {
  for (const std::int64_t dim : {512, 576}) {
    for (const std::int64_t heads : {8, 13, 32, 64, 100}) {
      expect_within_spec(random_attention({3, 300, heads, 200, dim}, 35));
    }
  }
}

// More rows than a GPU has multiprocessors, so that a row follows another.
TEST_P(Attention, HundredsOfRowsAreRight) {
  const AttentionProblem problem =
      random_attention({.t_q = 300, .t_k = 200, .heads = 9, .topk = 70}, 36);
  EXPECT_TRUE(forward_within_spec(problem, run_forward(problem, runtime())));
}

TEST_P(Attention, HundredsOfRowsOfManyLengthsAreRight) {
  for (const std::int64_t heads : {3, 10, 18}) {
    expect_within_spec(rows_of_many_lengths(280, heads, 38));
  }
  for (const std::int64_t heads : {33, 72}) {  // fewer where no multiprocessor walks them
    expect_within_spec(rows_of_many_lengths((is_on_device() ? 6600 : 400) / heads, heads, 38));
  }
}

TEST_P(Attention, FullWidthIsRight) {
  expect_within_spec(random_attention({.t_q = 2, .t_k = 2100, .heads = 2, .topk = 2048}, 24));
}

TEST_P(Attention, MoreSlotsThanKeysIsRight) {
  AttentionProblem problem = random_attention({.t_q = 2, .t_k = 5, .heads = 3, .topk = 200}, 25);
  problem.topk_indices.fill(-1);
  problem.topk_indices.set({0, 0, 199}, 4);  // entries only in the last columns
  problem.topk_indices.set({0, 0, 198}, 2);
  problem.topk_indices.set({1, 0, 197}, 0);
  expect_within_spec(problem);
}

TEST_P(Attention, ManyRowsOfSharedKeysAreRight) {
  // More rows than a chunk of the backward, so that keys gather over chunks.
  expect_within_spec(random_attention({.t_q = 70, .t_k = 12, .heads = 2, .topk = 6}, 26));
}

TEST_P(Attention, KeysSpreadOverManySegmentsAreRight) {
  expect_within_spec(random_attention({.t_q = 5, .t_k = 1500, .heads = 2, .topk = 300}, 27));
}

// FAULTS: probabilities or D taken from rounded values lose large logits.
TEST_P(Attention, LogitsUpTo200StayAccurate) {
  for (const std::int64_t heads : {4, 33}) {
    for (const std::int64_t dim : {512, 576}) {
      AttentionProblem problem = random_attention({3, 64, heads, 64, dim}, 28);
      const AttentionResult first = reference_attention(problem);
      double top = 0;
      for (const double logit : first.max_logits.values()) top = std::max(top, logit);
      problem.softmax_scale *= 200 / top;
      expect_within_spec(problem);
    }
  }
}

// All logits near 200 or -200, so that their differences lose digits and no row is dominated.
TEST_P(Attention, LogitsFarFromZeroStayAccurate) {
  const auto expect_far = [&](double shift, std::int64_t heads) {
    for (const std::int64_t dim : {512, 576}) {
      AttentionProblem problem = random_attention({3, 64, heads, 64, dim}, 34);
      for (std::int64_t s = 0; s < problem.t_k(); ++s) problem.kv.set({s, 0, dim - 1}, 56);
      for (std::int64_t t = 0; t < problem.t_q(); ++t) {
        for (std::int64_t h = 0; h < problem.heads(); ++h) problem.q.set({t, h, dim - 1}, shift);
      }
      expect_within_spec(problem);
    }
  };
  expect_far(56.5, 4);
  expect_far(-56.5, 4);
  expect_far(56.5, 33);
}

// A row's logits grow by 16 from tile to tile, or fall; the rows have four tiles and three.
TEST_P(Attention, LogitsThatRiseOrFallAlongARowStayAccurate) {
  for (const double slope : {4., -4.}) {
    for (const std::int64_t heads : {3, 20, 33, 72}) {
      AttentionProblem problem =
          random_attention({.t_q = 2, .t_k = 256, .heads = heads, .topk = 200}, 37);
      for (std::int64_t s = 0; s < problem.t_k(); ++s) {
        problem.kv.set({s, 0, 575}, static_cast<double>(s));
      }
      for (std::int64_t t = 0; t < problem.t_q(); ++t) {
        std::vector<std::int32_t> keys(static_cast<std::size_t>(200 - 60 * t));
        std::iota(keys.begin(), keys.end(), static_cast<std::int32_t>(t));
        problem.set_row(t, keys);
        for (std::int64_t h = 0; h < heads; ++h) problem.q.set({t, h, 575}, slope);
      }
      EXPECT_TRUE(forward_within_spec(problem, run_forward(problem, runtime())));
    }
  }
}

TEST_P(Attention, VeryNegativeLogitsStayAccurate) {
  AttentionProblem problem = random_attention({.t_q = 2, .t_k = 20, .heads = 3, .topk = 9}, 29);
  Random random(29);
  for (std::int64_t s = 0; s < problem.t_k(); ++s) problem.kv.set({s, 0, 0}, -512);
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    for (std::int64_t h = 0; h < problem.heads(); ++h)
      problem.q.set({t, h, 0}, 32 + 32 * random.uniform());
  }
  const AttentionResult result = run_forward(problem, runtime());
  EXPECT_LT(result.max_logits.get({0, 0}), -900);
  EXPECT_TRUE(forward_within_spec(problem, result));
}

TEST_P(Attention, EqualKeysShareTheWeight) {
  for (const std::int64_t heads : {3, 33, 72}) {
    AttentionProblem problem =
        random_attention({.t_q = 2, .t_k = 50, .heads = heads, .topk = 50}, 30);
    for (std::int64_t s = 1; s < problem.t_k(); ++s) {
      for (std::int64_t c = 0; c < problem.head_dim(); ++c) {
        problem.kv.set({s, 0, c}, problem.kv.get({0, 0, c}));
      }
    }
    const AttentionResult result = run_attention(problem, runtime());
    EXPECT_TRUE(within_spec(problem, result));
    for (std::int64_t c = 0; c < 512; ++c) {
      const double value = problem.kv.get({0, 0, c});
      ASSERT_NEAR(result.out.get({1, heads - 1, c}), value, std::abs(value) * 0x1p-7) << c;
    }
  }
}

TEST_P(Attention, GradKvInFloat32IsRight) {
  for (const std::int64_t heads : {5, 33, 72}) {
    const AttentionProblem problem =
        random_attention({.t_q = 7, .t_k = 40, .heads = heads, .topk = 21}, 31);
    for (const Mode mode : modes()) {
      const AttentionResult single = run_attention(problem, runtime(mode), DType::kFloat32);
      EXPECT_TRUE(within_spec(problem, single));
      // It is what BF16 would have been rounded from, not a widened BF16.
      const AttentionResult half = run_attention(problem, runtime(mode), DType::kBFloat16);
      EXPECT_FALSE(same_bits(single.grad_kv, half.grad_kv.as(DType::kFloat32)));
      if (!gradients_repeat(mode)) continue;
      EXPECT_TRUE(same_bits(single.grad_kv.as(DType::kBFloat16), half.grad_kv));
    }
  }
}

TEST_P(Attention, OptionalOutputsChangeNothingElse) {
  for (const std::int64_t heads : {3, 33, 72}) {
    AttentionProblem problem =
        random_attention({.t_q = 3, .t_k = 30, .heads = heads, .topk = 12}, 32);
    std::vector<double> sinks(static_cast<std::size_t>(heads), 1);
    sinks[1] = 0, sinks.back() = -2;
    problem.set_sink(sinks);
    for (const Mode mode : modes()) {
      const AttentionResult full = run_attention(problem, runtime(mode));
      AttentionResult less = empty_result(problem, full.backend);
      AttentionForwardArgs forward = forward_args(problem, less);
      forward.max_logits.reset();
      run_placed(forward, runtime(mode));
      EXPECT_TRUE(less.max_logits.untouched());
      AttentionBackwardArgs backward = backward_args(problem, less);
      backward.grad_attn_sink.reset();
      run_placed(backward, runtime(mode));
      EXPECT_TRUE(less.grad_attn_sink->untouched());
      less.max_logits = full.max_logits;
      less.grad_attn_sink = full.grad_attn_sink;
      expect_result(problem, less, full, mode);
    }
  }
}

TEST(AttentionAuto, TakesBFloat16AndFloat64) {
  const AttentionProblem problem =
      random_attention({.t_q = 2, .t_k = 9, .heads = 2, .topk = 5}, 33);
  EXPECT_TRUE(within_spec(problem, run_attention(problem, {})));
  EXPECT_TRUE(
      same_result_bits(run_attention(in_float64(problem), {}), reference_attention(problem)));
}

// Random shapes, lengths, holes, duplicates, sinks and hostile slots.
AttentionProblem arbitrary_problem() {
  const auto between = [](std::int64_t low, std::int64_t high) {
    return *rc::gen::inRange(low, high + 1);
  };
  const AttentionShape shape{between(1, 5), between(1, 40), between(1, 9), between(1, 70),
                             between(0, 1) == 0 ? 512 : 576};
  AttentionProblem problem =
      random_attention(shape, static_cast<std::uint64_t>(between(0, 1 << 20)));
  Random random(problem.seed);
  problem.softmax_scale = 0.02 + 0.1 * random.uniform();
  const bool tidy = between(0, 2) == 0;
  for (std::int64_t i = 0; !tidy && i < problem.topk_indices.elements(); ++i) {
    problem.topk_indices.set(i, static_cast<double>(random.integer(-3, shape.t_k + 1)));
  }
  if (between(0, 1) == 0) {
    problem.topk_length = HostTensor(DType::kInt32, {shape.t_q});
    random.fill_integers(*problem.topk_length, -1, shape.topk + 1);
  }
  if (between(0, 1) == 0) {
    problem.attn_sink = HostTensor(DType::kFloat32, {shape.heads});
    random.fill_normal(*problem.attn_sink, 3);
  }
  return problem;
}

TEST_P(Attention, PropertyAnyProblemIsWithinSpec) {
  const Runtime on = runtime();
  check_property(40, 1001, [&on] {
    const AttentionProblem problem = arbitrary_problem();
    const auto verdict = within_spec(problem, run_attention(problem, on));
    if (!verdict) RC_FAIL(std::string(verdict.message()));
  });
}

}  // namespace
}  // namespace flashdsa::test
