#include <algorithm>

#include "attention/sm90/backward/passes.h"
#include "core/cuda/check.h"
#include "core/cuda/ptx.cuh"

namespace flashdsa::attention::sm90::backward_pass {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxCtas = 8192;  // further work goes round a grid-stride loop

dim3 grid_for(int64_t work_items, int64_t items_per_cta) {
  const int64_t ctas = (work_items + items_per_cta - 1) / items_per_cta;
  return dim3(static_cast<unsigned>(std::min(ctas, kMaxCtas)));
}

__device__ __forceinline__ int64_t first_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t index_step() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

// One CTA a head.
__global__ void __launch_bounds__(kThreads)
    sink_sum_kernel(const float* terms, int64_t t_q, int heads, float* grad_attn_sink) {
  __shared__ double sums[kThreads];
  double sum = 0;
  for (int64_t t = threadIdx.x; t < t_q; t += kThreads) sum += terms[t * heads + blockIdx.x];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) grad_attn_sink[blockIdx.x] = static_cast<float>(0.0 - sums[0]);
}

// Channels 8j + 2q, 8j + 2q + 1 of a group, which lie in positions 4q + 2j, 4q + 2j + 1.
struct Group {
  float4 quad[4];

  __device__ float2 pair(int j, int q) const {
    return j == 0 ? make_float2(quad[q].x, quad[q].y) : make_float2(quad[q].z, quad[q].w);
  }
};

template <bool kAligned>
__device__ __forceinline__ void store_group(const Group& group, __nv_bfloat16* to) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float2 pair = group.pair(j, q);
      words[q] = core::cuda::pack_bf16(pair.x, pair.y);
    }
    if constexpr (kAligned) {
      reinterpret_cast<uint4*>(to)[j] = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        to[8 * j + 2 * q] = __ushort_as_bfloat16(static_cast<uint16_t>(words[q]));
        to[8 * j + 2 * q + 1] = __ushort_as_bfloat16(static_cast<uint16_t>(words[q] >> 16));
      }
    }
  }
}

template <bool kAligned>
__device__ __forceinline__ void store_group(const Group& group, float* to) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int q = 0; q < 4; q += 2) {
      const float2 a = group.pair(j, q), b = group.pair(j, q + 1);
      if constexpr (kAligned) {
        reinterpret_cast<float4*>(to)[2 * j + q / 2] = make_float4(a.x, a.y, b.x, b.y);
      } else {
        to[8 * j + 2 * q] = a.x;
        to[8 * j + 2 * q + 1] = a.y;
        to[8 * j + 2 * q + 2] = b.x;
        to[8 * j + 2 * q + 3] = b.y;
      }
    }
  }
}

// One thread a group, which it reads wholly before it writes: `to` may be `from`.
template <typename Number, bool kAligned>
__global__ void __launch_bounds__(kThreads)
    unpermute_kernel(const float* from, Number* to, int64_t groups) {
  for (int64_t g = first_index(); g < groups; g += index_step()) {
    Group group;
#pragma unroll
    for (int q = 0; q < 4; ++q) group.quad[q] = reinterpret_cast<const float4*>(from)[4 * g + q];
    store_group<kAligned>(group, to + 16 * g);
  }
}

template <typename Number>
void unpermute(const float* from, Number* to, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const int64_t groups = count / 16;
  const dim3 grid = grid_for(groups, kThreads);
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  const auto kernel = aligned ? unpermute_kernel<Number, true> : unpermute_kernel<Number, false>;
  kernel<<<grid, kThreads, 0, stream>>>(from, to, groups);
  core::cuda::check_launch("unpermute_kernel", grid, kThreads, 0);
}

}  // namespace

void launch_sink_sum(const float* terms, int64_t t_q, int heads, float* grad_attn_sink,
                     cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(heads));
  sink_sum_kernel<<<grid, kThreads, 0, stream>>>(terms, t_q, heads, grad_attn_sink);
  core::cuda::check_launch("sink_sum_kernel", grid, kThreads, 0);
}

void launch_unpermute(const float* from, __nv_bfloat16* to, int64_t count, cudaStream_t stream) {
  unpermute(from, to, count, stream);
}

void launch_unpermute(const float* from, float* to, int64_t count, cudaStream_t stream) {
  unpermute(from, to, count, stream);
}

}  // namespace flashdsa::attention::sm90::backward_pass
