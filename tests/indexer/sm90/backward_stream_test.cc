// The gradient of the scores as work on a stream: captured in a graph, beside another stream,
// without waiting, on the caller's memory alone. SPEC sections 3 and 7. Sums are exact, so that the
// bits do not depend on the order of atomics.

#include "tests/indexer/fixture.h"
#include "tests/support/cuda/device_test.h"

namespace flashdsa::test {
namespace {

// A problem and its gradients on the device; `download` brings the gradients to the host.
class DeviceGradients {
 public:
  DeviceGradients(ScoreGradientProblem problem, Stream stream, DType keys = DType::kBFloat16)
      : problem_(std::move(problem)),
        result_(empty_gradients(problem_, keys)),
        mirror_(stream),
        args_(placed(backward_args(problem_, result_), mirror_)) {}

  void run(const Runtime& runtime) const { indexer_backward(args_, runtime); }

  const IndexerBackwardArgs& args() const { return args_; }

  const ScoreGradients& download() {
    mirror_.download();
    return result_;
  }

  // Outputs that hold what no call leaves, and the inputs of another problem of the same shape.
  void upload(const ScoreGradientProblem& problem) {
    result_.grad_index_q.fill(-7);
    result_.grad_index_k.fill(-7);
    result_.grad_head_weights.fill(-7);
    overwrite(problem_.index_q, problem.index_q);
    overwrite(problem_.index_k, problem.index_k);
    overwrite(problem_.head_weights, problem.head_weights);
    overwrite(problem_.topk_indices, problem.topk_indices);
    overwrite(problem_.grad_scores, problem.grad_scores);
    mirror_.upload();
  }

 private:
  static void overwrite(HostTensor& to, const HostTensor& from) {
    for (std::int64_t i = 0; i < to.elements(); ++i) to.set(i, from.get(i));
  }

  ScoreGradientProblem problem_;
  ScoreGradients result_;
  Mirror mirror_;
  IndexerBackwardArgs args_;
};

class IndexerBackwardOnDevice : public DeviceTest {
 protected:
  void expect_result(const ScoreGradientProblem& problem, const ScoreGradients& got) const {
    EXPECT_TRUE(same_gradient_bits(
        got, run_score_gradients(problem, reference_runtime(), got.grad_index_k.dtype())));
  }
};

constexpr Mode kModes[] = {Mode::kDefault, Mode::kDeterministic, Mode::kInvariant};

// Rows of all lengths.
ScoreGradientProblem problem_of(std::int64_t rows, std::int64_t heads, std::uint64_t seed) {
  ScoreGradientProblem problem = integer_score_gradients({rows, 300, heads, 150}, seed);
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t j = t * 37 % 151; j < 150; ++j) problem.topk_indices.set({t, 0, j}, -1);
  }
  return problem;
}

TEST_F(IndexerBackwardOnDevice, GraphGivesTheBitsOfTheCall) {
  for (const std::int64_t heads : {3, 32, 64}) {
    for (const Mode mode : kModes) {
      const ScoreGradientProblem first = problem_of(20, heads, 341);
      const ScoreGradientProblem second = problem_of(20, heads, 342);
      DeviceGradients device(first, stream());
      device.run(runtime(mode));  // loads the kernels
      stream().wait();
      const CapturedGraph graph(stream(), [&] { device.run(runtime(mode)); });
      for (const ScoreGradientProblem* problem : {&first, &second}) {
        device.upload(*problem);
        graph.replay();
        expect_result(*problem, device.download());
      }
    }
  }
}

// FAULTS: shape-dependent scratch, stale under graph replay.
TEST_F(IndexerBackwardOnDevice, GraphSurvivesChurnedMemoryAndOtherShapes) {
  const ScoreGradientProblem problem = problem_of(20, 8, 343), larger = problem_of(60, 8, 344);
  DeviceGradients device(problem, stream());
  const Runtime on = runtime(Mode::kDeterministic);
  device.run(on);
  stream().wait();
  const CapturedGraph graph(stream(), [&] { device.run(on); });
  for (int replay = 0; replay < 100; ++replay) {
    churn_device_memory(stream());
    if (replay == 50) expect_result(larger, run_score_gradients(larger, on));
    if (replay % 10 == 0) device.upload(problem);
    graph.replay();
  }
  expect_result(problem, device.download());
}

TEST_F(IndexerBackwardOnDevice, TwoStreamsGiveTheBitsOfOne) {
  const OwnStream other;
  const ScoreGradientProblem problem = random_score_gradients({600, 700, 32, 200}, 345);
  const ScoreGradientProblem busy = problem_of(150, 64, 346);
  DeviceGradients first(problem, stream()), second(busy, other);
  const Runtime on = runtime(Mode::kDeterministic);
  Runtime on_other = runtime();
  on_other.stream = other;
  const ScoreGradients want = run_score_gradients(problem, on);
  for (int repeat = 0; repeat < 20; ++repeat) {
    first.run(on);
    second.run(on_other);
  }
  EXPECT_TRUE(same_gradient_bits(first.download(), want));
  expect_result(busy, second.download());
}

// More rows than there are walkers, so that rings go round.
TEST_F(IndexerBackwardOnDevice, RowsDoNotDependOnTheirNumber) {
  for (const std::int64_t heads : {4, 32, 64}) {
    const ScoreGradientProblem many = random_score_gradients({1500, 900, heads, 200}, 347);
    const ScoreGradients all = run_score_gradients(many, runtime());
    for (const std::int64_t t : {0, 1, 749, 1499}) {
      const ScoreGradients alone = run_score_gradients(rows_of(many, t, 1), runtime());
      EXPECT_TRUE(same_bits(alone.grad_index_q, all.grad_index_q.rows(t, 1))) << t;
      EXPECT_TRUE(same_bits(alone.grad_head_weights, all.grad_head_weights.rows(t, 1))) << t;
    }
  }
}

TEST_F(IndexerBackwardOnDevice, IsAsynchronous) {
  for (const Mode mode : kModes) {
    const DeviceGradients device(problem_of(150, 8, 348), stream());
    expect_asynchronous(runtime(mode), [&](const Runtime& on) { device.run(on); });
  }
}

TEST_F(IndexerBackwardOnDevice, UnalignedInputsAreAsynchronous) {
  ScoreGradientProblem problem = problem_of(20, 8, 349);
  problem.index_q = problem.index_q.with_unaligned_memory();
  problem.index_k = problem.index_k.with_unaligned_memory();
  const DeviceGradients device(problem, stream());
  expect_asynchronous(runtime(), [&](const Runtime& on) { device.run(on); });
}

TEST_F(IndexerBackwardOnDevice, AlignedFloat32SumsNeedNoScratch) {
  const ScoreGradientProblem problem = problem_of(20, 8, 350);
  Usage usage;
  Runtime on = runtime();
  on.usage = &usage;
  expect_result(problem, run_score_gradients(problem, on, DType::kFloat32));
  EXPECT_EQ(usage.peak_scratch_bytes.load(), 0u);
}

TEST_F(IndexerBackwardOnDevice, AllocatorWithoutMemoryIsAMemoryErrorThatWritesNothing) {
  for (const DType keys : {DType::kBFloat16, DType::kFloat32}) {
    const ScoreGradientProblem problem = problem_of(20, 8, 351);
    DeviceGradients device(problem, stream(), keys);
    device.upload(problem);
    expect_memory_error(runtime(Mode::kDeterministic), [&](const Runtime& on) { device.run(on); });
    const ScoreGradients& got = device.download();
    for (const HostTensor* tensor :
         {&got.grad_index_q, &got.grad_index_k, &got.grad_head_weights}) {
      EXPECT_EQ(tensor->get(0), -7);
      EXPECT_EQ(tensor->get(tensor->elements() - 1), -7);
    }
  }
}

TEST_F(IndexerBackwardOnDevice, AutoTakesTheDevice) {
  const ScoreGradientProblem problem = problem_of(20, 8, 352);
  DeviceGradients device(problem, stream());
  Runtime on = runtime();
  on.backend = Backend::kAuto;
  device.run(on);
  expect_result(problem, device.download());
}

TEST_F(IndexerBackwardOnDevice, CheckingIsRefusedDuringCapture) {
  const DeviceGradients device(problem_of(20, 8, 353), stream());
  device.run(runtime());
  expect_check_refused_in_capture("indexer_backward", runtime(),
                                  [&](const Runtime& on) { device.run(on); });
}

TEST_F(IndexerBackwardOnDevice, TensorsOfTwoDevicesAreRefused) {
  const ScoreGradientProblem problem = problem_of(20, 8, 354);
  const DeviceGradients device(problem, stream());
  IndexerBackwardArgs args = device.args();
  args.grad_scores = problem.grad_scores;
  expect_error([&] { indexer_backward(args, runtime()); }, ErrorCode::kValue,
               "indexer_backward: grad_scores must be on cuda:0 as index_q is, got cpu");
}

TEST_F(IndexerBackwardOnDevice, Float64IsRefused) {
  expect_error([&] { run_score_gradients(in_float64(problem_of(20, 2, 355)), runtime()); },
               ErrorCode::kUnavailable,
               "indexer_backward: no backend takes this call with backend sm90 (sm90: takes "
               "bfloat16 only)");
}

}  // namespace
}  // namespace flashdsa::test
