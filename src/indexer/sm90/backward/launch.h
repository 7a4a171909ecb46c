#pragma once

#include <cuda_runtime_api.h>

#include "indexer/sm90/backward/config.h"

namespace flashdsa::indexer::sm90::backward_pass {

/// grad_index_q and grad_head_weights of the rows, and their adds to grad_k_rows; with `ordered`
/// every slot that holds a key is stored in its own row instead. rows > 0.
void launch_backward(const KernelParams& params, bool ordered, int device, cudaStream_t stream);

/// grad_index_k [T_k, 128] = FP32 rows in the order of channels.cuh, rounded to BF16. `from` is
/// aligned to 16 bytes, `to` need not be. t_k > 0.
void launch_store_channels(const float* from, __nv_bfloat16* to, int64_t t_k, cudaStream_t stream);

/// The same in FP32. `to` may be `from`.
void launch_store_channels(const float* from, float* to, int64_t t_k, cudaStream_t stream);

}  // namespace flashdsa::indexer::sm90::backward_pass
