// Determinism, invariance, bounded memory. Bit for bit, scores included.

#include <thread>

#include "tests/indexer/fixture.h"
#include "tests/support/property.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

// Two documents in padded storage; the rows of both, and padding rows.
TopkProblem packed_problem(std::uint64_t seed) {
  TopkProblem problem = random_topk(150, 150, 5, 24, seed);
  for (std::int32_t t = 0; t < 150; ++t) {
    const std::int32_t start = t < 91 ? 0 : 91, end = t < 91 ? 88 : 147;
    problem.starts.set({t}, start);
    problem.causal_lengths.set({t}, t < end ? t + 1 - start : 0);
  }
  return problem;
}

void expect_rows_of(const TopkResult& part, const TopkResult& whole, std::int64_t begin,
                    std::int64_t key_shift = 0) {
  const std::int64_t rows = part.topk_length.size(0);
  HostTensor shifted = part.topk_indices;
  for (std::int64_t i = 0; i < shifted.elements(); ++i) {
    if (shifted.get(i) >= 0) shifted.set(i, shifted.get(i) + static_cast<double>(key_shift));
  }
  EXPECT_TRUE(same_bits(shifted, whole.topk_indices.rows(begin, rows))) << "from row " << begin;
  EXPECT_TRUE(same_bits(part.topk_length, whole.topk_length.rows(begin, rows)));
  EXPECT_TRUE(same_bits(*part.topk_scores, whole.topk_scores->rows(begin, rows)));
}

TEST_P(TopK, EveryRunGivesTheSameBits) {
  const TopkProblem problem = packed_problem(161);
  const TopkResult first = run_topk(problem, runtime());
  for (int repeat = 0; repeat < 10; ++repeat) {
    ASSERT_TRUE(same_topk_bits(run_topk(problem, runtime()), first)) << repeat;
  }
}

TEST_P(TopKOnHost, AnyThreadCountGivesTheSameBits) {
  const TopkProblem problem = packed_problem(162);
  const TopkResult one = run_topk(problem, runtime_with_threads(1));
  for (const int threads : {2, 3, 5, 200}) {
    EXPECT_TRUE(same_topk_bits(run_topk(problem, runtime_with_threads(threads)), one)) << threads;
  }
}

TEST_P(TopK, ModesGiveTheSameBits) {
  const TopkProblem problem = packed_problem(163);
  const TopkResult first = run_topk(problem, runtime());
  for (const Mode mode : {Mode::kDefault, Mode::kDeterministic, Mode::kInvariant}) {
    Runtime on = runtime();
    on.mode = mode;
    EXPECT_TRUE(same_topk_bits(run_topk(problem, on), first));
  }
}

// FAULTS: chunk remainders. The budget decides how many rows go together.
TEST_P(TopK, AnyScratchBudgetGivesTheSameBits) {
  const TopkProblem problem = packed_problem(164);
  const TopkResult want = run_topk(problem, runtime());
  for (const std::size_t kib : {0, 1, 16, 24, 32, 48, 64, 100, 200, 1000, 1 << 20}) {
    for (const int threads : {1, 2}) {
      Runtime on = runtime_with_threads(threads);
      on.scratch_budget_bytes = kib << 10;
      EXPECT_TRUE(same_topk_bits(run_topk(problem, on), want)) << kib << " KiB";
    }
  }
}

TEST_P(TopK, AnyNumberOfRowsGivesTheSameBits) {
  const TopkProblem problem = random_topk(140, 300, 3, 40, 165);
  const TopkResult whole = run_topk(problem, runtime());
  for (const std::int64_t rows : {1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 139}) {
    expect_rows_of(run_topk(rows_of(problem, 0, rows), runtime()), whole, 0);
    expect_rows_of(run_topk(rows_of(problem, 140 - rows, rows), runtime()), whole, 140 - rows);
  }
}

TEST_P(TopK, RowAloneGivesTheBitsOfThePack) {
  const TopkProblem problem = packed_problem(166);
  const TopkResult pack = run_topk(problem, runtime());
  for (const std::int64_t t : {0, 23, 24, 87, 90, 91, 92, 120, 146, 149}) {
    expect_rows_of(run_topk(rows_of(problem, t, 1), runtime()), pack, t);
  }
}

TEST_P(TopK, ContextParallelSliceGivesTheBitsOfThePack) {
  const TopkProblem problem = packed_problem(167);
  const TopkResult pack = run_topk(problem, runtime());
  for (std::int64_t rank = 0; rank < 3; ++rank) {
    expect_rows_of(run_topk(rows_of(problem, 50 * rank, 50), runtime()), pack, 50 * rank);
  }
}

TEST_P(TopK, DocumentAloneGivesTheBitsOfThePack) {
  const TopkProblem problem = packed_problem(168);
  const TopkResult pack = run_topk(problem, runtime());
  TopkProblem document = rows_of(problem, 91, 59);
  document.index_k = problem.index_k.rows(91, 59);
  document.starts.fill(0);
  expect_rows_of(run_topk(document, runtime()), pack, 91, 91);
}

TEST_P(TopK, KeysBehindTheRowChangeNothing) {
  TopkProblem problem = random_topk(3, 400, 4, 30, 169);
  problem.set_rows({0, 17, 100}, {250, 200, 150});
  const TopkResult want = run_topk(problem, runtime());
  TopkProblem shorter = problem;
  shorter.index_k = problem.index_k.rows(0, 250);
  EXPECT_TRUE(same_topk_bits(run_topk(shorter, runtime()), want));
}

TEST_P(TopK, ScoresDoNotChangeTheSelection) {
  const TopkProblem problem = packed_problem(170);
  const TopkResult with = run_topk(problem, runtime(), WantScores::kYes);
  const TopkResult without = run_topk(problem, runtime(), WantScores::kNo);
  EXPECT_TRUE(same_bits(with.topk_indices, without.topk_indices));
  EXPECT_TRUE(same_bits(with.topk_length, without.topk_length));
}

TEST_P(TopK, StridedInputsGiveTheBitsOfContiguousOnes) {
  const TopkProblem contiguous = random_topk(9, 200, 3, 20, 171);
  const TopkResult want = run_topk(contiguous, runtime());
  TopkProblem strided = contiguous;  // the gaps hold NaN
  strided.index_q = contiguous.index_q.with_strides({501, 131, 1});
  strided.index_k = contiguous.index_k.with_strides({133, 1});
  strided.head_weights = contiguous.head_weights.with_strides({5, 1});
  EXPECT_TRUE(same_topk_bits(run_topk(strided, runtime()), want));
  strided.index_q = contiguous.index_q.with_strides({128, 9 * 128, 1});  // heads outside
  EXPECT_TRUE(same_topk_bits(run_topk(strided, runtime()), want));
}

TEST_P(TopK, UnalignedPointersGiveTheSameBits) {
  for (const DType weights : {DType::kFloat32, DType::kBFloat16}) {
    TopkProblem aligned = random_topk(5, 150, 3, 20, 172);
    aligned.head_weights = aligned.head_weights.as(weights);
    TopkProblem problem = aligned;
    problem.index_q = aligned.index_q.with_unaligned_memory();
    problem.index_k = aligned.index_k.with_unaligned_memory();
    problem.head_weights = aligned.head_weights.with_unaligned_memory();
    problem.starts = aligned.starts.with_unaligned_memory();
    problem.causal_lengths = aligned.causal_lengths.with_unaligned_memory();
    const TopkResult want = run_topk(aligned, runtime());
    EXPECT_TRUE(same_topk_bits(run_topk(problem, runtime()), want));

    const HostTensor topk_indices = HostTensor::unaligned(DType::kInt32, {5, 1, 20});
    const HostTensor topk_scores = HostTensor::unaligned(DType::kFloat32, {5, 20});
    IndexerTopkArgs args = problem.inputs();
    args.topk_indices = topk_indices;
    args.topk_scores = topk_scores;
    run_placed(args, runtime());
    EXPECT_TRUE(same_bits(topk_indices, want.topk_indices));
    EXPECT_TRUE(same_bits(topk_scores, *want.topk_scores));
    EXPECT_TRUE(topk_indices.bands_intact() && topk_scores.bands_intact());
  }
}

TEST_P(TopK, CallsFromSeveralThreadsDoNotDisturbEachOther) {
  const TopkProblem problems[] = {packed_problem(173), random_topk(20, 500, 2, 33, 174)};
  const TopkResult want[] = {run_topk(problems[0], runtime()), run_topk(problems[1], runtime())};
  std::vector<std::string> failures(2);
  const auto work = [&](std::size_t i) {
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto same = same_topk_bits(run_topk(problems[i], runtime()), want[i]);
      if (!same) failures[i] = same.message();
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
  EXPECT_EQ(failures, std::vector<std::string>(2));
}

TEST_P(TopK, PropertyRowAloneGivesTheBitsOfThePack) {
  const Runtime on = runtime();
  check_property(30, 1004, [&on] {
    const auto between = [](std::int64_t low, std::int64_t high) {
      return *rc::gen::inRange(low, high + 1);
    };
    const std::int64_t t_q = between(2, 30);
    const TopkProblem problem = random_topk(t_q, between(t_q, 300), between(1, 9), between(1, 60),
                                            static_cast<std::uint64_t>(between(0, 1 << 20)));
    const TopkResult pack = run_topk(problem, on);
    const std::int64_t t = between(0, t_q - 1);
    const TopkResult alone = run_topk(rows_of(problem, t, 1), on);
    RC_ASSERT(bool{same_bits(alone.topk_indices, pack.topk_indices.rows(t, 1))});
    RC_ASSERT(bool{same_bits(*alone.topk_scores, pack.topk_scores->rows(t, 1))});
  });
}

// Budgets below what the scores of all rows need; a device holds more rows at once.
std::vector<std::size_t> budgets_below_the_scores(bool is_on_device) {
  if (is_on_device) return {std::size_t{8} << 20, std::size_t{24} << 20};
  return {std::size_t{1} << 17, std::size_t{1} << 20};
}

// "No [T_q, T_k] score tensor; scratch under a stated budget at any length."
TEST_P(TopKBounded, ScratchStaysWithinTheBudget) {
  for (const std::int64_t t_k : {2000, 200000}) {
    TopkProblem problem = causal_topk(40, t_k, 1, 512);
    Random random(175);
    for (std::int64_t s = 0; s < t_k; ++s) {
      problem.index_k.set({s, 0}, static_cast<double>(random.integer(0, 120)));
    }
    for (std::int64_t t = 0; t < 40; ++t) problem.index_q.set({t, 0, 0}, 1);
    problem.head_weights.fill(1);
    const TopkResult want = run_topk(problem, runtime());
    EXPECT_TRUE(exactly_best(rows_of(problem, 39, 1),
                             {want.topk_indices.rows(39, 1), want.topk_length.rows(39, 1),
                              want.topk_scores->rows(39, 1)}));
    for (const std::size_t budget : budgets_below_the_scores(is_on_device())) {
      Usage usage;
      Runtime on = runtime();
      on.scratch_budget_bytes = budget;
      on.usage = &usage;
      EXPECT_TRUE(same_topk_bits(run_topk(problem, on), want));
      EXPECT_GT(usage.peak_scratch_bytes.load(), 0u);
      EXPECT_LE(usage.peak_scratch_bytes.load(), budget) << "T_k " << t_k;
      EXPECT_EQ(usage.scratch_bytes.load(), 0u);
    }
  }
}

TEST_P(TopKBounded, DefaultBudgetHoldsAtFullWidth) {
  const TopkProblem problem = random_topk(200, 2300, 1, 2048, 176);
  Usage usage;
  Runtime on = runtime_with_threads(16);
  on.usage = &usage;
  run_topk(problem, on, WantScores::kNo);
  EXPECT_LE(usage.peak_scratch_bytes.load(), std::size_t{256} << 20);
}

TEST_P(TopKOnHost, ProgressCountsToItsTotal) {
  Progress progress;
  Runtime on = runtime();
  on.progress = &progress;
  run_topk(packed_problem(177), on);
  EXPECT_EQ(progress.total.load(), 150);
  EXPECT_EQ(progress.done.load(), 150);
}

}  // namespace
}  // namespace flashdsa::test
