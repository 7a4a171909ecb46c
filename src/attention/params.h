#pragma once

#include <cstdint>

#include "flashdsa/tensor_view.h"
#include "selection/plan_format.h"

namespace flashdsa::attention {

inline constexpr std::int64_t kValueDim = 512;  // channels of a key row that are its value

/// What every backend receives of the common inputs, validated. Strides count elements; the last
/// axis of every tensor is contiguous. `real` says what q, kv, out, grad_out and grad_q hold: BF16,
/// with FP32 for the other floating-point tensors, or FP64 for all of them.
struct CommonParams {
  DType real = DType::kBFloat16;
  std::int64_t t_q = 0;
  std::int64_t t_k = 0;
  std::int64_t heads = 0;     // H, 1..128
  std::int64_t head_dim = 0;  // D, 576 or 512
  std::int64_t topk = 0;      // K, 1..2048
  double softmax_scale = 0;
  Device device;

  const void* q = nullptr;  // [T_q, H, D]
  std::int64_t q_row_stride = 0;
  std::int64_t q_head_stride = 0;
  const void* kv = nullptr;  // [T_k, 1, D]
  std::int64_t kv_row_stride = 0;
  const std::int32_t* topk_indices = nullptr;  // [T_q, 1, K]
  std::int64_t topk_indices_row_stride = 0;
  const std::int32_t* topk_length = nullptr;  // [T_q], contiguous, or null
  const void* attn_sink = nullptr;            // [H], contiguous, or null

  // Of this selection and head count; null: none, or one that the mode forbids.
  const selection::PlanView* plan = nullptr;
};

struct ForwardParams : CommonParams {
  void* out = nullptr;         // [T_q, H, 512], contiguous
  void* lse = nullptr;         // [T_q, H], contiguous
  void* max_logits = nullptr;  // [T_q, H], contiguous, or null
};

struct BackwardParams : CommonParams {
  const void* out = nullptr;  // [T_q, H, 512]
  std::int64_t out_row_stride = 0;
  std::int64_t out_head_stride = 0;
  const void* lse = nullptr;  // [T_q, H]
  std::int64_t lse_row_stride = 0;
  const void* grad_out = nullptr;  // [T_q, H, 512]
  std::int64_t grad_out_row_stride = 0;
  std::int64_t grad_out_head_stride = 0;

  void* grad_q = nullptr;   // [T_q, H, D], contiguous
  void* grad_kv = nullptr;  // [T_k, 1, D], contiguous, of type grad_kv_dtype
  DType grad_kv_dtype = DType::kBFloat16;
  void* grad_attn_sink = nullptr;  // [H], contiguous, or null
};

}  // namespace flashdsa::attention
