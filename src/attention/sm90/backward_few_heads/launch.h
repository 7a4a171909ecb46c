#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/backward_few_heads/config.h"

namespace flashdsa::attention::sm90::backward_few_heads {

/// grad_q and sink_terms of the rows of at most kMostHeads heads, and their adds to grad_kv_rows,
/// without the repairs that needs_repair asks for. items > 0, two_head_blocks = 0.
void launch_backward_few_heads(const KernelParams& params, int head_dim, int device,
                               cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_few_heads
