#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "attention/sm90/backward/config.h"

// grad_kv in a fixed order: the ordered kernel stores every slot's row of a chunk of items, a
// stable sort brings the slots of one key together, and one CTA a key adds their rows to the
// accumulator in ascending (item, slot). Over the chunks, in order, each row of grad_kv is one
// chain of additions, whatever the chunks are.

namespace flashdsa::attention::sm90::backward_pass {

/// Device memory of the sort, each part for `slots` = items * K of the largest chunk.
struct OrderedWorkspace {
  float* rows;         // [slots, D]
  uint32_t* keys[2];   // [slots]: key of each slot, T_k for none; [1] sorted
  uint32_t* slots[2];  // [slots]: slot of each key; [1] sorted
  void* sort;
  size_t sort_bytes;
};

/// Bytes of OrderedWorkspace::sort.
size_t sort_bytes(int64_t slots, int t_k);

/// Adds the rows that `launch_backward(params, ..., ordered)` has stored to `accumulators`
/// [T_k, D].
void launch_ordered_sum(const KernelParams& params, int head_dim, const OrderedWorkspace& workspace,
                        float* accumulators, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_pass
