#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Sums over the slots of selections, by key, in a fixed order: a kernel stores every slot's row of
// a chunk of items, a stable sort brings the slots of one key together, and one CTA a key adds
// their rows to the accumulator in ascending (item, slot). Over the chunks, in order, each row of
// the result is one chain of additions, whatever the chunks are.

namespace flashdsa::core::cuda {

/// The slots of a chunk: `items` items from first_item, each a token or a part of one.
struct ChunkSlots {
  const int32_t* topk_indices;  // [tokens, K]
  int64_t topk_indices_row_stride;
  const int32_t* lengths;  // [tokens]: slots of a row that exist; null: K
  int64_t first_item;
  int items;
  int parts_log2;  // item = token << parts_log2 | part
  int topk;
  int t_k;
};

/// Device memory of the sort, each part for `slots` = items * K of the largest chunk.
struct OrderedWorkspace {
  float* rows;         // [slots, width]
  uint32_t* keys[2];   // [slots]: key of each slot, T_k for none; [1] sorted
  uint32_t* slots[2];  // [slots]: slot of each key; [1] sorted
  void* sort;
  size_t sort_bytes;
};

/// Bytes of OrderedWorkspace::sort.
size_t sort_bytes(int64_t slots, int t_k);

/// Adds the rows that the slots' kernel has stored to `accumulators` [T_k, width]; all rows are
/// aligned to 16 bytes. kWidth is 128, 512 or 576. t_k > 0, items > 0.
template <int kWidth>
void launch_ordered_sum(const ChunkSlots& slots, const OrderedWorkspace& workspace,
                        float* accumulators, cudaStream_t stream);

}  // namespace flashdsa::core::cuda
