#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "indexer/sm90/scores/config.h"

namespace flashdsa::indexer::sm90::score_pass {

/// H_index as the kernels hold it.
inline constexpr int padded_heads(std::int64_t heads) { return heads <= 32 ? 32 : 64; }

/// Query rows of an item.
inline constexpr int group_rows(std::int64_t heads) { return 256 / padded_heads(heads); }

/// BF16 [rows, heads, 128].
struct Queries {
  const __nv_bfloat16* data;
  std::int64_t rows;
  std::int64_t heads;
  std::int64_t row_stride;
  std::int64_t head_stride;
};

/// BF16 [rows, 128].
struct Keys {
  const __nv_bfloat16* data;
  std::int64_t rows;
  std::int64_t row_stride;
};

/// Whether a tensor map can describe them.
bool is_mappable(const Queries& queries);
bool is_mappable(const Keys& keys);

/// Their tensor maps. They must be mappable and have rows.
CUtensorMap query_map(const Queries& queries);
CUtensorMap key_map(const Keys& keys);

/// Queues the scores of one chunk on `ctas` CTAs of the current device.
void launch_scores(const KernelParams& params, const CUtensorMap& queries, const CUtensorMap& keys,
                   int ctas, cudaStream_t stream);

}  // namespace flashdsa::indexer::sm90::score_pass
