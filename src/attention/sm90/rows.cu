// What the kernels need to be told, or to be given, before they start.
#include <limits>

#include "attention/sm90/rows.h"
#include "core/cuda/check.h"
#include "core/cuda/warp_rows.cuh"

namespace flashdsa::attention::sm90 {
namespace {

using core::cuda::first_row;
using core::cuda::grid_of_warps;
using core::cuda::kRowThreads;
using core::cuda::row_extent;
using core::cuda::row_step;

// extents [T_q] from topk_indices [T_q, K] and topk_length [T_q]; a warp per row.
__global__ void __launch_bounds__(kRowThreads)
    row_extents_kernel(const __grid_constant__ SlotRows rows, int32_t* extents) {
  for (int64_t t = first_row(); t < rows.t_q; t += row_step()) {
    int length = rows.topk;
    if (rows.topk_length != nullptr) length = min(max(__ldg(rows.topk_length + t), 0), rows.topk);
    const int extent = row_extent(rows.topk_indices + t * rows.row_stride, length, rows.t_k);
    if (threadIdx.x % 32 == 0) extents[t] = extent;
  }
}

// to [outer * inner, width] = rows; a warp per row, which may begin at any element.
__global__ void __launch_bounds__(kRowThreads)
    pack_rows_kernel(const __grid_constant__ StridedRows rows, __nv_bfloat16* to) {
  for (int64_t row = first_row(); row < rows.outer * rows.inner; row += row_step()) {
    const __nv_bfloat16* from =
        rows.data + row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
    for (int c = threadIdx.x % 32; c < rows.width; c += 32) to[row * rows.width + c] = from[c];
  }
}

bool is_whole(int64_t elements) { return elements % 8 == 0; }  // eight BF16 numbers are 16 bytes

}  // namespace

void launch_row_extents(const SlotRows& rows, int32_t* extents, cudaStream_t stream) {
  if (rows.t_q == 0) return;
  const dim3 grid = grid_of_warps(rows.t_q);
  row_extents_kernel<<<grid, kRowThreads, 0, stream>>>(rows, extents);
  core::cuda::check_launch("row_extents_kernel", grid, kRowThreads, 0);
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

bool rows_are_aligned(const StridedRows& rows) {
  constexpr int64_t kMostElements = std::numeric_limits<int32_t>::max() / 2;
  return is_aligned(rows.data) &&
         (rows.outer <= 1 || (is_whole(rows.outer_stride) && rows.outer_stride <= kMostElements)) &&
         (rows.inner <= 1 || is_whole(rows.inner_stride));
}

void launch_pack_rows(const StridedRows& rows, __nv_bfloat16* to, cudaStream_t stream) {
  const dim3 grid = grid_of_warps(rows.outer * rows.inner);
  pack_rows_kernel<<<grid, kRowThreads, 0, stream>>>(rows, to);
  core::cuda::check_launch("pack_rows_kernel", grid, kRowThreads, 0);
}

}  // namespace flashdsa::attention::sm90
