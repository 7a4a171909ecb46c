// Passes over the rows of a block that need no matrix product; a warp per row.

#include "core/cuda/check.h"
#include "core/cuda/warp_rows.cuh"
#include "indexer/params.h"
#include "indexer/sm90/plan/rows.h"
#include "indexer/sm90/plan/visible.cuh"

namespace flashdsa::indexer::sm90 {
namespace {

using core::cuda::first_row;
using core::cuda::grid_of_warps;
using core::cuda::kRowThreads;
using core::cuda::row_step;

__device__ __forceinline__ float weight(const RowsParams& p, int64_t row, int head) {
  if (head >= p.heads) return 0.f;
  const int64_t at = row * p.head_weights_row_stride + head;
  return p.weights_are_bf16
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.head_weights)[at])
             : static_cast<const float*>(p.head_weights)[at];
}

// All of the row's keys, then -1; such a row has scores to report only when it has no key.
__device__ __forceinline__ void write_whole_row(const RowsParams& p, int64_t row, KeyRange keys) {
  for (int i = threadIdx.x % 32; i < p.block.topk; i += 32) {
    const int64_t at = row * p.block.topk + i;
    const bool filled = static_cast<uint32_t>(i) < keys.size();
    p.topk_indices[at] = filled ? static_cast<int32_t>(keys.begin) + i : -1;
    if (p.topk_scores != nullptr) p.topk_scores[at] = __int_as_float(0xFF800000);
  }
}

__global__ void __launch_bounds__(kRowThreads) rows_kernel(const __grid_constant__ RowsParams p) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = first_row(); row < p.padded_rows; row += row_step()) {
    const bool exists = row < p.block.rows;
    const KeyRange keys = exists ? visible_keys(p.block, row) : KeyRange{};
    const bool scored = exists && needs_scores(p.block, keys);
    for (int h = lane; h < p.padded_heads; h += 32) {
      p.weights[row * p.padded_heads + h] = scored ? weight(p, row, h) : 0.f;
    }
    if (!exists) continue;
    if (p.topk_length != nullptr && lane == 0) {
      p.topk_length[row] =
          static_cast<int32_t>(min(keys.size(), static_cast<uint32_t>(p.block.topk)));
    }
    if (!scored) write_whole_row(p, row, keys);
  }
}

__global__ void __launch_bounds__(kRowThreads)
    pack_heads_kernel(const __grid_constant__ StridedHeads from,
                      const __grid_constant__ BlockRows block, int64_t padded_heads,
                      __nv_bfloat16* to) {
  for (int64_t at = first_row(); at < from.rows * padded_heads; at += row_step()) {
    const int64_t row = at / padded_heads, head = at % padded_heads;
    const bool read = head < from.heads && (block.starts == nullptr || needs_scores(block, row));
    const __nv_bfloat16* source = from.data + row * from.row_stride + head * from.head_stride;
    for (int c = threadIdx.x % 32; c < kIndexDim; c += 32) {
      to[at * kIndexDim + c] = read ? source[c] : __nv_bfloat16(0.f);
    }
  }
}

}  // namespace

void launch_rows(const RowsParams& params, cudaStream_t stream) {
  const dim3 grid = grid_of_warps(params.padded_rows);
  rows_kernel<<<grid, kRowThreads, 0, stream>>>(params);
  core::cuda::check_launch("rows_kernel", grid, kRowThreads, 0);
}

void launch_pack_heads(const StridedHeads& from, const BlockRows& block, std::int64_t padded_heads,
                       __nv_bfloat16* to, cudaStream_t stream) {
  const dim3 grid = grid_of_warps(from.rows * padded_heads);
  pack_heads_kernel<<<grid, kRowThreads, 0, stream>>>(from, block, padded_heads, to);
  core::cuda::check_launch("pack_heads_kernel", grid, kRowThreads, 0);
}

}  // namespace flashdsa::indexer::sm90
