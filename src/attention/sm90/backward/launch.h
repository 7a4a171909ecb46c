#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/backward/config.h"

namespace flashdsa::attention::sm90::backward_pass {

/// CTAs that one launch keeps busy on the current device.
int resident_ctas(int device);

/// grad_q and sink_terms of the items, and their adds to grad_kv_rows, repairs included; with
/// `ordered` every slot that holds a key is stored in its own row instead. items > 0.
void launch_backward(const KernelParams& params, int head_dim, bool ordered, int device,
                     cudaStream_t stream);

/// The same of groups, by atomics. params.items is T_q, the most that there can be.
void launch_backward_groups(const KernelParams& params, int head_dim, int device,
                            cudaStream_t stream);

/// Only the repairs, of rows alone, after the kernel for few heads. items > 0.
void launch_repair(const KernelParams& params, int head_dim, int device, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_pass
