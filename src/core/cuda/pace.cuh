// Keeps the CTAs of a persistent grid side by side, so that they share what second-level cache
// holds: rows list their keys in ascending order, and CTAs that begin their items together are at
// the same stretch of keys at any time.
//
// It is a pace and no barrier: a CTA whose companions are not there in time goes on. So nothing
// hangs where the grid is not resident as a whole.
#pragma once

#include <cstdint>

namespace flashdsa::core::cuda {

// Called by whole warps of a CTA before an item that has `place` in the CTA's sequence (any count
// that grows alike in all CTAs), and with a place behind all at its end. `step`: how much further
// that is than the CTA's last place. `places`: null for no pace, else zero before the kernel; one
// warp `tells` the other CTAs.
__device__ __forceinline__ void keep_pace(uint32_t* places, bool tells, uint32_t place,
                                          uint32_t step) {
  if (places == nullptr) return;
  if ((threadIdx.x & 31) == 0) {
    if (tells) atomicAdd(places, step);
    constexpr int kMostPolls = 64;  // of some 0.7 us: less than an item of 2048 keys takes
    uint32_t sum = 0;
    for (int i = 0; i < kMostPolls && sum < place * gridDim.x; ++i) {
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(sum) : "l"(places) : "memory");
    }
  }
  __syncwarp();
}

}  // namespace flashdsa::core::cuda
