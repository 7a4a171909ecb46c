// Kernels that take a warp per row, of any number of rows: a grid that walks them, and where a row
// of slots ends.
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

// The last slot + 1 among a row's first `length` that holds a key of 0..t_k-1, 0 without one; a
// warp, from the end, `kLoads` words of 32 slots at a time.
__device__ __forceinline__ int row_extent(const int32_t* slots, int length, int t_k) {
  constexpr unsigned kAllLanes = 0xFFFFFFFFu;
  constexpr int kLoads = 4;
  const int lane = threadIdx.x % 32;
  for (int end = (length + 31) / 32 * 32; end > 0; end -= kLoads * 32) {
    int key[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int slot = end - 32 * (i + 1) + lane;
      key[i] = slot >= 0 && slot < length ? __ldg(slots + slot) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool counts = static_cast<unsigned>(key[i]) < static_cast<unsigned>(t_k);
      const uint32_t valid = __ballot_sync(kAllLanes, counts);
      if (valid != 0) return end - 32 * i - __clz(static_cast<int>(valid));
    }
  }
  return 0;
}

}  // namespace flashdsa::core::cuda
