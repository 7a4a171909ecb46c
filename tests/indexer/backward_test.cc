// Gradients of the selected scores: values, slots, non-finite numbers, laws.

#include <cmath>
#include <limits>

#include "tests/indexer/fixture.h"
#include "tests/support/mapped_memory.h"
#include "tests/support/property.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int32_t kMaxInt = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kMinInt = std::numeric_limits<std::int32_t>::min();

// One row of `heads` heads of weight 1 that selects all of `t_k` keys; all else is zero.
ScoreGradientProblem zero_problem(std::int64_t heads, std::int64_t t_k) {
  ScoreGradientProblem problem = integer_score_gradients({1, t_k, heads, t_k}, 0);
  problem.index_q.fill(0);
  problem.index_k.fill(0);
  problem.head_weights.fill(1);
  problem.grad_scores.fill(1);
  return problem;
}

// ------------------------------------------------------------------------------ values

// Dots of head 0 with the keys (3, 3) and (-1, 4): 3 and -1; of head 1: 6 and 8.
TEST_P(IndexerBackward, WorkedExample) {
  ScoreGradientProblem problem = zero_problem(2, 2);
  problem.index_q.set({0, 0, 0}, 1);
  problem.index_q.set({0, 1, 1}, 2);
  problem.index_k.set({0, 0}, 3);
  problem.index_k.set({0, 1}, 3);
  problem.index_k.set({1, 0}, -1);
  problem.index_k.set({1, 1}, 4);
  problem.head_weights.set({0, 0}, 0.5);
  problem.head_weights.set({0, 1}, -0.25);
  problem.grad_scores.set({0, 0}, 2);
  problem.grad_scores.set({0, 1}, 10);
  ScoreGradientProblem want = zero_problem(2, 2);  // its tensors hold the gradients
  want.index_q.set({0, 0, 0}, 2 * 0.5 * 3);
  want.index_q.set({0, 0, 1}, 2 * 0.5 * 3);
  want.index_q.set({0, 1, 0}, -0.25 * (2 * 3 + 10 * -1));
  want.index_q.set({0, 1, 1}, -0.25 * (2 * 3 + 10 * 4));
  want.index_k.set({0, 0}, 2 * 0.5 * 1);
  want.index_k.set({0, 1}, 2 * -0.25 * 2);
  want.index_k.set({1, 1}, 10 * -0.25 * 2);
  want.head_weights.set({0, 0}, 2 * 3);
  want.head_weights.set({0, 1}, 2 * 6 + 10 * 8);
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, runtime()),
                                 {want.index_q, want.index_k, want.head_weights}));
}

// sum over the slots of g * score, in plain loops.
double weighted_scores(const ScoreGradientProblem& problem) {
  double sum = 0;
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    for (std::int64_t j = 0; j < problem.topk(); ++j) {
      const auto key = static_cast<std::int64_t>(problem.topk_indices.get({t, 0, j}));
      for (std::int64_t h = 0; h < problem.heads() && key >= 0; ++h) {
        double dot = 0;
        for (std::int64_t c = 0; c < 128; ++c) {
          dot += problem.index_q.get({t, h, c}) * problem.index_k.get({key, c});
        }
        sum +=
            problem.grad_scores.get({t, j}) * problem.head_weights.get({t, h}) * std::max(0.0, dot);
      }
    }
  }
  return sum;
}

// The sum is linear in every single input where no dot changes its sign.
TEST(IndexerBackwardReference, AgreesWithFiniteDifferences) {
  ScoreGradientProblem problem = in_float64(random_score_gradients({3, 6, 3, 4}, 301));
  problem.set_row(1, {5, -1, 5, 2});
  const ScoreGradients got = run_score_gradients(problem, reference_runtime());
  const auto expect_slopes = [&](HostTensor& input, const HostTensor& gradient, std::int64_t step) {
    for (std::int64_t i = 0; i < input.elements(); i += step) {
      constexpr double kStep = 1e-5;
      const double value = input.get(i);
      input.set(i, value + kStep);
      const double above = weighted_scores(problem);
      input.set(i, value - kStep);
      const double below = weighted_scores(problem);
      input.set(i, value);
      EXPECT_NEAR(gradient.get(i), (above - below) / (2 * kStep), 1e-9) << i;
    }
  };
  expect_slopes(problem.index_q, got.grad_index_q, 13);
  expect_slopes(problem.index_k, got.grad_index_k, 13);
  expect_slopes(problem.head_weights, got.grad_head_weights, 1);
}

TEST_P(IndexerBackward, ExactSumsGiveTheBitsOfTheReference) {
  for (const std::int64_t heads : {1, 2, 7, 16, 33, 64}) {
    const ScoreGradientProblem problem = integer_score_gradients({9, 200, heads, 150}, 302);
    for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
      EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, runtime(), keys),
                                     run_score_gradients(problem, reference_runtime(), keys)));
    }
  }
}

TEST_P(IndexerBackward, EveryNumberOfHeadsIsWithinSpec) {
  for (const std::int64_t heads : {1, 2, 3, 5, 8, 15, 17, 31, 32, 33, 48, 63, 64}) {
    const ScoreGradientProblem problem = random_score_gradients({6, 90, heads, 40}, 303);
    EXPECT_TRUE(gradients_within_spec(problem, run_score_gradients(problem, runtime())));
  }
}

TEST_P(IndexerBackward, EveryWidthIsWithinSpec) {
  for (const std::int64_t topk : {1, 2, 3, 5, 31, 143, 144, 145, 287, 289}) {
    const ScoreGradientProblem problem = random_score_gradients({5, 300, 4, topk}, 304);
    EXPECT_TRUE(gradients_within_spec(problem, run_score_gradients(problem, runtime())));
  }
  for (const std::int64_t topk : {2047, 2048}) {
    const ScoreGradientProblem problem = random_score_gradients({2, 2500, 32, topk}, 305);
    EXPECT_TRUE(gradients_within_spec(problem, run_score_gradients(problem, runtime())));
  }
}

TEST_P(IndexerBackward, EveryTypeIsWithinSpec) {
  ScoreGradientProblem problem = random_score_gradients({20, 150, 6, 50}, 306);
  for (const DType weights : {DType::kFloat32, DType::kBFloat16}) {
    problem.head_weights = problem.head_weights.as(weights);
    const ScoreGradients narrow = run_score_gradients(problem, repeatable(), DType::kBFloat16);
    const ScoreGradients wide = run_score_gradients(problem, repeatable(), DType::kFloat32);
    EXPECT_TRUE(gradients_within_spec(problem, narrow));
    EXPECT_TRUE(gradients_within_spec(problem, wide));
    EXPECT_TRUE(same_bits(wide.grad_index_k.as(DType::kBFloat16), narrow.grad_index_k));
    EXPECT_TRUE(same_bits(wide.grad_index_q, narrow.grad_index_q));
    EXPECT_TRUE(same_bits(wide.grad_head_weights, narrow.grad_head_weights));
  }
}

TEST_P(IndexerBackward, PropertyGradientsAreWithinSpec) {
  const Runtime on = runtime();
  check_property(20, 1007, [&on] {
    const auto between = [](std::int64_t low, std::int64_t high) {
      return *rc::gen::inRange(low, high + 1);
    };
    const std::int64_t t_k = between(20, 200);
    const ScoreGradientProblem problem =
        random_score_gradients({between(1, 20), t_k, between(1, 12), between(1, 20)},
                               static_cast<std::uint64_t>(between(0, 1 << 20)));
    const auto verdict = gradients_within_spec(problem, run_score_gradients(problem, on));
    if (!verdict) RC_FAIL(std::string(verdict.message()));
  });
}

// ------------------------------------------------------------------------------ slots

TEST_P(IndexerBackward, SlotsThatDoNotCountContributeNothing) {
  ScoreGradientProblem dense = integer_score_gradients({2, 30, 3, 8}, 307);
  dense.set_row(0, {4, 9, 29});
  dense.set_row(1, {7});
  ScoreGradientProblem holes = dense;
  holes.set_row(0, {-1, 4, 30, kMaxInt, 9, kMinInt, 29, 3});
  holes.set_row(1, {7, 8, 30, 1, 2, 3, -1, -2});
  holes.set_lengths({7, 1});
  holes.grad_scores.fill(kNan);
  holes.grad_scores.set({0, 1}, dense.grad_scores.get({0, 0}));
  holes.grad_scores.set({0, 4}, dense.grad_scores.get({0, 1}));
  holes.grad_scores.set({0, 6}, dense.grad_scores.get({0, 2}));
  holes.grad_scores.set({1, 0}, dense.grad_scores.get({1, 0}));
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(holes, runtime()),
                                 run_score_gradients(dense, runtime())));
}

TEST_P(IndexerBackward, LengthsOutsideTheRowAreCutToIt) {
  ScoreGradientProblem problem = random_score_gradients({2, 30, 3, 8}, 308);
  const ScoreGradients whole = run_score_gradients(problem, runtime());
  problem.set_lengths({8, kMaxInt});
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, runtime()), whole));
  problem.set_lengths({0, kMinInt});
  const ScoreGradients none = run_score_gradients(problem, runtime());
  EXPECT_TRUE(all_zero(values_of("grad_index_q", none.grad_index_q)));
  EXPECT_TRUE(all_zero(values_of("grad_index_k", none.grad_index_k)));
  EXPECT_TRUE(all_zero(values_of("grad_head_weights", none.grad_head_weights)));
}

TEST_P(IndexerBackward, AKeyInTwoSlotsCountsTwice) {
  ScoreGradientProblem once = integer_score_gradients({2, 20, 5, 3}, 309);
  once.set_row(0, {3, 11});
  once.grad_scores.set({0, 0}, 3);
  once.grad_scores.set({0, 1}, -1);
  ScoreGradientProblem twice = once;
  twice.set_row(0, {3, 11, 3});
  twice.grad_scores.set({0, 0}, 1);
  twice.grad_scores.set({0, 2}, 2);
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(twice, runtime()),
                                 run_score_gradients(once, runtime())));
}

TEST_P(IndexerBackward, RowsWithoutKeysContributeNothingWhateverTheyHold) {
  const ScoreGradientProblem problem = random_score_gradients({3, 40, 4, 6}, 310);
  ScoreGradientProblem spoilt = problem;
  spoilt.set_row(1, {-1, 40, kMaxInt});
  for (std::int64_t h = 0; h < 4; ++h) spoilt.head_weights.set({1, h}, kNan);
  for (std::int64_t j = 0; j < 6; ++j) spoilt.grad_scores.set({1, j}, kNan);
  for (std::int64_t i = 0; i < 4 * 128; ++i) spoilt.index_q.set(4 * 128 + i, kNan);
  ScoreGradientProblem clean = problem;
  clean.set_row(1, {});
  const ScoreGradients got = run_score_gradients(spoilt, runtime());
  EXPECT_TRUE(same_gradient_bits(got, run_score_gradients(clean, runtime())));
  EXPECT_TRUE(all_zero(values_of("grad_index_q", got.grad_index_q.rows(1, 1))));
  EXPECT_TRUE(all_zero(values_of("grad_head_weights", got.grad_head_weights.rows(1, 1))));
}

TEST_P(IndexerBackward, KeysThatNobodySelectedAreNotReadAndGetZero) {
  ScoreGradientProblem problem = random_score_gradients({2, 9, 3, 4}, 311);
  problem.set_row(0, {0, 3, 8});
  problem.set_row(1, {3, 5});
  const ScoreGradients want = run_score_gradients(problem, runtime());
  for (const std::int64_t key : {1, 2, 4, 6, 7}) {
    for (std::int64_t c = 0; c < 128; ++c) problem.index_k.set({key, c}, kNan);
    EXPECT_TRUE(all_zero(values_of("grad_index_k", want.grad_index_k.rows(key, 1))));
  }
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, runtime()), want));
}

// ------------------------------------------------------------------------------ the kink

TEST_P(IndexerBackward, ADotOfZeroHasTheDerivativeZero) {
  ScoreGradientProblem problem = zero_problem(2, 3);
  problem.index_q.set({0, 0, 0}, 1);  // head 1 is zero
  problem.index_k.set({0, 1}, 5);     // 1 * 0
  problem.index_k.set({1, 0}, -0.0);  // 1 * -0
  problem.index_k.set({2, 0}, -3);    // below zero
  const ScoreGradients got = run_score_gradients(problem, runtime());
  EXPECT_TRUE(all_zero(values_of("grad_index_q", got.grad_index_q)));
  EXPECT_TRUE(all_zero(values_of("grad_index_k", got.grad_index_k)));
  EXPECT_TRUE(all_zero(values_of("grad_head_weights", got.grad_head_weights)));
}

// Some instructions of CPUs take subnormal numbers as zero; the score does not.
TEST_P(IndexerBackward, TheSmallestDotAboveZeroHasTheDerivativeOne) {
  ScoreGradientProblem problem = zero_problem(1, 3);
  problem.index_q.set({0, 0, 0}, 1);
  problem.index_k.set({0, 0}, 0x1p-133);
  problem.index_k.set({1, 0}, -0x1p-133);
  problem.index_k.set({2, 0}, 0x1p-60);
  problem.grad_scores.set({0, 0}, 3);
  problem.grad_scores.set({0, 2}, 0);
  const ScoreGradients got = run_score_gradients(problem, runtime());
  EXPECT_EQ(got.grad_index_k.get({0, 0}), 3);
  EXPECT_EQ(got.grad_index_k.get({1, 0}), 0);
  EXPECT_EQ(got.grad_head_weights.get({0, 0}), 0x3p-133);
}

TEST_P(IndexerBackward, ANanDotHasTheDerivativeZeroAndIsANanScore) {
  ScoreGradientProblem problem = integer_score_gradients({2, 6, 3, 3}, 312);
  problem.set_row(0, {0, 2, 4});
  problem.set_row(1, {1, 3, 5});
  const ScoreGradients clean = run_score_gradients(problem, runtime());
  problem.index_k.set({2, 7}, kNan);
  const ScoreGradients got = run_score_gradients(problem, runtime());
  EXPECT_TRUE(all_zero(values_of("grad_index_k", got.grad_index_k.rows(2, 1))));
  for (std::int64_t h = 0; h < 3; ++h) {
    EXPECT_TRUE(std::isnan(got.grad_head_weights.get({0, h})));
    for (std::int64_t c = 0; c < 128; ++c) {  // 0 * NaN
      EXPECT_EQ(std::isnan(got.grad_index_q.get({0, h, c})), c == 7);
    }
  }
  // The other row and the other keys see nothing of it.
  EXPECT_TRUE(same_bits(got.grad_index_q.rows(1, 1), clean.grad_index_q.rows(1, 1)));
  EXPECT_TRUE(same_bits(got.grad_head_weights.rows(1, 1), clean.grad_head_weights.rows(1, 1)));
  for (const std::int64_t key : {0, 1, 3, 4, 5}) {
    EXPECT_TRUE(same_bits(got.grad_index_k.rows(key, 1), clean.grad_index_k.rows(key, 1)));
  }
}

TEST_P(IndexerBackward, NonFiniteNumbersStandWhereTheReferenceHasThem) {
  ScoreGradientProblem problem = random_score_gradients({8, 60, 5, 20}, 313);
  problem.index_k.set({7, 3}, kInf);
  problem.index_k.set({20, 90}, -kInf);
  problem.index_k.set({31, 127}, kNan);
  problem.index_q.set({2, 1, 64}, kInf);
  problem.index_q.set({3, 4, 0}, kNan);
  problem.head_weights.set({4, 2}, kInf);
  problem.head_weights.set({5, 0}, kNan);
  problem.grad_scores.set({6, 5}, kNan);
  problem.grad_scores.set({7, 0}, -kInf);
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    EXPECT_TRUE(gradients_within_spec(problem, run_score_gradients(problem, runtime(), keys)));
  }
}

// ------------------------------------------------------------------------------ sizes

TEST_P(IndexerBackward, NoQueriesLeaveGradientsOfZero) {
  const ScoreGradientProblem problem = random_score_gradients({0, 4, 3, 5}, 314);
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const ScoreGradients got = run_score_gradients(problem, runtime(), keys);
    EXPECT_TRUE(all_zero(values_of("grad_index_k", got.grad_index_k)));
  }
}

TEST_P(IndexerBackward, NoQueriesMayComeWithNullPointers) {
  const HostTensor index_k(DType::kBFloat16, {3, 128}), grad_index_k(DType::kBFloat16, {3, 128});
  IndexerBackwardArgs args;
  args.index_q = TensorView::contiguous(nullptr, DType::kBFloat16, {0, 4, 128});
  args.index_k = index_k;
  args.head_weights = TensorView::contiguous(nullptr, DType::kFloat32, {0, 4});
  args.topk_indices = TensorView::contiguous(nullptr, DType::kInt32, {0, 1, 8});
  args.grad_scores = TensorView::contiguous(nullptr, DType::kFloat32, {0, 8});
  args.grad_index_q = TensorView::contiguous(nullptr, DType::kBFloat16, {0, 4, 128});
  args.grad_index_k = grad_index_k;
  args.grad_head_weights = TensorView::contiguous(nullptr, DType::kFloat32, {0, 4});
  EXPECT_NO_THROW(run_placed(args, runtime()));
  EXPECT_TRUE(all_zero(values_of("grad_index_k", grad_index_k)));
}

TEST_P(IndexerBackward, NoKeysLeaveEveryRowEmpty) {
  ScoreGradientProblem problem = random_score_gradients({3, 0, 2, 5}, 315);
  problem.set_row(0, {0, 1, 2, 3, 4});  // no such keys
  const ScoreGradients got = run_score_gradients(problem, runtime());
  EXPECT_TRUE(all_zero(values_of("grad_index_q", got.grad_index_q)));
  EXPECT_TRUE(all_zero(values_of("grad_head_weights", got.grad_head_weights)));
}

TEST_P(IndexerBackward, ManyKeysAreRight) {
  ScoreGradientProblem problem = integer_score_gradients({3, 300000, 2, 40}, 316);
  problem.set_row(0, {0, 149999, 299999});
  const ScoreGradients got = run_score_gradients(problem, runtime());
  EXPECT_TRUE(same_gradient_bits(got, run_score_gradients(problem, reference_runtime())));
}

// Row strides whose products pass 2^31 and 2^32 elements, over memory that is mostly not there.
TEST_P(IndexerBackward, OffsetsBeyond32BitsAreRight) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 30) + 2048;
  const ScoreGradientProblem problem = random_score_gradients({5, 6, 2, 4}, 317);
  const ScoreGradients want = run_score_gradients(problem, repeatable());
  const MappedMemory q(5 * kStride * 2), k(6 * kStride * 2), weights(5 * kStride * 4);
  const MappedMemory indices(5 * kStride * 4), grads(5 * kStride * 4);
  for (const MappedMemory* memory : {&q, &k, &weights, &indices, &grads}) {
    if (memory->data() == nullptr) GTEST_SKIP() << "the system maps no 90 GB of empty memory";
  }
  const auto spread = [&](const HostTensor& tensor, const MappedMemory& memory) {
    TensorView view = tensor.view();
    const std::size_t row_bytes = view.bytes() / static_cast<std::size_t>(view.shape[0]);
    const std::size_t step = static_cast<std::size_t>(kStride) * dtype_size(view.dtype);
    for (std::size_t i = 0; i < static_cast<std::size_t>(view.shape[0]); ++i) {
      std::copy_n(view.as<std::byte>() + i * row_bytes, row_bytes, memory.data() + i * step);
    }
    view.data = memory.data();
    view.strides[0] = kStride;
    return view;
  };
  const ScoreGradients again = empty_gradients(problem);
  IndexerBackwardArgs args = backward_args(problem, again);
  args.index_q = spread(problem.index_q, q);
  args.index_k = spread(problem.index_k, k);
  args.head_weights = spread(problem.head_weights, weights);
  args.topk_indices = spread(problem.topk_indices, indices);
  args.grad_scores = spread(problem.grad_scores, grads);
  run_placed(args, repeatable());
  EXPECT_TRUE(same_gradient_bits(again, want));
}

// ------------------------------------------------------------------------------ laws

TEST_P(IndexerBackwardOnHost, AnyThreadCountAndModeGivesTheSameBits) {
  const ScoreGradientProblem problem = random_score_gradients({70, 90, 5, 80}, 318);
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const ScoreGradients one = run_score_gradients(problem, runtime_with_threads(1), keys);
    for (const int threads : {1, 2, 3, 5, 200}) {
      const Runtime on = runtime_with_threads(threads);
      EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, on, keys), one)) << threads;
    }
    for (const Mode mode : {Mode::kDeterministic, Mode::kInvariant}) {
      EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, runtime(mode), keys), one));
    }
  }
}

TEST_P(IndexerBackward, ModesThatRepeatGiveTheSameBits) {
  const ScoreGradientProblem problem = random_score_gradients({70, 90, 5, 80}, 325);
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const ScoreGradients want = run_score_gradients(problem, runtime(Mode::kInvariant), keys);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Runtime on = runtime(Mode::kDeterministic);
      EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, on, keys), want)) << repeat;
    }
    // The rows' own gradients repeat in every mode.
    const ScoreGradients got = run_score_gradients(problem, runtime(), keys);
    EXPECT_TRUE(same_bits(got.grad_index_q, want.grad_index_q));
    EXPECT_TRUE(same_bits(got.grad_head_weights, want.grad_head_weights));
  }
}

// FAULTS: chunk remainders. The budget decides how many rows go together.
TEST_P(IndexerBackward, AnyScratchBudgetGivesTheSameBits) {
  const ScoreGradientProblem problem = random_score_gradients({70, 90, 5, 80}, 319);
  const ScoreGradients want = run_score_gradients(problem, repeatable());
  for (const std::size_t kib : {0, 1, 60, 100, 200, 300, 500, 1000}) {
    for (const int threads : {1, 2}) {
      Runtime on = repeatable();
      on.threads = threads;
      on.scratch_budget_bytes = kib << 10;
      EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, on), want)) << kib << " KiB";
    }
  }
}

TEST_P(IndexerBackwardBounded, ScratchStaysWithinTheBudget) {
  const ScoreGradientProblem problem = random_score_gradients({200, 4000, 16, 512}, 320);
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const ScoreGradients want = run_score_gradients(problem, repeatable(), keys);
    const std::size_t sums = keys == DType::kBFloat16 ? 4000 * 512 : 0;
    for (const std::size_t mib : {1, 4, 16}) {
      Usage usage;
      Runtime on = repeatable();
      on.threads = 8;
      on.scratch_budget_bytes = sums + (mib << 20);
      on.usage = &usage;
      EXPECT_TRUE(same_gradient_bits(run_score_gradients(problem, on, keys), want));
      EXPECT_GT(usage.peak_scratch_bytes.load(), sums);
      EXPECT_LE(usage.peak_scratch_bytes.load(), on.scratch_budget_bytes);
      EXPECT_EQ(usage.scratch_bytes.load(), 0u);
    }
  }
}

// grad_index_k is a sum over rows; the other two are the rows' own.
TEST_P(IndexerBackward, RowAloneGivesTheBitsOfThePack) {
  ScoreGradientProblem problem = random_score_gradients({40, 90, 5, 60}, 321);
  std::vector<std::int32_t> lengths;
  for (std::int32_t t = 0; t < 40; ++t) lengths.push_back(t * 7 % 61);
  problem.set_lengths(lengths);
  const ScoreGradients pack = run_score_gradients(problem, runtime());
  for (std::int64_t t = 0; t < 40; t += 3) {
    const ScoreGradients alone = run_score_gradients(rows_of(problem, t, 1), runtime());
    EXPECT_TRUE(same_bits(alone.grad_index_q, pack.grad_index_q.rows(t, 1))) << t;
    EXPECT_TRUE(same_bits(alone.grad_head_weights, pack.grad_head_weights.rows(t, 1))) << t;
  }
}

TEST_P(IndexerBackward, StridedInputsGiveTheBitsOfContiguousOnes) {
  const ScoreGradientProblem contiguous = random_score_gradients({9, 70, 3, 20}, 322);
  const ScoreGradients want = run_score_gradients(contiguous, repeatable());
  ScoreGradientProblem strided = contiguous;  // the gaps hold NaN
  strided.index_q = contiguous.index_q.with_strides({501, 131, 1});
  strided.index_k = contiguous.index_k.with_strides({133, 1});
  strided.head_weights = contiguous.head_weights.with_strides({5, 1});
  strided.topk_indices = contiguous.topk_indices.with_strides({23, 20, 1});
  strided.grad_scores = contiguous.grad_scores.with_strides({27, 1});
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(strided, repeatable()), want));
  strided.index_q = contiguous.index_q.with_strides({128, 9 * 128, 1});  // heads outside
  EXPECT_TRUE(same_gradient_bits(run_score_gradients(strided, repeatable()), want));
}

TEST_P(IndexerBackward, UnalignedPointersGiveTheSameBits) {
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const ScoreGradientProblem aligned = random_score_gradients({7, 70, 3, 20}, 323);
    const ScoreGradients want = run_score_gradients(aligned, repeatable(), keys);
    ScoreGradientProblem problem = aligned;
    problem.set_lengths({20, 20, 20, 20, 20, 20, 20});
    for (HostTensor* tensor :
         {&problem.index_q, &problem.index_k, &problem.head_weights, &problem.topk_indices,
          &*problem.topk_length, &problem.grad_scores}) {
      *tensor = tensor->with_unaligned_memory();
    }
    const ScoreGradients got = {HostTensor::unaligned(DType::kBFloat16, {7, 3, 128}),
                                HostTensor::unaligned(keys, {70, 128}),
                                HostTensor::unaligned(DType::kFloat32, {7, 3})};
    run_placed(backward_args(problem, got), repeatable());
    EXPECT_TRUE(same_gradient_bits(got, want));
    EXPECT_TRUE(got.grad_index_q.bands_intact() && got.grad_index_k.bands_intact() &&
                got.grad_head_weights.bands_intact());
  }
}

TEST_P(IndexerBackwardOnHost, ProgressCountsToItsTotal) {
  Progress progress;
  Runtime on = runtime();
  on.progress = &progress;
  run_score_gradients(random_score_gradients({150, 90, 2, 10}, 324), on);
  EXPECT_EQ(progress.total.load(), 150);
  EXPECT_EQ(progress.done.load(), 150);
}

}  // namespace
}  // namespace flashdsa::test
