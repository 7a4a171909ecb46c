// The indexer as work on a stream: captured in a graph, beside another stream, without waiting, on
// the caller's memory alone and within its budget. SPEC sections 3 and 7.

#include "tests/indexer/fixture.h"
#include "tests/support/cuda/device_test.h"

namespace flashdsa::test {
namespace {

// A problem and its results on the device; `download` brings the results to the host.
class DeviceTopk {
 public:
  DeviceTopk(TopkProblem problem, Stream stream, WantScores want = WantScores::kYes)
      : problem_(std::move(problem)),
        result_(empty_result(problem_, want)),
        mirror_(stream),
        args_(placed(topk_args(problem_, result_), mirror_)) {}

  void run(const Runtime& runtime) const { indexer_topk(args_, runtime); }

  const IndexerTopkArgs& args() const { return args_; }

  const TopkResult& download() {
    mirror_.download();
    return result_;
  }

  // Outputs that hold what no call leaves, and the inputs of another problem of the same shape.
  void upload(const TopkProblem& problem) {
    result_.topk_indices.fill(-7);
    result_.topk_length.fill(-7);
    if (result_.topk_scores) result_.topk_scores->fill(-7);
    overwrite(problem_.index_q, problem.index_q);
    overwrite(problem_.index_k, problem.index_k);
    overwrite(problem_.head_weights, problem.head_weights);
    overwrite(problem_.starts, problem.starts);
    overwrite(problem_.causal_lengths, problem.causal_lengths);
    mirror_.upload();
  }

 private:
  static void overwrite(HostTensor& to, const HostTensor& from) {
    for (std::int64_t i = 0; i < to.elements(); ++i) to.set(i, from.get(i));
  }

  TopkProblem problem_;
  TopkResult result_;
  Mirror mirror_;
  IndexerTopkArgs args_;
};

class TopKOnDevice : public DeviceTest {
 protected:
  void expect_result(const TopkProblem& problem, const TopkResult& got) const {
    const WantScores want = got.topk_scores ? WantScores::kYes : WantScores::kNo;
    EXPECT_TRUE(exactly_best(problem, got));
    EXPECT_TRUE(same_topk_bits(got, run_topk(problem, runtime(), want)));
  }
};

// Rows of two documents, an empty one, and lengths that the values alone tell.
TopkProblem problem_of(std::int64_t rows, std::int64_t heads, std::uint64_t seed) {
  TopkProblem problem = integer_topk(rows, 700, heads, 64, seed);
  const auto first = static_cast<std::int32_t>(seed % 300);
  for (std::int64_t t = 0; t < rows; ++t) {
    problem.starts.set(t, t % 2 == 0 ? 0 : first);
    problem.causal_lengths.set(t, static_cast<double>((t * 131) % (700 - first)));
  }
  return problem;
}

TEST_F(TopKOnDevice, GraphGivesTheBitsOfTheCall) {
  for (const std::int64_t heads : {3, 32, 64}) {
    for (const WantScores want : {WantScores::kNo, WantScores::kYes}) {
      const TopkProblem first = problem_of(20, heads, 321), second = problem_of(20, heads, 322);
      DeviceTopk device(first, stream(), want);
      device.run(runtime());  // loads the kernels
      stream().wait();
      const CapturedGraph graph(stream(), [&] { device.run(runtime()); });
      for (const TopkProblem* problem : {&first, &second}) {
        device.upload(*problem);
        graph.replay();
        expect_result(*problem, device.download());
      }
    }
  }
}

// FAULTS: shape-dependent scratch, stale under graph replay.
TEST_F(TopKOnDevice, GraphSurvivesChurnedMemoryAndOtherShapes) {
  const TopkProblem problem = problem_of(20, 8, 323), larger = problem_of(150, 8, 324);
  DeviceTopk device(problem, stream());
  device.run(runtime());
  stream().wait();
  const CapturedGraph graph(stream(), [&] { device.run(runtime()); });
  for (int replay = 0; replay < 100; ++replay) {
    churn_device_memory(stream());
    if (replay == 50) expect_result(larger, run_topk(larger, runtime()));
    if (replay % 10 == 0) device.upload(problem);
    graph.replay();
  }
  expect_result(problem, device.download());
}

// FAULTS: ties decided by arrival, another stream busy.
TEST_F(TopKOnDevice, TwoStreamsGiveTheBitsOfOne) {
  const OwnStream other;
  TopkProblem plateau = integer_topk(50, 8320, 1, 2048, 325);
  plateau.causal_lengths.fill(8320);
  const TopkProblem busy = problem_of(150, 32, 326);
  DeviceTopk first(plateau, stream()), second(busy, other);
  Runtime on_other = runtime();
  on_other.stream = other;
  const TopkResult want = run_topk(plateau, runtime());
  for (int repeat = 0; repeat < 50; ++repeat) {
    first.run(runtime());
    second.run(on_other);
    if (repeat % 10 != 0) continue;
    ASSERT_TRUE(same_topk_bits(first.download(), want)) << repeat;
  }
  ASSERT_TRUE(same_topk_bits(first.download(), want));
  EXPECT_TRUE(exactly_best(
      rows_of(plateau, 7, 1),
      {want.topk_indices.rows(7, 1), want.topk_length.rows(7, 1), want.topk_scores->rows(7, 1)}));
  expect_result(busy, second.download());
}

TEST_F(TopKOnDevice, RowsDoNotDependOnTheirNumber) {
  TopkProblem many = integer_topk(5000, 8320, 1, 2048, 327);
  many.causal_lengths.fill(8320);
  const TopkResult all = run_topk(many, runtime());
  for (const std::int64_t t : {0, 1, 2499, 4999}) {
    const TopkResult alone = run_topk(rows_of(many, t, 1), runtime());
    EXPECT_TRUE(same_bits(alone.topk_indices, all.topk_indices.rows(t, 1))) << t;
    EXPECT_TRUE(same_bits(*alone.topk_scores, all.topk_scores->rows(t, 1))) << t;
  }
}

TEST_F(TopKOnDevice, IsAsynchronous) {
  for (const WantScores want : {WantScores::kNo, WantScores::kYes}) {
    const DeviceTopk device(problem_of(150, 8, 328), stream(), want);
    expect_asynchronous(runtime(), [&](const Runtime& on) { device.run(on); });
  }
}

TEST_F(TopKOnDevice, UnalignedInputsAreAsynchronous) {
  TopkProblem problem = problem_of(20, 8, 329);
  problem.index_q = problem.index_q.with_unaligned_memory();
  problem.index_k = problem.index_k.with_unaligned_memory();
  const DeviceTopk device(problem, stream());
  expect_asynchronous(runtime(), [&](const Runtime& on) { device.run(on); });
}

TEST_F(TopKOnDevice, LongContextStaysWithinTheDefaultBudget) {
  constexpr std::int64_t kKeys = 1 << 20;
  constexpr std::size_t kBudget = std::size_t{256} << 20;
  TopkProblem problem = causal_topk(64, kKeys, 1, 2048);
  problem.head_weights.fill(1);
  for (std::int64_t t = 0; t < 64; ++t) problem.index_q.set({t, 0, 0}, 1);
  std::vector<double> scores;
  for (std::int64_t s = 0; s < kKeys; ++s) {
    scores.push_back(static_cast<double>(s * 2654435761 >> 7 & 127));
    problem.index_k.set({s, 0}, scores.back());
  }
  ArenaAllocator arena(2 * kBudget);
  Usage usage;
  Runtime on = runtime();
  on.allocator = &arena;
  on.usage = &usage;
  const TopkResult got = run_topk(problem, on, WantScores::kNo);
  EXPECT_LE(usage.peak_scratch_bytes.load(), kBudget);
  EXPECT_EQ(usage.scratch_bytes.load(), 0u);
  const std::vector<std::int64_t> best = brute_force_best(scores, 2048);  // of the last row
  for (std::int64_t j = 0; j < 2048; ++j) {
    ASSERT_EQ(got.topk_indices.get({63, 0, j}),
              static_cast<double>(best[static_cast<std::size_t>(j)]));
  }
}

TEST_F(TopKOnDevice, AllocatorWithoutMemoryIsAMemoryError) {
  const DeviceTopk device(problem_of(20, 8, 330), stream());
  expect_memory_error(runtime(), [&](const Runtime& on) { device.run(on); });
}

TEST_F(TopKOnDevice, AutoTakesTheDevice) {
  const TopkProblem problem = problem_of(20, 8, 331);
  DeviceTopk device(problem, stream());
  Runtime on = runtime();
  on.backend = Backend::kAuto;
  device.run(on);
  expect_result(problem, device.download());
}

TEST_F(TopKOnDevice, CheckingIsRefusedDuringCapture) {
  const DeviceTopk device(problem_of(20, 8, 332), stream());
  device.run(runtime());
  expect_check_refused_in_capture("indexer_topk", runtime(),
                                  [&](const Runtime& on) { device.run(on); });
}

TEST_F(TopKOnDevice, TensorsOfTwoDevicesAreRefused) {
  const TopkProblem problem = problem_of(20, 8, 333);
  const DeviceTopk device(problem, stream());
  IndexerTopkArgs args = device.args();
  args.starts = problem.starts;
  expect_error([&] { indexer_topk(args, runtime()); }, ErrorCode::kValue,
               "indexer_topk: starts must be on cuda:0 as index_q is, got cpu");
}

TEST_F(TopKOnDevice, Float64IsRefused) {
  expect_error([&] { run_topk(in_float64(problem_of(20, 2, 334)), runtime()); },
               ErrorCode::kUnavailable,
               "indexer_topk: no backend takes this call with backend sm90 (sm90: takes bfloat16 "
               "only)");
}

}  // namespace
}  // namespace flashdsa::test
