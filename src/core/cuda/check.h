#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string_view>

namespace flashdsa::core::cuda {

/// Throws Error(kDevice) "cuda: <what> failed: <CUDA's sentence>" unless `status` is cudaSuccess.
void check(cudaError_t status, std::string_view what);

/// After a launch: throws Error(kDevice) naming kernel, grid, threads and dynamic shared memory
/// when the launch was refused.
void check_launch(std::string_view kernel, dim3 grid, int threads, std::size_t shared_bytes);

/// Lets `kernel` use `shared_bytes` of dynamic shared memory. Throws Error(kDevice).
void allow_shared_memory(const void* kernel, std::string_view name, std::size_t shared_bytes);

/// Makes `device` current for a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

/// Streaming multiprocessors of a device.
int multiprocessors(int device);

}  // namespace flashdsa::core::cuda
