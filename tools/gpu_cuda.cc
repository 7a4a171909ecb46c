// The command on CUDA devices; its one kernel is in gpu_heads.cu.

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdint>
#include <fstream>
#include <limits>

#include "core/cuda/check.h"
#include "tools/gpu.h"
#include "tools/report.h"

namespace flashdsa::tools {
namespace {

using core::cuda::check;
using core::cuda::DeviceGuard;

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// 13000 is "13.0".
std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string driver_version() {
  std::string version;
  if (std::ifstream("/sys/module/nvidia/version") >> version) return version;
  int number = 0;
  check(cudaDriverGetVersion(&number), "asking for the driver's version");
  return "CUDA " + version_text(number);
}

/// A moment in a stream's work.
class Event {
 public:
  Event() { check(cudaEventCreate(&event_), "creating an event"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream) {
    check(cudaEventRecord(event_, native(stream)), "recording an event");
  }

  double seconds_since(const Event& earlier) const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "reading an event's time");
    return 1e-3 * double{milliseconds};
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Memory that is freed stays with the process, as it does with caching allocators: CUDA would hand
// it back to the driver whenever the command waits for a stream, and every next call would pay for
// it.
void keep_freed_memory(Device device) {
  cudaMemPool_t pool = nullptr;
  check(cudaDeviceGetDefaultMemPool(&pool, device.index), "asking for the memory pool");
  std::uint64_t threshold = std::numeric_limits<std::uint64_t>::max();
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
        "setting up the memory pool");
}

struct Interval {
  Event begin, end;
};

}  // namespace

std::vector<std::string> gpu_lines() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  std::vector<std::string> lines;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, index), "reading device properties");
    lines.push_back(fmt::format("{} {}, compute capability {}.{}, {}",
                                device_name({DeviceKind::kCuda, index}), properties.name,
                                properties.major, properties.minor,
                                format_bytes(static_cast<double>(properties.totalGlobalMem))));
  }
  return lines;
}

GpuDescription describe_gpu(int index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "reading device properties");
  int kilohertz = 0, runtime = 0;
  check(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, index), "reading the clock rate");
  check(cudaRuntimeGetVersion(&runtime), "asking for the runtime's version");
  return {properties.name, fmt::format("up to {} MHz", kilohertz / 1000), driver_version(),
          version_text(runtime)};
}

std::shared_ptr<void> make_stream(Device device) {
  const DeviceGuard guard(device.index);
  keep_freed_memory(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  return {stream, [](void* handle) { cudaStreamDestroy(static_cast<cudaStream_t>(handle)); }};
}

void queue_overwrite(const TensorView& memory, Stream stream) {
  const DeviceGuard guard(memory.device.index);
  check(cudaMemsetAsync(memory.data, 1, memory.bytes(), native(stream)), "filling memory");
}

std::vector<std::vector<double>> time_queued(std::span<const std::function<void()>> calls,
                                             std::int64_t rounds,
                                             const std::function<void()>& before, Device device,
                                             Stream stream) {
  const DeviceGuard guard(device.index);
  const auto count = static_cast<std::size_t>(rounds) + 1;
  std::vector<std::vector<Interval>> intervals;
  for (std::size_t call = 0; call < calls.size(); ++call) intervals.emplace_back(count);
  for (std::size_t round = 0; round < count; ++round) {
    for (std::size_t call = 0; call < calls.size(); ++call) {
      before();
      intervals[call][round].begin.record(stream);
      calls[call]();
      intervals[call][round].end.record(stream);
    }
  }
  check(cudaStreamSynchronize(native(stream)), "waiting for the timed calls");
  std::vector<std::vector<double>> seconds(calls.size());
  for (std::size_t call = 0; call < calls.size(); ++call) {
    for (std::size_t round = 1; round < count; ++round) {
      const Interval& interval = intervals[call][round];
      seconds[call].push_back(interval.end.seconds_since(interval.begin));
    }
  }
  return seconds;
}

}  // namespace flashdsa::tools
