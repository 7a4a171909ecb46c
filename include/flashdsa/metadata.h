#pragma once

#include <cstdint>
#include <optional>

#include "flashdsa/runtime.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa {

/// Which lists of query positions are taken.
enum class QueryMode : std::uint8_t {
  kContiguous,  ///< one increasing interval g, g+1, ... (what the reference module demands)
  kGeneral,     ///< any strictly increasing list: zigzag and striped context-parallel shards
};

/// What a capture-safe build leaves in PackedMetadata::status: the first rule that the input
/// breaks, in this order.
enum class MetadataStatus : std::int32_t {
  kGood = 0,
  kCuSeqlensStart = 1,   ///< cu_seqlens does not start at 0
  kCuSeqlensOrder = 2,   ///< cu_seqlens does not increase
  kPaddedStart = 3,      ///< the storage boundaries do not start at 0
  kPaddedOrder = 4,      ///< the storage boundaries do not increase
  kPaddedEnd = 5,        ///< the storage does not end at total_key_tokens
  kPaddedBelowReal = 6,  ///< a padded length is below the real one
  kMaxSeqlen = 7,        ///< max_seqlen is not the largest real length
  kPositionOutside = 8,  ///< a query position outside the storage
  kPositionGap = 9,      ///< the positions are not one interval in contiguous mode
  kPositionOrder = 10,   ///< the positions do not increase
};

/// Inputs of `prepare_packed_metadata`. SPEC section 2. All tensors are contiguous and lie on one
/// device.
struct PackedMetadataArgs {
  TensorView cu_seqlens;              ///< int32 [N+1], real lengths, compact: 0, l0, l0+l1, ...
  std::int64_t total_key_tokens = 0;  ///< T_k, rows of the gathered and padded storage, 1..2^31-2
  std::optional<std::int64_t> max_seqlen;         ///< must equal the largest real length
  std::optional<TensorView> query_indices;        ///< int32 or int64 [T_q], storage positions of
                                                  ///< the local rows; absent: all T_k rows
  std::optional<TensorView> cu_seqlens_padded;    ///< int32 [N+1], storage boundaries; absent:
                                                  ///< cu_seqlens
  std::optional<TensorView> padding_mask;         ///< bool [T_q], true = padding
  QueryMode query_mode = QueryMode::kContiguous;  ///< which query_indices are taken
  bool lenient = false;  ///< allow documents of real length 0 (a tail of repeated boundaries)

  /// Build for CUDA graph capture: sizes follow from shapes alone, nothing synchronises with the
  /// host. segment_cu_q and segment_cu_k have N+1 entries and q_causal_offsets N (the tails repeat
  /// the last offset, or hold 0), key_source_indices T_k entries (-1 behind the prefixes),
  /// valid_row_indices is absent, max_seqlen_q is T_q, max_seqlen_k is T_k, all_rows_nonempty is
  /// false. Bad tensor contents do not throw: they set `status` and make every row empty.
  bool capture_safe = false;
  bool key_sources = true;  ///< false: leave key_source_indices out of a capture-safe build
};

/// Where every local query row finds its keys, and the segments of rows that share a document.
/// Names and meanings are those of the reference module.
struct PackedMetadata {
  Tensor starts;          ///< int32 [T_q], storage row where the query's document starts
  Tensor causal_lengths;  ///< int32 [T_q], visible keys start .. start+length-1; 0: invalid row
  Tensor query_valid;     ///< bool [T_q]
  std::optional<Tensor> valid_row_indices;  ///< int64 [T_valid]; absent when every row is valid
  Tensor segment_cu_q;      ///< int32 [S+1], runs of local rows whose queries lie in one document
  Tensor segment_cu_k;      ///< int32 [S+1], offsets of each segment's key prefix
  Tensor q_causal_offsets;  ///< int32 [S], document-relative position of a segment's first query
  std::optional<Tensor> key_source_indices;  ///< int64 [segment_cu_k[S]], storage row of every key
                                             ///< of the prefixes; absent when all rows are queries
  std::int64_t max_seqlen_q = 0;             ///< longest segment in queries
  std::int64_t max_seqlen_k = 0;             ///< longest segment in keys
  std::int64_t total_key_tokens = 0;         ///< T_k
  bool all_rows_nonempty = false;            ///< every row has at least one key
  std::optional<Tensor> status;  ///< int32 [1], a MetadataStatus; of capture-safe builds only
};

/// Builds the metadata of packed THD rows.
///
/// For a query at storage position g in document d (padded[d] <= g < padded[d+1]):
/// start = padded[d], valid = g < start + real length and not masked,
/// causal_length = valid ? g + 1 - start : 0.
///
/// Throws Error(kType) for a wrong dtype, Error(kValue) for everything else that SPEC section 2
/// lists, and for an exact build while the stream is captured, for it waits for the device once.
/// The results are new tensors on the device of `cu_seqlens`.
FLASHDSA_API PackedMetadata prepare_packed_metadata(const PackedMetadataArgs& args,
                                                    const Runtime& runtime = {});

}  // namespace flashdsa
