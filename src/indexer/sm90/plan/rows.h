#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashdsa::indexer::sm90 {

/// The rows of a block.
struct BlockRows {
  const std::int32_t* starts;          // [rows]
  const std::int32_t* causal_lengths;  // [rows]
  std::int32_t rows;
  std::uint32_t t_k;
  std::int32_t topk;
  bool wants_scores;
};

/// What the rows of a block are given beside their scores.
struct RowsParams {
  BlockRows block;
  const void* head_weights;  // [rows, H_index] FP32 or BF16
  std::int64_t head_weights_row_stride;
  bool weights_are_bf16;
  std::int32_t heads;
  std::int32_t padded_heads;
  std::int32_t padded_rows;  // rows, rounded up to whole row groups
  float* weights;            // out [padded_rows, padded_heads]

  std::int32_t* topk_indices;  // out [rows, K], of rows that need no score
  std::int32_t* topk_length;   // out [rows] or null
  float* topk_scores;          // out [rows, K] or null
};

/// Queues the weights as FP32 with zeros behind the heads and the rows, the lengths of all rows and
/// the results of the rows that need no score, whose weights are not read.
void launch_rows(const RowsParams& params, cudaStream_t stream);

/// BF16 [rows, heads, 128] with any strides of the first two axes.
struct StridedHeads {
  const __nv_bfloat16* data;
  std::int64_t rows;
  std::int64_t heads;
  std::int64_t row_stride;
  std::int64_t head_stride;
};

/// Queues to [rows, padded_heads, 128] = from, zeros behind the heads and, where `block.starts` is
/// not null, for the rows of that block that need no score, which are not read. rows > 0.
void launch_pack_heads(const StridedHeads& from, const BlockRows& block, std::int64_t padded_heads,
                       __nv_bfloat16* to, cudaStream_t stream);

}  // namespace flashdsa::indexer::sm90
