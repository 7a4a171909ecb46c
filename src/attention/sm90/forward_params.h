#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "selection/plan_format.h"

namespace flashdsa::attention::sm90 {

/// Warps that hold O in the kernel for many rows, each with a flag of its own for every item.
inline constexpr int kValueWarps = 8;

/// What the forward kernels receive. Strides count elements. Rows of q and kv are aligned to 16
/// bytes.
struct ForwardKernelParams {
  const __nv_bfloat16* q;  // [T_q, H, D]
  int64_t q_row_stride;
  int64_t q_head_stride;
  const __nv_bfloat16* kv;  // [T_k, D]
  int64_t kv_row_bytes;
  const int32_t* topk_indices;  // [T_q, K]
  int64_t topk_indices_row_stride;
  const int32_t* extents;  // [T_q], slots up to the last counted one; of rows that are walked alone
  const float* attn_sink;  // [H] or null

  __nv_bfloat16* out;  // [T_q, H, 512]
  bool out_aligned;    // to 16 bytes
  float* lse;          // [T_q, H]
  float* max_logits;   // [T_q, H] or null

  int64_t t_q;  // above 0
  int ctas;     // the grid, set by the launch; as a constant operand it costs no register
  int heads;
  int t_k;
  float softmax_scale;
  float softmax_scale_log2e;

  // Up to 32 heads.
  selection::PlanView plan;  // items null: every row is walked alone
  int group_log2;            // of G, the most tokens of an item
  int inverse_heads;         // 2^16 / H, rounded up: r * it >> 16 is r / H for the rows of a tile
  uint8_t* not_finite;  // [T_q][kValueWarps], flags by item of the plan: 1 where the warp's part of
                        // O is not finite; written of items of several tokens

  // Above 32 heads.
  int64_t items;  // token << head_blocks_log2 | block of 64 heads
  int head_blocks_log2;
};

}  // namespace flashdsa::attention::sm90
