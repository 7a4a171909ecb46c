#include "core/device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "core/cuda/check.h"

namespace flashdsa::core {
namespace {

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

// Microseconds, where cudaGetDeviceProperties takes a millisecond.
int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cuda::check(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}

class StreamOrderedMemory final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, Stream stream) noexcept override {
    int before = 0;
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device.index) != cudaSuccess) {
      return nullptr;
    }
    void* data = nullptr;
    if (cudaMallocAsync(&data, bytes, native(stream)) != cudaSuccess) data = nullptr;
    cudaGetLastError();  // the caller learns of a failure by null
    cudaSetDevice(before);
    return data;
  }

  void deallocate(void* data, std::size_t, Device, Stream stream) noexcept override {
    cudaFreeAsync(data, native(stream));
  }
};

}  // namespace

std::string sm90_refusal(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    return fmt::format("no CUDA driver or device: {}", cudaGetErrorString(status));
  }
  if (index < 0 || index >= count)
    return fmt::format("there is no cuda:{}, found {}", index, count);
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, index);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, index);
  if (major == 9 && minor == 0) return "";
  cudaDeviceProp properties{};  // for the name, which no attribute gives
  cuda::check(cudaGetDeviceProperties(&properties, index), "reading device properties");
  return fmt::format("needs a GPU of compute capability 9.0, cuda:{} is {} ({}.{})", index,
                     properties.name, major, minor);
}

Allocator& cuda_allocator() {
  static StreamOrderedMemory memory;  // has no state
  return memory;
}

void cuda_copy(void* to, const void* from, std::size_t bytes, Device device, Stream stream) {
  const cuda::DeviceGuard guard(device.index);
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)),
              fmt::format("copying {} bytes", bytes));
}

bool cuda_is_capturing(Device device, Stream stream) {
  const cuda::DeviceGuard guard(device.index);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cuda::check(cudaStreamIsCapturing(native(stream), &status), "asking whether the stream captures");
  return status != cudaStreamCaptureStatusNone;
}

void cuda_synchronize(Device device, Stream stream) {
  const cuda::DeviceGuard guard(device.index);
  cuda::check(cudaStreamSynchronize(native(stream)), "waiting for the stream");
}

}  // namespace flashdsa::core
