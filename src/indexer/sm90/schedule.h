#pragma once

// How a call is cut so that all of its scratch stays within the budget. Made on the host from sizes
// alone, as upper bounds; the planning kernels find out how little of it the rows need.

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "core/scratch.h"
#include "indexer/sm90/plan/tables.h"

namespace flashdsa::indexer::sm90 {

struct Problem {
  std::int64_t t_q;
  std::int64_t t_k;
  std::int64_t heads;
  std::int64_t topk;
  bool packs_queries;  // index_q has to be copied for the kernels
  bool packs_keys;     // index_k has to be
  int multiprocessors;
};

struct Schedule {
  std::int64_t block_rows;    // whole row groups
  std::int64_t window_keys;   // whole tiles
  std::int64_t chunk_floats;  // scores in scratch
  std::int64_t chunk_stride;  // scores after which a chunk begins, at most
  std::int64_t chunks;        // of a block and a window, at most
  std::int64_t span_keys;     // of a score item, at most
  std::int64_t segment_keys;  // of a selection task, at most
  std::int64_t windows;

  bool has_windows() const { return windows > 1; }
  /// Whether a row's result may come from several partial selections.
  bool has_merges() const { return has_windows() || window_keys > segment_keys; }
};

/// The best schedule within `budget_bytes`; when none fits, the smallest there is.
Schedule make_schedule(const Problem& problem, std::int64_t budget_bytes);

/// Ranks and keys of partial selections.
struct CandidateMemory {
  std::uint32_t* ranks = nullptr;
  std::int32_t* keys = nullptr;
};

/// The call's scratch. Null: not needed.
struct Memory {
  Tables tables{};
  float* weights = nullptr;          // [block_rows, padded heads]
  __nv_bfloat16* queries = nullptr;  // [block_rows, even heads, 128]
  __nv_bfloat16* keys = nullptr;     // [window_keys, 128]
  CandidateMemory slots;             // of a chunk's segments
  CandidateMemory kept;              // of the block's rows
  float* scores = nullptr;           // [chunk_floats]
};

/// Entries of a candidate slot.
inline std::int64_t candidate_stride(std::int64_t topk) { return (topk + 3) / 4 * 4; }

/// Heads of a packed copy of index_q.
inline std::int64_t even_heads(std::int64_t heads) { return (heads + 1) / 2 * 2; }

Memory carve(core::Carver& carver, const Problem& problem, const Schedule& schedule);

}  // namespace flashdsa::indexer::sm90
