#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/backward_many_heads/config.h"

namespace flashdsa::attention::sm90::backward_many_heads {

/// grad_q and sink_terms of items of up to 64 heads, and their adds to grad_kv_rows, without the
/// repairs that needs_repair asks for. items > 0.
void launch_backward_many_heads(const KernelParams& params, int head_dim, int device,
                                cudaStream_t stream);

/// The same of groups. params.items is T_q, the most that there can be.
void launch_backward_groups(const KernelParams& params, int head_dim, int device,
                            cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_many_heads
