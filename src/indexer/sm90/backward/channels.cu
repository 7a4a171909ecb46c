#include <algorithm>

#include "core/cuda/check.h"
#include "core/cuda/ptx.cuh"
#include "indexer/sm90/backward/channels.cuh"
#include "indexer/sm90/backward/launch.h"

namespace flashdsa::indexer::sm90::backward_pass {
namespace {

constexpr int kThreads = 256;
constexpr int kOctets = 16;         // of eight channels, one a thread
constexpr int64_t kMaxCtas = 8192;  // further rows go round a grid-stride loop

__device__ __forceinline__ void store_octet(const float (&value)[8], __nv_bfloat16* to,
                                            bool aligned) {
  if (aligned) {
    uint32_t pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pair[i] = core::cuda::pack_bf16(value[2 * i], value[2 * i + 1]);
    *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = __float2bfloat16(value[i]);
  }
}

__device__ __forceinline__ void store_octet(const float (&value)[8], float* to, bool aligned) {
  if (aligned) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reinterpret_cast<float4*>(to)[i] =
          make_float4(value[4 * i], value[4 * i + 1], value[4 * i + 2], value[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = value[i];
  }
}

// Half a warp takes a row, which it reads wholly before it writes: `to` may be `from`.
template <typename Number>
__global__ void __launch_bounds__(kThreads)
    store_channels_kernel(const float* from, Number* to, int64_t t_k, bool aligned) {
  const int octet = threadIdx.x % kOctets;
  constexpr int kRows = kThreads / kOctets;
  // All lanes of a warp go round equally often.
  for (int64_t first = blockIdx.x * int64_t{kRows}; first < t_k;
       first += gridDim.x * int64_t{kRows}) {
    const int64_t row = first + threadIdx.x / kOctets;
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      value[i] = row < t_k ? from[row * 128 + position_of(octet, i)] : 0.0f;
    }
    __syncwarp();
    if (row < t_k) store_octet(value, to + row * 128 + octet * 8, aligned);
  }
}

template <typename Number>
void store_channels(const float* from, Number* to, int64_t t_k, cudaStream_t stream) {
  constexpr int64_t kRows = kThreads / kOctets;
  const dim3 grid(static_cast<unsigned>(std::min((t_k + kRows - 1) / kRows, kMaxCtas)));
  const bool aligned = reinterpret_cast<uintptr_t>(to) % 16 == 0;
  store_channels_kernel<<<grid, kThreads, 0, stream>>>(from, to, t_k, aligned);
  core::cuda::check_launch("store_channels_kernel", grid, kThreads, 0);
}

}  // namespace

void launch_store_channels(const float* from, __nv_bfloat16* to, int64_t t_k, cudaStream_t stream) {
  store_channels(from, to, t_k, stream);
}

void launch_store_channels(const float* from, float* to, int64_t t_k, cudaStream_t stream) {
  store_channels(from, to, t_k, stream);
}

}  // namespace flashdsa::indexer::sm90::backward_pass
