#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// The small passes before and after the backward kernel. All are asynchronous on `stream`; an empty
// problem launches nothing.
//
// Permuted channel order of FP32 grad_kv rows: the kernel's lanes hold the 16 channels of a group
// so that position 4q + 2j + e is channel 8j + 2q + e; 16-byte adds then need no exchange inside a
// quad of lanes.

namespace flashdsa::attention::sm90::backward_pass {

/// grad_attn_sink[h] = - sum over t of terms[t, h], in FP64 and a fixed order.
void launch_sink_sum(const float* terms, int64_t t_q, int heads, float* grad_attn_sink,
                     cudaStream_t stream);

/// Channels back into their own order, rounded to BF16. `count` numbers, a multiple of 16; `from`
/// is aligned to 16 bytes, `to` need not be.
void launch_unpermute(const float* from, __nv_bfloat16* to, int64_t count, cudaStream_t stream);

/// The same in FP32. `to` may be `from`.
void launch_unpermute(const float* from, float* to, int64_t count, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_pass
