#pragma once

#include <cstdint>
#include <optional>

#include "flashdsa/runtime.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa {

/// Arguments of `indexer_topk`. SPEC section 3. Inputs may have any strides on their outer axes,
/// the last axis is contiguous; outputs are contiguous and overlap nothing. "real" is bfloat16, or
/// float64 on the reference backend.
struct IndexerTopkArgs {
  TensorView index_q;       ///< real [T_q, H_index, 128], H_index in 1..64
  TensorView index_k;       ///< real [T_k, 128], T_k < 2^31 - 1
  TensorView head_weights;  ///< float32 or bfloat16 (float64 beside float64) [T_q, H_index], scaled
                            ///< by the caller
  TensorView starts;        ///< int32 [T_q], PackedMetadata::starts
  TensorView causal_lengths;                     ///< int32 [T_q], PackedMetadata::causal_lengths
  std::optional<std::int64_t> total_key_tokens;  ///< PackedMetadata's T_k; must be index_k's rows

  TensorView topk_indices;                ///< out, int32 [T_q, 1, K], K in 1..2048
  std::optional<TensorView> topk_length;  ///< out, int32 [T_q], min(K, causal_length)
  std::optional<TensorView> topk_scores;  ///< out, float32 (float64 beside float64) [T_q, K]
};

/// Selects the min(K, causal_length) best visible keys of every query row:
///
///     score[t,s] = sum_h head_weights[t,h] * max(0, dot(index_q[t,h,:], index_k[s,:]))
///
/// Higher scores first, NaN above +inf, -0 equal to +0, the smaller key among equals. A row of
/// `topk_indices` holds storage positions, strictly ascending, then -1; `topk_scores` the scores in
/// the same order, then -inf. The result of a row depends on nothing but the row and its visible
/// keys, bit for bit. Rows with causal_length <= K compute no score unless scores are asked for.
/// Keys of a row that lie outside [0, T_k) are not read and not selected.
///
/// Throws Error(kType) or Error(kValue) for bad arguments, Error(kData) in checking mode for a row
/// whose keys leave the storage, Error(kUnavailable) when no backend takes the tensors.
FLASHDSA_API void indexer_topk(const IndexerTopkArgs& args, const Runtime& runtime = {});

/// Arguments of `indexer_backward`. SPEC section 3. Strides and "real" as in IndexerTopkArgs;
/// "single" is float32, or float64 beside float64.
struct IndexerBackwardArgs {
  TensorView index_q;       ///< real [T_q, H_index, 128], H_index in 1..64
  TensorView index_k;       ///< real [T_k, 128], T_k < 2^31 - 1
  TensorView head_weights;  ///< float32 or bfloat16 (float64 beside float64) [T_q, H_index], as the
                            ///< scores took them
  TensorView
      topk_indices;  ///< int32 [T_q, 1, K], K in 1..2048; slots outside 0..T_k-1 do not count
  std::optional<TensorView> topk_length;  ///< int32 [T_q]: only the first slots of a row exist
  TensorView grad_scores;                 ///< single [T_q, K], by slot of topk_indices

  TensorView grad_index_q;       ///< out, real [T_q, H_index, 128]
  TensorView grad_index_k;       ///< out, real or float32 [T_k, 128]
  TensorView grad_head_weights;  ///< out, of head_weights' type [T_q, H_index]
};

/// Gradients of the selected scores, `topk_scores` of `indexer_topk`. With g = grad_scores[t,j],
/// dot = dot(index_q[t,h,:], index_k[i_j,:]) and 1[dot > 0] = 0 at dot = 0 and for NaN:
///
///     grad_head_weights[t,h] = sum_j g * max(0, dot)
///     grad_index_q[t,h,:]    = sum_j g * head_weights[t,h] * 1[dot > 0] * index_k[i_j,:]
///     grad_index_k[s,:]      = sum over (t,h,j with i_j = s) of
///                              g * head_weights[t,h] * 1[dot > 0] * index_q[t,h,:]
///
/// over the counted slots j of row t; a key in two slots counts twice. A slot that does not count
/// contributes nothing, whatever grad_scores holds there. A row without keys gives and contributes
/// zero, whatever its inputs hold; rows of grad_index_k that nobody selected are zero. The host
/// backends are deterministic in every mode, and a row's grad_index_q and grad_head_weights do not
/// depend on the other rows. Runtime::scratch_budget_bytes bounds the scratch but for the FP32 sums
/// of grad_index_k, 512 bytes a key, and one row's part.
///
/// Throws Error(kType) or Error(kValue) for bad arguments, Error(kData) in checking mode for an
/// index outside -1..T_k-1 or a length outside 0..K, Error(kUnavailable) when no backend takes the
/// tensors.
FLASHDSA_API void indexer_backward(const IndexerBackwardArgs& args, const Runtime& runtime = {});

}  // namespace flashdsa
