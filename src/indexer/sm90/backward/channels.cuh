// The channel order of FP32 grad_index_k rows: the kernel's lanes hold channels 16 w + g + {0, 8},
// 64 + ..., which stand side by side at position 32 w + 4 g, so that eight lanes add 128
// contiguous bytes.
#pragma once

namespace flashdsa::indexer::sm90::backward_pass {

// Position of channel 8 o + i, o = 0..15.
__device__ __forceinline__ int position_of(int octet, int i) {
  return (octet >> 1 & 3) * 32 + i * 4 + (octet & 1) + (octet >> 3) * 2;
}

}  // namespace flashdsa::indexer::sm90::backward_pass
