#include <algorithm>

#include "attention/sm90/backward/groups.h"
#include "core/cuda/check.h"
#include "core/cuda/warp_rows.cuh"

namespace flashdsa::attention::sm90::backward_pass {
namespace {

using core::cuda::first_row;
using core::cuda::grid_of_warps;
using core::cuda::kRowThreads;
using core::cuda::kRowWarps;
using core::cuda::row_step;
using selection::ItemKind;
using selection::PlanItem;

constexpr int64_t kMostCtas = 1 << 13;  // further items go round a grid-stride loop

__device__ __forceinline__ bool is_not_finite(uint32_t pair) {
  constexpr uint32_t kLow = 0x7F80u, kHigh = kLow << 16;  // the exponents of BF16
  return (pair & kLow) == kLow || (pair & kHigh) == kHigh;
}

// Whether this lane sees a NaN or infinity in its part of a vector of a multiple of 8 numbers.
__device__ __forceinline__ bool sees_not_finite(const __nv_bfloat16* vector, int width) {
  bool seen = false;
  for (int i = threadIdx.x % 32; i < width / 8; i += 32) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(vector) + i);
    seen |= is_not_finite(words.x) | is_not_finite(words.y) | is_not_finite(words.z) |
            is_not_finite(words.w);
  }
  return seen;
}

// bad_keys and whether there is one, and numbers; a warp a key.
__global__ void __launch_bounds__(kRowThreads)
    bad_keys_kernel(const __grid_constant__ StridedRows kv, const __grid_constant__ GroupItems to) {
  for (int64_t s = first_row(); s < kv.outer; s += row_step()) {
    const bool bad =
        __any_sync(0xFFFFFFFFu, sees_not_finite(kv.data + s * kv.outer_stride, kv.width));
    if (threadIdx.x % 32 != 0) continue;
    to.bad_keys[s] = bad;
    to.numbers[s] = static_cast<int32_t>(s);
    if (bad) to.counts->bad_keys = 1;
  }
}

// The keys of an item of several tokens.
__device__ __forceinline__ const int32_t* keys_of(const GroupInputs& in, const GroupItems& to,
                                                  const PlanItem& item) {
  if (item.kind == ItemKind::kRange) return to.numbers + item.first_key;
  return in.plan.lists + int64_t{item.first_row} * in.plan.topk;
}

// Whether this thread sees an input of the item that is not finite; a warp a vector.
__device__ __forceinline__ bool sees_bad_input(const GroupInputs& in, const GroupItems& to,
                                               const PlanItem& item) {
  bool seen = false;
  const int heads = static_cast<int>(in.q.inner);
  for (int row = threadIdx.x / 32; row < item.rows * heads; row += kRowWarps) {
    const int64_t token = item.first_row + row / heads, head = row % heads;
    seen |= sees_not_finite(in.q.data + token * in.q.outer_stride + head * in.q.inner_stride,
                            in.q.width);
    seen |= sees_not_finite(
        in.grad_out.data + token * in.grad_out.outer_stride + head * in.grad_out.inner_stride,
        in.grad_out.width);
  }
  if (__ldg(&to.counts->bad_keys) == 0) return seen;
  const int32_t* keys = keys_of(in, to, item);
  for (int i = threadIdx.x; i < item.keys; i += kRowThreads) {
    const int key = keys[i];
    if (key >= 0 && key < in.kv.outer) seen |= to.bad_keys[key] != 0;
  }
  return seen;
}

// A CTA an item; four on an SM, since for six the compiler spills.
__global__ void __launch_bounds__(kRowThreads, 4)
    group_items_kernel(const __grid_constant__ GroupInputs in,
                       const __grid_constant__ GroupItems to) {
  const int count = __ldg(in.plan.item_count);
  for (int index = blockIdx.x; index < count; index += static_cast<int>(gridDim.x)) {
    const PlanItem item = in.plan.items[index];
    const bool is_alone = item.rows == 1 || __syncthreads_or(sees_bad_input(in, to, item)) != 0;
    if (threadIdx.x != 0) continue;
    if (!is_alone) {
      to.items[atomicAdd(&to.counts->items, 1)] = {
          keys_of(in, to, item), item.first_row, static_cast<uint16_t>(item.keys),
          static_cast<uint8_t>(item.rows), item.kind == ItemKind::kRange};
      continue;
    }
    int32_t* rows = to.single_rows + atomicAdd(&to.counts->rows, item.rows);
#pragma unroll 1
    for (int r = 0; r < item.rows; ++r) rows[r] = item.first_row + r;
  }
}

}  // namespace

void launch_group_items(const GroupInputs& inputs, const GroupItems& to, cudaStream_t stream) {
  core::cuda::check(cudaMemsetAsync(to.counts, 0, sizeof(*to.counts), stream),
                    "zeroing the counts of the items");
  const dim3 keys_grid = grid_of_warps(std::max<int64_t>(inputs.kv.outer, 1));
  bad_keys_kernel<<<keys_grid, kRowThreads, 0, stream>>>(inputs.kv, to);
  core::cuda::check_launch("bad_keys_kernel", keys_grid, kRowThreads, 0);
  const dim3 grid(static_cast<unsigned>(std::min(inputs.q.outer, kMostCtas)));
  group_items_kernel<<<grid, kRowThreads, 0, stream>>>(inputs, to);
  core::cuda::check_launch("group_items_kernel", grid, kRowThreads, 0);
}

}  // namespace flashdsa::attention::sm90::backward_pass
