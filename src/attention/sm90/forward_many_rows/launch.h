#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/forward_many_rows/config.h"

namespace flashdsa::attention::sm90::forward_many_rows {

/// Queues out, lse and max_logits of all rows on the current device, by params.extents, whatever
/// the number of heads. Does not read the plan.
void launch_rows(const KernelParams& params, int head_dim, int device, cudaStream_t stream);

/// Queues out, lse and max_logits of the rows in kUnion and kRange items of params.plan on the
/// current device, for at most 32 heads; the other items are left alone.
void launch_groups(const KernelParams& params, int head_dim, int device, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::forward_many_rows
