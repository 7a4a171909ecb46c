#include "core/cuda/check.h"

#include <fmt/format.h>

#include "flashdsa/error.h"

namespace flashdsa::core::cuda {

void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kDevice,
              fmt::format("cuda: {} failed: {}", what, cudaGetErrorString(status)));
}

void check_launch(std::string_view kernel, dim3 grid, int threads, std::size_t shared_bytes) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw Error(ErrorCode::kDevice,
              fmt::format("cuda: launch of {} with grid [{}, {}, {}], {} threads and {} bytes of "
                          "shared memory failed: {}",
                          kernel, grid.x, grid.y, grid.z, threads, shared_bytes,
                          cudaGetErrorString(status)));
}

void allow_shared_memory(const void* kernel, std::string_view name, std::size_t shared_bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        fmt::format("reserving {} bytes of shared memory for {}", shared_bytes, name));
}

DeviceGuard::DeviceGuard(int device) {
  check(cudaGetDevice(&before_), "asking for the current device");
  if (before_ != device) check(cudaSetDevice(device), fmt::format("choosing device {}", device));
}

DeviceGuard::~DeviceGuard() { cudaSetDevice(before_); }

int multiprocessors(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "counting multiprocessors");
  return count;
}

}  // namespace flashdsa::core::cuda
