// What the forward kernels have in common: the end of a softmax row, and stores of out.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "core/cuda/ptx.cuh"

namespace flashdsa::attention::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMaximumSlack = 8.f;  // log2 of how far P may outgrow 1
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Everything this warp wrote or read before is behind the arrival.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane == 0) core::cuda::barrier_arrive(barrier);
}

// 1 / (sum + 2^(sink - reference)); sink in log2 units, -inf for none. Neither infinite sinks nor
// those far from the reference make NaN; 2^x of a large |x| stays subnormal, hence exp2f.
__device__ __forceinline__ float inverse_denominator(float sum, float reference, float sink) {
  if (sink == -INFINITY) return 1.f / sum;
  const float above = sink - reference;
  if (above > 0) {
    const float shrink = exp2f(-above);
    return shrink / (sum * shrink + 1.f);
  }
  return 1.f / (sum + exp2f(above));
}

__device__ __forceinline__ void store_16_bytes(__nv_bfloat16* to, const uint32_t (&words)[4],
                                               bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    halves[2 * i] = static_cast<uint16_t>(words[i]);
    halves[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
  }
}

// Transposes the 4 x 4 words of four neighbouring lanes: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  uint32_t a = __shfl_xor_sync(kAllLanes, odd ? words[0] : words[1], 1);
  uint32_t b = __shfl_xor_sync(kAllLanes, odd ? words[2] : words[3], 1);
  if (odd) {
    words[0] = a, words[2] = b;
  } else {
    words[1] = a, words[3] = b;
  }
  a = __shfl_xor_sync(kAllLanes, upper ? words[0] : words[2], 2);
  b = __shfl_xor_sync(kAllLanes, upper ? words[1] : words[3], 2);
  if (upper) {
    words[0] = a, words[1] = b;
  } else {
    words[2] = a, words[3] = b;
  }
}

}  // namespace flashdsa::attention::sm90
