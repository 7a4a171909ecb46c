#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashdsa/metadata.h"

namespace flashdsa::test {

/// The arguments of `prepare_packed_metadata` as plain numbers. Its own tensors are what `args`
/// points to, so it has to outlive them.
struct PackedLayout {
  std::vector<std::int32_t> cu_seqlens;
  std::int64_t total_key_tokens = 0;
  std::optional<std::vector<std::int32_t>> cu_seqlens_padded;
  std::optional<std::vector<std::int64_t>> query_indices;
  std::optional<std::vector<std::uint8_t>> padding_mask;
  QueryMode query_mode = QueryMode::kContiguous;
  bool lenient = false;
  std::optional<std::int64_t> max_seqlen;

  bool narrow_indices = false;                     // hand query_indices over as int32
  std::vector<std::int32_t> narrow_query_indices;  // filled by `args`

  PackedMetadataArgs args();
};

/// The results as plain numbers, one type for all, so that two of them compare.
struct MetadataFields {
  std::vector<std::int64_t> starts;
  std::vector<std::int64_t> causal_lengths;
  std::vector<std::int64_t> query_valid;
  std::optional<std::vector<std::int64_t>> valid_row_indices;
  std::vector<std::int64_t> segment_cu_q;
  std::vector<std::int64_t> segment_cu_k;
  std::vector<std::int64_t> q_causal_offsets;
  std::optional<std::vector<std::int64_t>> key_source_indices;
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  std::int64_t total_key_tokens = 0;
  bool all_rows_nonempty = false;
};

/// One line a field; results are equal when their texts are.
std::string text(const MetadataFields& fields);
std::string text(const PackedLayout& layout);

/// Reads the results; a field of another dtype or rank than SPEC section 2 says is a test failure.
MetadataFields fields_of(const PackedMetadata& metadata);

/// Runs the library.
MetadataFields build(PackedLayout layout, const Runtime& runtime = {});

/// The definition of SPEC section 2, row by row and key by key, without a thought for time.
MetadataFields by_definition(const PackedLayout& layout);

}  // namespace flashdsa::test
