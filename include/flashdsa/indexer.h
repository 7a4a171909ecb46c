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
///   score[t,s] = sum_h head_weights[t,h] * max(0, dot(index_q[t,h,:], index_k[s,:]))
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

}  // namespace flashdsa
