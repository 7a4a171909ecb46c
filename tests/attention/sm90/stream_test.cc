// Attention as work on a stream: captured in a graph, beside another stream, without waiting, on
// the caller's memory alone. SPEC section 7.

#include <limits>
#include <utility>

#include "tests/attention/fixture.h"
#include "tests/support/cuda/device_test.h"

namespace flashdsa::test {
namespace {

// A problem and its results on the device; `download` brings the results to the host.
class DeviceAttention {
 public:
  DeviceAttention(AttentionProblem problem, Stream stream)
      : problem_(std::move(problem)),
        result_(empty_result(problem_, Backend::kSm90)),
        mirror_(stream),
        forward_(placed(forward_args(problem_, result_), mirror_)),
        backward_(placed(backward_args(problem_, result_), mirror_)) {}

  void run(const Runtime& runtime) const {
    attention_forward(forward_, runtime);
    attention_backward(backward_, runtime);
  }

  const AttentionForwardArgs& forward() const { return forward_; }
  const AttentionBackwardArgs& backward() const { return backward_; }

  const AttentionResult& download() {
    mirror_.download();
    return result_;
  }

  // Outputs of NaN and the inputs of another problem of the same shape.
  void upload(const AttentionProblem& problem) {
    for (HostTensor* output : {&result_.out, &result_.lse, &result_.max_logits, &result_.grad_q,
                               &result_.grad_kv, &*result_.grad_attn_sink}) {
      output->fill(std::numeric_limits<double>::quiet_NaN());
    }
    overwrite(problem_.q, problem.q);
    overwrite(problem_.kv, problem.kv);
    overwrite(problem_.grad_out, problem.grad_out);
    overwrite(problem_.topk_indices, problem.topk_indices);
    overwrite(*problem_.topk_length, *problem.topk_length);
    overwrite(*problem_.attn_sink, *problem.attn_sink);
    mirror_.upload();
  }

 private:
  static void overwrite(HostTensor& to, const HostTensor& from) {
    for (std::int64_t i = 0; i < to.elements(); ++i) to.set(i, from.get(i));
  }

  AttentionProblem problem_;
  AttentionResult result_;
  Mirror mirror_;
  AttentionForwardArgs forward_;
  AttentionBackwardArgs backward_;
};

AttentionProblem problem_of(std::int64_t rows, std::int64_t heads, std::uint64_t seed) {
  AttentionProblem problem =
      random_attention({.t_q = rows, .t_k = 150, .heads = heads, .topk = 70}, seed);
  problem.set_row(1, {5, -1, 7, 7, 150, 2});
  problem.set_row(2, {});
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(rows), 70);
  lengths[0] = 64;
  problem.set_lengths(lengths);
  problem.set_sink(std::vector<double>(static_cast<std::size_t>(heads), 0.5));
  return problem;
}

class AttentionOnDevice : public DeviceTest {
 protected:
  AttentionResult result_of(const AttentionProblem& problem, Mode mode) const {
    return run_attention(problem, runtime(mode));
  }

  // The forward has the bits, and so have the gradients where the mode promises it.
  void expect_result(const AttentionProblem& problem, const AttentionResult& got, Mode mode) const {
    const AttentionResult want = result_of(problem, mode);
    EXPECT_TRUE(same_forward_bits(got, want));
    if (mode == Mode::kDefault) {
      EXPECT_TRUE(within_spec(problem, got));
    } else {
      EXPECT_TRUE(same_result_bits(got, want));
    }
  }
};

constexpr Mode kModes[] = {Mode::kDefault, Mode::kDeterministic, Mode::kInvariant};

TEST_F(AttentionOnDevice, GraphGivesTheResultsOfTheCall) {
  for (const std::int64_t heads : {3, 64, 128}) {
    const AttentionProblem first = problem_of(5, heads, 301), second = problem_of(5, heads, 302);
    for (const Mode mode : kModes) {
      DeviceAttention device(first, stream());
      device.run(runtime(mode));  // loads the kernels
      stream().wait();
      const CapturedGraph graph(stream(), [&] { device.run(runtime(mode)); });
      for (const AttentionProblem* problem : {&first, &second}) {
        device.upload(*problem);
        graph.replay();
        expect_result(*problem, device.download(), mode);
      }
    }
  }
}

// FAULTS: shape-dependent scratch, stale under graph replay.
TEST_F(AttentionOnDevice, GraphSurvivesChurnedMemoryAndOtherShapes) {
  const AttentionProblem problem = problem_of(5, 8, 303);
  const AttentionProblem larger = problem_of(60, 8, 304);
  DeviceAttention device(problem, stream());
  device.run(runtime(Mode::kDeterministic));
  stream().wait();
  const CapturedGraph graph(stream(), [&] { device.run(runtime(Mode::kDeterministic)); });
  for (int replay = 0; replay < 100; ++replay) {
    churn_device_memory(stream());
    if (replay == 50) expect_result(larger, result_of(larger, Mode::kDefault), Mode::kDefault);
    if (replay % 10 == 0) device.upload(problem);
    graph.replay();
  }
  expect_result(problem, device.download(), Mode::kDeterministic);
}

TEST_F(AttentionOnDevice, TwoStreamsGiveTheBitsOfOne) {
  const OwnStream other;
  const AttentionProblem problems[] = {problem_of(40, 8, 305), problem_of(40, 64, 306)};
  for (const Mode mode : kModes) {
    DeviceAttention first(problems[0], stream()), second(problems[1], other);
    Runtime on_other = runtime(mode);
    on_other.stream = other;
    for (int repeat = 0; repeat < 20; ++repeat) {
      first.run(runtime(mode));
      second.run(on_other);
    }
    expect_result(problems[0], first.download(), mode);
    expect_result(problems[1], second.download(), mode);
  }
}

TEST_F(AttentionOnDevice, ForwardIsAsynchronous) {
  const DeviceAttention device(problem_of(40, 8, 307), stream());
  expect_asynchronous(runtime(),
                      [&](const Runtime& on) { attention_forward(device.forward(), on); });
}

TEST_F(AttentionOnDevice, BackwardIsAsynchronous) {
  const DeviceAttention device(problem_of(40, 8, 308), stream());
  for (const Mode mode : kModes) {
    expect_asynchronous(runtime(mode),
                        [&](const Runtime& on) { attention_backward(device.backward(), on); });
  }
}

// The accumulators of so many keys (34 MB) exceed what stays in cache, so the CTAs keep pace; rows
// without keys count in their sequence.
TEST_F(AttentionOnDevice, CtasThatKeepPaceAreRight) {
  for (const auto& [heads, rows] : {std::pair{8, 300}, std::pair{33, 200}, std::pair{72, 100}}) {
    AttentionProblem problem =
        random_attention({.t_q = rows, .t_k = 15000, .heads = heads, .topk = 20}, 318);
    for (std::int64_t t = 0; t < rows; t += 3) problem.set_row(t, {});
    EXPECT_TRUE(within_spec(problem, run_attention(problem, runtime())));
  }
}

// Copies of rows that are not aligned are scratch, too.
TEST_F(AttentionOnDevice, UnalignedInputsAreAsynchronous) {
  AttentionProblem problem = problem_of(20, 8, 309);
  problem.q = problem.q.with_unaligned_memory();
  problem.kv = problem.kv.with_unaligned_memory();
  problem.grad_out = problem.grad_out.with_unaligned_memory();
  const DeviceAttention device(problem, stream());
  expect_asynchronous(runtime(), [&](const Runtime& on) { device.run(on); });
}

TEST_F(AttentionOnDevice, AllocatorWithoutMemoryIsAMemoryError) {
  const DeviceAttention device(problem_of(40, 8, 310), stream());
  expect_memory_error(runtime(),
                      [&](const Runtime& on) { attention_forward(device.forward(), on); });
  expect_memory_error(runtime(),
                      [&](const Runtime& on) { attention_backward(device.backward(), on); });
}

TEST_F(AttentionOnDevice, AutoTakesTheDevice) {
  const AttentionProblem problem = problem_of(5, 8, 311);
  DeviceAttention device(problem, stream());
  Runtime on = runtime(Mode::kDeterministic);
  on.backend = Backend::kAuto;
  device.run(on);
  expect_result(problem, device.download(), Mode::kDeterministic);
}

// FAULTS: launches invisible to the caller's allocator: inputs freed right after the call.
TEST_F(AttentionOnDevice, InputsMayBeFreedBehindTheCall) {
  const AttentionProblem problem = problem_of(40, 8, 312);
  const DeviceAttention device(problem, stream());
  const AttentionResult want = run_forward(problem, runtime());
  AttentionForwardArgs args = device.forward();
  void* passing = nullptr;
  check_cuda(cudaMallocAsync(&passing, args.kv.bytes(), native(stream())), "taking memory");
  check_cuda(cudaMemcpyAsync(passing, args.kv.data, args.kv.bytes(), cudaMemcpyDeviceToDevice,
                             native(stream())),
             "copying kv");
  args.kv.data = passing;
  attention_forward(args, runtime());
  check_cuda(cudaMemsetAsync(passing, 0xFF, args.kv.bytes(), native(stream())), "spoiling kv");
  check_cuda(cudaFreeAsync(passing, native(stream())), "freeing kv");
  const Tensor out = copy_to(args.out, Device{}, runtime());
  for (std::int64_t i = 0; i < want.out.elements(); ++i) {
    ASSERT_EQ(out.span<std::uint16_t>()[static_cast<std::size_t>(i)], want.out.bits(i)) << i;
  }
}

TEST_F(AttentionOnDevice, CheckingIsRefusedDuringCapture) {
  const DeviceAttention device(problem_of(5, 8, 313), stream());
  expect_check_refused_in_capture("attention_forward", runtime(), [&](const Runtime& on) {
    attention_forward(device.forward(), on);
  });
  expect_check_refused_in_capture("attention_backward", runtime(), [&](const Runtime& on) {
    attention_backward(device.backward(), on);
  });
}

TEST_F(AttentionOnDevice, TensorsOfTwoDevicesAreRefused) {
  const AttentionProblem problem = problem_of(5, 8, 314);
  const DeviceAttention device(problem, stream());
  AttentionForwardArgs args = device.forward();
  args.kv = problem.kv;
  expect_error([&] { attention_forward(args, runtime()); }, ErrorCode::kValue,
               "attention_forward: kv must be on cuda:0 as q is, got cpu");
  const AttentionResult on_host = empty_result(problem, Backend::kSm90);
  args = forward_args(problem, on_host);
  args.lse.device = kFirstDevice;
  expect_error([&] { attention_forward(args, runtime()); }, ErrorCode::kValue,
               "attention_forward: lse must be on cpu as q is, got cuda:0");
}

TEST_F(AttentionOnDevice, HostBackendsDoNotTakeItsTensors) {
  const DeviceAttention device(problem_of(5, 8, 315), stream());
  for (const Backend backend : {Backend::kCpu, Backend::kReference}) {
    Runtime on_host;
    on_host.backend = backend;
    const std::string name(backend_name(backend));
    expect_error([&] { attention_forward(device.forward(), on_host); }, ErrorCode::kUnavailable,
                 "attention_forward: no backend takes this call with backend " + name + " (" +
                     name + ": the tensors are not on the host)");
  }
}

TEST_F(AttentionOnDevice, DeviceThatIsNotThereIsUnavailable) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "counting devices");
  const DeviceAttention device(problem_of(5, 8, 316), stream());
  AttentionForwardArgs args = device.forward();
  for (TensorView* view : {&args.q, &args.kv, &args.topk_indices, &*args.topk_length,
                           &*args.attn_sink, &args.out, &args.lse, &*args.max_logits}) {
    view->device.index = count;
  }
  expect_error([&] { attention_forward(args, runtime()); }, ErrorCode::kUnavailable,
               "attention_forward: no backend takes this call with backend sm90 (sm90: there is no "
               "cuda:" +
                   std::to_string(count) + ", found " + std::to_string(count) + ")");
}

TEST_F(AttentionOnDevice, Float64IsRefused) {
  const AttentionProblem problem = in_float64(problem_of(5, 2, 317));
  expect_error([&] { run_attention(problem, runtime()); }, ErrorCode::kUnavailable,
               "attention_forward: no backend takes this call with backend sm90 (sm90: takes "
               "bfloat16 only)");
}

}  // namespace
}  // namespace flashdsa::test
