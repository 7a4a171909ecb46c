#pragma once

#include "indexer/sm90/plan/rows.h"

namespace flashdsa::indexer::sm90 {

struct KeyRange {
  uint32_t begin;
  uint32_t end;

  __device__ __forceinline__ uint32_t size() const { return end - begin; }
};

// The row's visible keys that lie in the storage, whatever starts and causal_lengths hold.
__device__ __forceinline__ KeyRange visible_keys(const BlockRows& block, int64_t row) {
  const int64_t t_k = block.t_k;
  const int64_t start = __ldg(block.starts + row);
  const int64_t length = max(__ldg(block.causal_lengths + row), 0);
  const int64_t begin = min(max(start, int64_t{0}), t_k);
  const int64_t end = max(min(start + length, t_k), begin);
  return {static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
}

// A row that selects all of its keys needs no score, unless scores are asked for.
__device__ __forceinline__ bool needs_scores(const BlockRows& block, KeyRange keys) {
  return keys.size() > (block.wants_scores ? 0u : static_cast<uint32_t>(block.topk));
}
__device__ __forceinline__ bool needs_scores(const BlockRows& block, int64_t row) {
  return needs_scores(block, visible_keys(block, row));
}

}  // namespace flashdsa::indexer::sm90
