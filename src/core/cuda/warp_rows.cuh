// Kernels that take a warp per row, of any number of rows: a grid that walks them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace flashdsa::core::cuda {

inline constexpr int kRowThreads = 256;
inline constexpr int kRowWarps = kRowThreads / 32;

// CTAs for `rows` rows; above this many each warp takes several.
inline dim3 grid_of_warps(int64_t rows) {
  constexpr int64_t kMostCtas = 1 << 16;
  return dim3(static_cast<unsigned>(std::min((rows + kRowWarps - 1) / kRowWarps, kMostCtas)));
}

// How a warp goes through them: for (row = first_row(); row < rows; row += row_step()).
__device__ __forceinline__ int64_t first_row() {
  return static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
}
__device__ __forceinline__ int64_t row_step() {
  return static_cast<int64_t>(gridDim.x) * kRowWarps;
}

}  // namespace flashdsa::core::cuda
