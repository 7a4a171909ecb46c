#pragma once

// What the core asks of CUDA devices. core/cuda/device.cc answers; in a build without CUDA
// core/no_cuda.cc does, and says so.

#include <cstddef>
#include <string>

#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// "" when device `index` can run the sm90 kernels, else the reason, which names what was found.
std::string sm90_refusal(int index);

/// Stream-ordered memory of the CUDA devices.
Allocator& cuda_allocator();

/// Queues a copy of `bytes` on `stream`; at least one side is a CUDA device. Throws Error(kDevice).
void cuda_copy(void* to, const void* from, std::size_t bytes, Device device, Stream stream);

/// Whether `stream` is recording a CUDA graph, so that nothing may wait for it. Throws
/// Error(kDevice).
bool cuda_is_capturing(Device device, Stream stream);

/// Waits for the work queued on `stream` of `device`. Throws Error(kDevice).
void cuda_synchronize(Device device, Stream stream);

}  // namespace flashdsa::core
