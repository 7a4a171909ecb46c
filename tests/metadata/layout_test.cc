#include "tests/metadata/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "tests/support/placement.h"

namespace flashdsa::test {
namespace {

using Numbers = std::vector<std::int64_t>;

std::string text_of(const Numbers& numbers) {
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

template <typename T>
std::string text_of(const std::optional<std::vector<T>>& numbers) {
  return numbers ? fmt::format("[{}]", fmt::join(*numbers, ", ")) : "absent";
}

template <typename T>
Numbers numbers_of(const Tensor& tensor) {
  const auto span = tensor.span<T>();
  return {span.begin(), span.end()};
}

Numbers numbers_of(const char* name, DType dtype, const Tensor& tensor) {
  EXPECT_EQ(dtype_name(tensor.view().dtype), dtype_name(dtype)) << name;
  EXPECT_EQ(tensor.view().rank, 1) << name;
  EXPECT_TRUE(tensor.view().is_contiguous()) << name;
  switch (dtype) {
    case DType::kBool:
      return numbers_of<std::uint8_t>(tensor);
    case DType::kInt32:
      return numbers_of<std::int32_t>(tensor);
    default:
      return numbers_of<std::int64_t>(tensor);
  }
}

std::optional<Numbers> numbers_of(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return numbers_of(name, DType::kInt64, *tensor);
}

}  // namespace

PackedMetadataArgs PackedLayout::args() {
  const auto view = [](auto& values, DType dtype) {
    return TensorView::contiguous(values.data(), dtype, {static_cast<std::int64_t>(values.size())});
  };
  PackedMetadataArgs result;
  result.cu_seqlens = view(cu_seqlens, DType::kInt32);
  result.total_key_tokens = total_key_tokens;
  result.max_seqlen = max_seqlen;
  result.query_mode = query_mode;
  result.lenient = lenient;
  if (cu_seqlens_padded) result.cu_seqlens_padded = view(*cu_seqlens_padded, DType::kInt32);
  if (padding_mask) result.padding_mask = view(*padding_mask, DType::kBool);
  if (query_indices && narrow_indices) {
    narrow_query_indices.clear();
    for (const std::int64_t g : *query_indices) {
      narrow_query_indices.push_back(static_cast<std::int32_t>(g));
    }
    result.query_indices = view(narrow_query_indices, DType::kInt32);
  } else if (query_indices) {
    result.query_indices = view(*query_indices, DType::kInt64);
  }
  return result;
}

std::string text(const MetadataFields& fields) {
  return fmt::format(
      "starts {}\ncausal_lengths {}\nquery_valid {}\nvalid_row_indices {}\nsegment_cu_q {}\n"
      "segment_cu_k {}\nq_causal_offsets {}\nkey_source_indices {}\nmax_seqlen_q {}\n"
      "max_seqlen_k {}\ntotal_key_tokens {}\nall_rows_nonempty {}\n",
      text_of(fields.starts), text_of(fields.causal_lengths), text_of(fields.query_valid),
      text_of(fields.valid_row_indices), text_of(fields.segment_cu_q), text_of(fields.segment_cu_k),
      text_of(fields.q_causal_offsets), text_of(fields.key_source_indices), fields.max_seqlen_q,
      fields.max_seqlen_k, fields.total_key_tokens, fields.all_rows_nonempty);
}

std::string text(const PackedLayout& layout) {
  return fmt::format(
      "cu_seqlens [{}] total_key_tokens {} cu_seqlens_padded {} query_indices {} padding_mask {} "
      "{} "
      "{}",
      fmt::join(layout.cu_seqlens, ", "), layout.total_key_tokens,
      text_of(layout.cu_seqlens_padded), text_of(layout.query_indices),
      text_of(layout.padding_mask),
      layout.query_mode == QueryMode::kGeneral ? "general" : "contiguous",
      layout.lenient ? "lenient" : "strict");
}

MetadataFields fields_of(const PackedMetadata& metadata) {
  MetadataFields fields;
  fields.starts = numbers_of("starts", DType::kInt32, metadata.starts);
  fields.causal_lengths = numbers_of("causal_lengths", DType::kInt32, metadata.causal_lengths);
  fields.query_valid = numbers_of("query_valid", DType::kBool, metadata.query_valid);
  fields.valid_row_indices = numbers_of("valid_row_indices", metadata.valid_row_indices);
  fields.segment_cu_q = numbers_of("segment_cu_q", DType::kInt32, metadata.segment_cu_q);
  fields.segment_cu_k = numbers_of("segment_cu_k", DType::kInt32, metadata.segment_cu_k);
  fields.q_causal_offsets =
      numbers_of("q_causal_offsets", DType::kInt32, metadata.q_causal_offsets);
  fields.key_source_indices = numbers_of("key_source_indices", metadata.key_source_indices);
  fields.max_seqlen_q = metadata.max_seqlen_q;
  fields.max_seqlen_k = metadata.max_seqlen_k;
  fields.total_key_tokens = metadata.total_key_tokens;
  fields.all_rows_nonempty = metadata.all_rows_nonempty;
  return fields;
}

MetadataFields build(PackedLayout layout, const Runtime& runtime) {
  return fields_of(run_placed(layout.args(), runtime));
}

MetadataFields by_definition(const PackedLayout& layout) {
  const std::vector<std::int32_t>& cu = layout.cu_seqlens;
  const std::vector<std::int32_t> padded = layout.cu_seqlens_padded.value_or(cu);
  Numbers all_rows;
  for (std::int64_t g = 0; g < layout.total_key_tokens; ++g) all_rows.push_back(g);
  const Numbers positions = layout.query_indices.value_or(all_rows);

  MetadataFields fields;
  fields.total_key_tokens = layout.total_key_tokens;
  std::map<std::size_t, Numbers> positions_of_document;
  Numbers valid_rows;
  for (std::size_t t = 0; t < positions.size(); ++t) {
    const std::int64_t g = positions[t];
    std::size_t d = 0;
    while (!(padded.at(d) <= g && g < padded.at(d + 1))) ++d;
    positions_of_document[d].push_back(g);
    const std::int64_t start = padded[d];
    const std::int64_t real_end = start + (cu[d + 1] - cu[d]);
    const bool masked = layout.padding_mask && layout.padding_mask->at(t) != 0;
    const bool valid = g < real_end && !masked;
    fields.starts.push_back(start);
    fields.causal_lengths.push_back(valid ? g + 1 - start : 0);
    fields.query_valid.push_back(valid ? 1 : 0);
    if (valid) valid_rows.push_back(static_cast<std::int64_t>(t));
  }
  fields.all_rows_nonempty = valid_rows.size() == positions.size();
  if (!fields.all_rows_nonempty) fields.valid_row_indices = valid_rows;

  Numbers sources;
  fields.segment_cu_q.push_back(0);
  fields.segment_cu_k.push_back(0);
  for (const auto& [d, members] : positions_of_document) {
    std::int64_t keys = 0;
    for (std::int64_t s = padded[d]; s <= members.back(); ++s, ++keys) sources.push_back(s);
    const auto queries = static_cast<std::int64_t>(members.size());
    fields.segment_cu_q.push_back(fields.segment_cu_q.back() + queries);
    fields.segment_cu_k.push_back(fields.segment_cu_k.back() + keys);
    fields.q_causal_offsets.push_back(members.front() - padded[d]);
    fields.max_seqlen_q = std::max(fields.max_seqlen_q, queries);
    fields.max_seqlen_k = std::max(fields.max_seqlen_k, keys);
  }
  if (positions != all_rows) fields.key_source_indices = sources;
  return fields;
}

TEST(Definition, GivesTheWorkedExampleOfTheSpecification) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12};
  layout.total_key_tokens = 12;
  layout.query_indices = {{2, 3, 4, 5, 6, 7, 8, 9}};
  EXPECT_EQ(text(by_definition(layout)),
            "starts [0, 0, 4, 4, 4, 4, 4, 9]\n"
            "causal_lengths [3, 0, 1, 2, 3, 4, 0, 1]\n"
            "query_valid [1, 0, 1, 1, 1, 1, 0, 1]\n"
            "valid_row_indices [0, 2, 3, 4, 5, 7]\n"
            "segment_cu_q [0, 2, 7, 8]\n"
            "segment_cu_k [0, 4, 9, 10]\n"
            "q_causal_offsets [2, 0, 0]\n"
            "key_source_indices [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
            "max_seqlen_q 5\n"
            "max_seqlen_k 5\n"
            "total_key_tokens 12\n"
            "all_rows_nonempty false\n");
}

}  // namespace flashdsa::test
