#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/forward_many_heads/config.h"

namespace flashdsa::attention::sm90::forward_many_heads {

/// Queues out, lse and max_logits of all rows on the current device, by params.extents, whatever
/// the number of heads. Does not read the plan.
void launch_forward_many_heads(const KernelParams& params, int head_dim, int device,
                               cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::forward_many_heads
