#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/forward/config.h"

namespace flashdsa::attention::sm90::forward_pass {

/// Queues out, lse and max_logits of the items on the current device. items > 0.
void launch_forward(const KernelParams& params, int head_dim, int device, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::forward_pass
