#pragma once

#include <cstdint>

#include "flashdsa/tensor_view.h"

namespace flashdsa::indexer {

inline constexpr std::int64_t kIndexDim = 128;  // channels of an indexer head

/// What every backend receives of the common inputs, validated. Strides count elements; the last
/// axis of every tensor is contiguous.
struct CommonParams {
  DType real = DType::kBFloat16;          // of index_q and index_k: BF16 or FP64
  DType weights_dtype = DType::kFloat32;  // FP32 or BF16 beside BF16, FP64 beside FP64
  std::int64_t t_q = 0;
  std::int64_t t_k = 0;
  std::int64_t index_heads = 0;  // H_index, 1..64
  std::int64_t topk = 0;         // K, 1..2048
  Device device;

  const void* index_q = nullptr;  // [T_q, H_index, 128]
  std::int64_t index_q_row_stride = 0;
  std::int64_t index_q_head_stride = 0;
  const void* index_k = nullptr;  // [T_k, 128]
  std::int64_t index_k_row_stride = 0;
  const void* head_weights = nullptr;  // [T_q, H_index]
  std::int64_t head_weights_row_stride = 0;
};

struct TopkParams : CommonParams {
  const std::int32_t* starts = nullptr;          // [T_q], contiguous
  const std::int32_t* causal_lengths = nullptr;  // [T_q], contiguous

  std::int32_t* topk_indices = nullptr;  // [T_q, 1, K], contiguous
  std::int32_t* topk_length = nullptr;   // [T_q], contiguous, or null
  void* topk_scores = nullptr;           // [T_q, K], contiguous, FP32 (FP64 beside FP64), or null
};

struct BackwardParams : CommonParams {
  const std::int32_t* topk_indices = nullptr;  // [T_q, 1, K]
  std::int64_t topk_indices_row_stride = 0;
  const std::int32_t* topk_length = nullptr;  // [T_q], contiguous, or null
  const void* grad_scores = nullptr;          // [T_q, K], FP32 (FP64 beside FP64)
  std::int64_t grad_scores_row_stride = 0;

  void* grad_index_q = nullptr;  // [T_q, H_index, 128], contiguous, as index_q
  void* grad_index_k = nullptr;  // [T_k, 128], contiguous, of type grad_index_k_dtype
  DType grad_index_k_dtype = DType::kBFloat16;
  void* grad_head_weights = nullptr;  // [T_q, H_index], contiguous, as head_weights
};

}  // namespace flashdsa::indexer
