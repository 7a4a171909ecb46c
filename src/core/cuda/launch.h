#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace flashdsa::core::cuda {

/// Launches a kernel whose CTAs may start while the kernel before it on the stream ends. It has to
/// call await_earlier_kernels before it touches what others have written or still read.
template <typename... Args>
void launch_behind(void (*kernel)(Args...), dim3 grid, int threads, std::size_t shared_bytes,
                   cudaStream_t stream, const std::type_identity_t<Args>&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace flashdsa::core::cuda
