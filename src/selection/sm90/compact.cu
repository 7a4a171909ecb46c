// Canonical index rows (SPEC section 4) on the device.
//
//   one CTA a row: kThreads x kItems slots in registers, invalid ones as the largest number
//   canonical already (ascending, -1 suffix), as the indexer leaves rows: copied
//   else: block radix sort
//
// A row is read wholly before any of it is written, so it may be sorted in place.

#include <cub/cub.cuh>
#include <limits>

#include "core/cuda/check.h"
#include "core/device.h"
#include "selection/backends.h"

namespace flashdsa::selection::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr std::int32_t kInvalid = std::numeric_limits<std::int32_t>::max();  // above every key
constexpr int kKeyBits = 31;

template <int kItems>
__global__ void __launch_bounds__(kThreads) compact_kernel(CompactParams p) {
  using Sort = cub::BlockRadixSort<std::uint32_t, kThreads, kItems>;
  using Adjacent = cub::BlockAdjacentDifference<std::uint32_t, kThreads>;
  __shared__ union {
    typename Sort::TempStorage sort;
    typename Adjacent::TempStorage adjacent;
  } s;

  const std::int64_t row = blockIdx.x;
  const std::int32_t* from = p.indices + row * p.indices_row_stride;
  std::int32_t* to = p.sorted_indices + row * p.topk;
  std::uint32_t keys[kItems];
  int valid = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {  // blocked: thread t holds slots t * kItems + i
    const int slot = static_cast<int>(threadIdx.x) * kItems + i;
    const std::int32_t key = slot < p.topk ? from[slot] : -1;
    const bool counts = key >= 0 && key < p.key_count;
    valid += counts;
    keys[i] = static_cast<std::uint32_t>(counts ? key : kInvalid);
  }

  std::uint32_t out_of_order[kItems];
  Adjacent(s.adjacent)
      .SubtractLeft(
          keys, out_of_order,
          [](std::uint32_t mine, std::uint32_t left) -> std::uint32_t { return mine < left; });
  bool disorder =
      threadIdx.x > 0 && out_of_order[0] != 0;  // the row's first slot has no left neighbour
#pragma unroll
  for (int i = 1; i < kItems; ++i) disorder = disorder || out_of_order[i] != 0;
  if (__syncthreads_or(disorder)) {
    Sort(s.sort).Sort(keys, 0, kKeyBits);
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int slot = static_cast<int>(threadIdx.x) * kItems + i;
    if (slot >= p.topk) continue;
    to[slot] =
        keys[i] == static_cast<std::uint32_t>(kInvalid) ? -1 : static_cast<std::int32_t>(keys[i]);
  }

  __shared__ int s_valid;
  if (threadIdx.x == 0) s_valid = 0;
  __syncthreads();
  atomicAdd(&s_valid, valid);
  __syncthreads();
  if (threadIdx.x == 0) p.lengths[row] = s_valid;
}

template <int kItems>
void launch_compact(const CompactParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.rows));
  compact_kernel<kItems><<<grid, kThreads, 0, stream>>>(params);
  core::cuda::check_launch("compact_kernel", grid, kThreads, 0);
}

}  // namespace

std::string refusal(const CompactParams& params) {
  if (params.device.kind != DeviceKind::kCuda) return "the tensors are not on a CUDA device";
  return core::sm90_refusal(params.device.index);
}

void compact_and_sort(const CompactParams& params, const Runtime& runtime) {
  if (params.rows == 0) return;
  const core::cuda::DeviceGuard guard(params.device.index);
  const auto stream = static_cast<cudaStream_t>(runtime.stream.handle);
  if (params.topk <= kThreads) {
    launch_compact<1>(params, stream);
  } else if (params.topk <= 4 * kThreads) {
    launch_compact<4>(params, stream);
  } else {
    launch_compact<8>(params, stream);
  }
}

}  // namespace flashdsa::selection::sm90
