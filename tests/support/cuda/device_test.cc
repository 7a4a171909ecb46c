#include "tests/support/cuda/device_test.h"

#include <chrono>
#include <future>

#include "tests/support/cuda/counted_calls.h"

namespace flashdsa::test {
namespace {

void wait_until_released(void* is_released) {
  static_cast<std::atomic<bool>*>(is_released)->wait(false);
}

// Whether the call comes back while the stream in front of it is held up.
bool returns_while_held(const Runtime& runtime, const std::function<void(const Runtime&)>& call) {
  constexpr auto kPatience = std::chrono::seconds(20);  // a call that waits would wait for ever
  HeldStream held(runtime.stream);
  std::future<void> done = std::async(std::launch::async, [&] { call(runtime); });
  const bool returned = done.wait_for(kPatience) == std::future_status::ready;
  held.release();
  done.get();
  return returned;
}

}  // namespace

OwnStream::OwnStream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaSetDevice(kFirstDevice.index), "choosing the first device");
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  stream_.handle = stream;
}

OwnStream::~OwnStream() { cudaStreamDestroy(native(stream_)); }

void OwnStream::wait() const {
  check_cuda(cudaStreamSynchronize(native(stream_)), "the work of a stream");
}

CapturedGraph::CapturedGraph(Stream stream, const std::function<void()>& queue_work)
    : stream_(stream) {
  check_cuda(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeGlobal),
             "beginning a capture");
  cudaGraph_t recorded = nullptr;
  try {
    queue_work();
  } catch (...) {
    cudaStreamEndCapture(native(stream), &recorded);
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    cudaGetLastError();
    throw;
  }
  check_cuda(cudaStreamEndCapture(native(stream), &recorded), "ending a capture");
  const cudaError_t status = cudaGraphInstantiate(&graph_, recorded, 0);
  cudaGraphDestroy(recorded);
  check_cuda(status, "making a graph");
}

CapturedGraph::~CapturedGraph() { cudaGraphExecDestroy(graph_); }

void CapturedGraph::replay() const {
  check_cuda(cudaGraphLaunch(graph_, native(stream_)), "launching a graph");
}

HeldStream::HeldStream(Stream stream) : stream_(stream) {
  check_cuda(cudaLaunchHostFunc(native(stream), wait_until_released, &is_released_),
             "holding a stream");
}

HeldStream::~HeldStream() {
  release();
  cudaStreamSynchronize(native(stream_));  // the stream looks at is_released_ until then
}

void HeldStream::release() {
  is_released_ = true;
  is_released_.notify_all();
}

void expect_asynchronous(const Runtime& runtime, const std::function<void(const Runtime&)>& call) {
  call(runtime);  // a kernel's first use may wait while CUDA loads it
  check_cuda(cudaStreamSynchronize(native(runtime.stream)), "a first call");
  EXPECT_TRUE(returns_while_held(runtime, call)) << "the call waited for its stream";

  ArenaAllocator arena(std::size_t{1} << 30);
  Runtime counted = runtime;
  counted.allocator = &arena;
  const CountedCalls before = counted_calls();
  call(counted);
  EXPECT_EQ((counted_calls() - before).waits, 0);
  EXPECT_EQ((counted_calls() - before).allocations, 0);
  EXPECT_EQ(arena.returned(), arena.allocations());
  check_cuda(cudaStreamSynchronize(native(runtime.stream)), "a counted call");
}

void expect_memory_error(const Runtime& runtime, const std::function<void(const Runtime&)>& call) {
  ArenaAllocator arena(64);
  Runtime on = runtime;
  on.allocator = &arena;
  try {
    call(on);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMemory);
    const std::string sentence = error.what();
    EXPECT_EQ(sentence.find("scratch: expected "), 0u) << sentence;
    EXPECT_NE(sentence.find(" bytes on cuda:0, got none"), std::string::npos) << sentence;
  }
}

void expect_check_refused_in_capture(const std::string& operation, const Runtime& runtime,
                                     const std::function<void(const Runtime&)>& call) {
  Runtime checking = runtime;
  checking.check = true;
  const CapturedGraph graph(runtime.stream, [&] {
    expect_error([&] { call(checking); }, ErrorCode::kValue,
                 operation +
                     ": check must be off while the stream is captured, because it waits "
                     "for the device, got on");
    call(runtime);
  });
  graph.replay();
  check_cuda(cudaStreamSynchronize(native(runtime.stream)), "the work of a graph");
}

void churn_device_memory(Stream stream) {
  std::vector<void*> pieces;
  for (std::size_t bytes = 64; bytes <= (std::size_t{1} << 26); bytes *= 4) {
    void* piece = nullptr;
    check_cuda(cudaMallocAsync(&piece, bytes, native(stream)), "taking memory");
    check_cuda(cudaMemsetAsync(piece, 0xFF, bytes, native(stream)), "spoiling memory");
    pieces.push_back(piece);
  }
  for (void* piece : pieces) check_cuda(cudaFreeAsync(piece, native(stream)), "freeing memory");
}

}  // namespace flashdsa::test
