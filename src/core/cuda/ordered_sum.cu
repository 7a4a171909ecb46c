#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "core/cuda/check.h"
#include "core/cuda/ordered_sum.h"

namespace flashdsa::core::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWindow = 32;   // sorted positions a team looks at for first slots of keys
constexpr int kInFlight = 8;  // rows of one key loaded at once

// A team's threads own four channels each of the keys that begin in its window.
template <int kWidth>
constexpr int kTeamThreads = kWidth / 4;
template <int kWidth>
constexpr int kTeams = std::max(128 / kTeamThreads<kWidth>, 1);  // of a CTA

__global__ void __launch_bounds__(kThreads)
    slot_keys_kernel(const __grid_constant__ ChunkSlots p, uint32_t* keys, uint32_t* slots,
                     int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  const int64_t token = (p.first_item + i / p.topk) >> p.parts_log2;
  const int slot = i % p.topk;
  const int length = p.lengths == nullptr ? p.topk : p.lengths[token];
  const int key = slot < length ? p.topk_indices[token * p.topk_indices_row_stride + slot] : -1;
  const bool counts = static_cast<unsigned>(key) < static_cast<unsigned>(p.t_k);
  keys[i] = static_cast<uint32_t>(counts ? key : p.t_k);
  slots[i] = static_cast<uint32_t>(i);
}

__device__ __forceinline__ void add_in_place(float4& sum, const float4& value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

// Adds the rows of the run of one key that begins at `first`.
template <int kWidth>
__device__ __forceinline__ void add_run(const float* rows, const uint32_t* keys,
                                        const uint32_t* slots, int first, int count,
                                        float* accumulators) {
  const uint32_t key = keys[first];
  const int channel = static_cast<int>(threadIdx.x) % kTeamThreads<kWidth> * 4;
  auto* total = reinterpret_cast<float4*>(accumulators + int64_t{key} * kWidth + channel);
  float4 sum = *total;
  for (int position = first; position < count && keys[position] == key; position += kInFlight) {
    float4 value[kInFlight];
    bool mine[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      mine[i] = position + i < count && keys[position + i] == key;
      if (mine[i]) {
        const int64_t row = slots[position + i];
        value[i] = __ldcs(reinterpret_cast<const float4*>(rows + row * kWidth + channel));
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (mine[i]) add_in_place(sum, value[i]);
    }
  }
  *total = sum;
}

// The team that looks at the first slot of a key adds the key's whole run.
template <int kWidth>
__global__ void __launch_bounds__(kTeamThreads<kWidth>* kTeams<kWidth>)
    ordered_sum_kernel(const float* rows, const uint32_t* keys, const uint32_t* slots, int count,
                       uint32_t t_k, float* accumulators) {
  const int team = blockIdx.x * kTeams<kWidth> + threadIdx.x / kTeamThreads<kWidth>;
  const int begin = team * kWindow, end = min(begin + kWindow, count);
  for (int position = begin; position < end; ++position) {
    const uint32_t key = keys[position];
    if (key >= t_k) return;  // slots without a key come last
    if (position > 0 && keys[position - 1] == key) continue;
    add_run<kWidth>(rows, keys, slots, position, count, accumulators);
  }
}

int key_bits(int t_k) { return static_cast<int>(std::bit_width(static_cast<unsigned>(t_k))); }

}  // namespace

size_t sort_bytes(int64_t slots, int t_k) {
  size_t bytes = 0;
  const uint32_t* in = nullptr;
  uint32_t* out = nullptr;
  check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, in, out, in, out, static_cast<int>(slots),
                                        0, key_bits(t_k)),
        "sizing the sort of slots");
  return bytes;
}

template <int kWidth>
void launch_ordered_sum(const ChunkSlots& slots, const OrderedWorkspace& workspace,
                        float* accumulators, cudaStream_t stream) {
  const int count = slots.items * slots.topk;
  const dim3 key_grid(static_cast<unsigned>((count + kThreads - 1) / kThreads));
  slot_keys_kernel<<<key_grid, kThreads, 0, stream>>>(slots, workspace.keys[0], workspace.slots[0],
                                                      count);
  check_launch("slot_keys_kernel", key_grid, kThreads, 0);

  size_t bytes = workspace.sort_bytes;
  check(cub::DeviceRadixSort::SortPairs(workspace.sort, bytes, workspace.keys[0], workspace.keys[1],
                                        workspace.slots[0], workspace.slots[1], count, 0,
                                        key_bits(slots.t_k), stream),
        "sorting slots");

  constexpr int kPositions = kWindow * kTeams<kWidth>;  // of a CTA
  constexpr int kSumThreads = kTeamThreads<kWidth> * kTeams<kWidth>;
  const dim3 grid(static_cast<unsigned>((count + kPositions - 1) / kPositions));
  ordered_sum_kernel<kWidth>
      <<<grid, kSumThreads, 0, stream>>>(workspace.rows, workspace.keys[1], workspace.slots[1],
                                         count, static_cast<uint32_t>(slots.t_k), accumulators);
  check_launch("ordered_sum_kernel", grid, kSumThreads, 0);
}

template void launch_ordered_sum<128>(const ChunkSlots&, const OrderedWorkspace&, float*,
                                      cudaStream_t);
template void launch_ordered_sum<512>(const ChunkSlots&, const OrderedWorkspace&, float*,
                                      cudaStream_t);
template void launch_ordered_sum<576>(const ChunkSlots&, const OrderedWorkspace&, float*,
                                      cudaStream_t);

}  // namespace flashdsa::core::cuda
