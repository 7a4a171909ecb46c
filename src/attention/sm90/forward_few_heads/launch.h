#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/forward_few_heads/config.h"

namespace flashdsa::attention::sm90::forward_few_heads {

/// Queues out, lse and max_logits on the current device for at most kMostHeads heads. With a plan
/// (params.plan.items), of the rows that are kSlots items, and the other items are left alone;
/// without one, of the rows 0 .. params.items - 1, by params.extents. params.items > 0 bounds the
/// number of items in either case. Reads neither kinds, not_finite and repair nor the fields that
/// cut rows into tiles of heads and tokens.
void launch_forward_few_heads(const KernelParams& params, int head_dim, int device,
                              cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::forward_few_heads
