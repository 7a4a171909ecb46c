#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/forward_few_heads/config.h"

namespace flashdsa::attention::sm90::forward_few_heads {

/// Queues out, lse and max_logits on the current device for at most kMostHeads heads. With a plan
/// (params.plan.items), of the rows that are kSlots items, and the other items are left alone;
/// without one, of all rows, by params.extents.
void launch_forward_few_heads(const KernelParams& params, int head_dim, int device,
                              cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::forward_few_heads
