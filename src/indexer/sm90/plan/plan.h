#pragma once

#include <cuda_runtime_api.h>

#include "indexer/sm90/plan/rows.h"
#include "indexer/sm90/plan/tables.h"

namespace flashdsa::indexer::sm90 {

struct PlanParams {
  BlockRows block;
  std::uint32_t window_begin, window_end;  // keys
  std::int32_t group_rows;                 // 4 or 8
  std::int64_t chunk_stride;   // a chunk begins no more scores than this after the last one
  std::int32_t chunks;         // at most
  std::uint32_t span_keys;     // of a score item, at most; a multiple of kTileKeys
  std::uint32_t segment_keys;  // of a selection task, at most; a multiple of kTileKeys
  Tables tables;
};

/// Queues the tables of a block and a window.
void launch_plan(const PlanParams& params, cudaStream_t stream);

}  // namespace flashdsa::indexer::sm90
