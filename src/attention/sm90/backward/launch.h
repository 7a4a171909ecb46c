#pragma once

#include <cuda_runtime_api.h>

#include "attention/sm90/backward/config.h"

namespace flashdsa::attention::sm90::backward_pass {

/// CTAs that one launch keeps busy on the current device.
int resident_ctas(int device);

/// grad_q and sink_terms of the items; every slot that holds a key has its row of grad_kv stored in
/// a row of its own, repairs included. items > 0.
void launch_backward_ordered(const KernelParams& params, int head_dim, int device,
                             cudaStream_t stream);

/// What grad_kv_rows lacks of the items that needs_repair flags, by adds; of rows alone. items > 0.
void launch_repair(const KernelParams& params, int head_dim, int device, cudaStream_t stream);

/// The same of groups. params.items is T_q, the most that there can be.
void launch_repair_groups(const KernelParams& params, int head_dim, int device,
                          cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_pass
