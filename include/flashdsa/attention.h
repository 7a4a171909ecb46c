#pragma once

#include <optional>

#include "flashdsa/runtime.h"
#include "flashdsa/selection.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa {

/// What forward and backward share. D is 576 (512 latent + 64 rope channels) or 512 (no rope); the
/// value of a key is its first 512 channels. Inputs may have any strides on their outer axes, the
/// last axis is contiguous; outputs are contiguous and overlap nothing. "real" is bfloat16 and
/// "single" float32, or both float64 on the reference backend.
struct SparseAttentionInputs {
  TensorView q;   ///< real [T_q, H, D], H in 1..128
  TensorView kv;  ///< real [T_k, 1, D], T_k < 2^31 - 1
  TensorView
      topk_indices;  ///< int32 [T_q, 1, K], K in 1..2048; slots outside 0..T_k-1 do not count
  double softmax_scale = 0;               ///< positive and finite, also in FP32
  std::optional<TensorView> topk_length;  ///< int32 [T_q]: only the first slots of a row exist
  std::optional<TensorView> attn_sink;    ///< single [H]: logit of a virtual key of value zero

  /// The plan of this selection and head count, or null. On Hopper forward walks it except in
  /// invariant mode, backward in the default mode, and a call of at most 32 heads and at least 2048
  /// rows that would walk one builds its own where this is null; the host backends do without.
  const SelectionPlan* plan = nullptr;
};

/// Arguments of `attention_forward`. SPEC section 5.
struct AttentionForwardArgs : SparseAttentionInputs {
  TensorView out;                        ///< out, real [T_q, H, 512]
  TensorView lse;                        ///< out, single [T_q, H], natural log, without the sink
  std::optional<TensorView> max_logits;  ///< out, single [T_q, H], scaled, without the sink
};

/// Sparse MLA attention:
///
///     S[t,h,j] = softmax_scale * dot(q[t,h,:], kv[i_j,:]),  P = softmax_j(S, and the sink),
///     out[t,h,:] = sum_j P[t,h,j] * kv[i_j,:512],  lse[t,h] = ln sum_j exp(S[t,h,j])
///
/// over the counted slots j of row t; a key in two slots counts twice. A row without keys gives out
/// 0, lse -inf and max_logits -inf.
///
/// Throws Error(kType) or Error(kValue) for bad arguments, Error(kData) in checking mode for an
/// index outside -1..T_k-1 or a length outside 0..K, Error(kUnavailable) when no backend takes the
/// tensors.
FLASHDSA_API void attention_forward(const AttentionForwardArgs& args, const Runtime& runtime = {});

/// Arguments of `attention_backward`. SPEC section 6. The inputs are those of the forward call.
struct AttentionBackwardArgs : SparseAttentionInputs {
  TensorView out;       ///< real [T_q, H, 512], of the forward call
  TensorView lse;       ///< single [T_q, H], of the forward call
  TensorView grad_out;  ///< real [T_q, H, 512]

  TensorView grad_q;                         ///< out, real [T_q, H, D]
  TensorView grad_kv;                        ///< out, real or float32 [T_k, 1, D]
  std::optional<TensorView> grad_attn_sink;  ///< out, single [H]; needs attn_sink
};

/// Gradients of `attention_forward`. With D[t,h] = sum_c grad_out*out, dP = grad_out . value and
/// dS = P * (dP - D) * softmax_scale:
///
///     grad_q[t,h,:] = sum_j dS * kv[i_j,:]
///     grad_kv[s,:]  = sum over (t,h,j with i_j = s) of dS * q[t,h,:], plus
///                     P * grad_out[t,h,:] on the first 512 channels
///     grad_attn_sink[h] = - sum_t P_sink * D
///
/// Rows of grad_kv that nobody selected are zero; a row without keys contributes nothing, whatever
/// its inputs hold. The host backends are deterministic and invariant in every mode.
///
/// Throws as `attention_forward` does.
FLASHDSA_API void attention_backward(const AttentionBackwardArgs& args,
                                     const Runtime& runtime = {});

}  // namespace flashdsa
