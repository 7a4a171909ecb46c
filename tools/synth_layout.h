#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flashdsa::tools {

/// How context parallelism cuts the storage into ranks.
enum class CpOrder : std::uint8_t {
  kContiguous,  ///< rank r holds the r-th of cp_size equal pieces of the whole storage
  kZigzag,      ///< every document in 2*cp_size chunks; rank r holds chunks r and 2*cp_size-1-r
};

/// Where the documents and the local query rows of a packed batch lie. SPEC section 2.
struct PackedLayout {
  std::vector<std::int32_t> cu_seqlens;         // [N+1]
  std::vector<std::int32_t> cu_seqlens_padded;  // [N+1]
  std::vector<std::int32_t> query_positions;    // [T_q], ascending storage positions
  std::int64_t total_key_tokens = 0;            // T_k

  std::int64_t documents() const { return static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
  std::int64_t length(std::int64_t document) const;  // real tokens
  std::int64_t longest() const;
  bool all_rows() const {
    return static_cast<std::int64_t>(query_positions.size()) == total_key_tokens;
  }
};

/// Lengths log-uniform in [shortest, longest] until `tokens` are filled; the last one is cut.
std::vector<std::int64_t> draw_lengths(std::int64_t tokens, std::int64_t shortest,
                                       std::int64_t longest, std::uint64_t seed);

/// `documents` lengths >= 1 in log-uniform proportions (1 : 40 at most) that add up to `tokens`.
std::vector<std::int64_t> split_tokens(std::int64_t tokens, std::int64_t documents,
                                       std::uint64_t seed);

/// Packs documents of these lengths, each padded to a multiple of `pad_to`, all rows local.
PackedLayout pack_documents(std::span<const std::int64_t> lengths, std::int64_t pad_to);

/// Leaves only the query rows of rank `rank` of `size`. Throws Error(kValue) when zigzag cannot cut
/// a document evenly or the rank would hold no row.
void take_rank(PackedLayout& layout, CpOrder order, std::int64_t rank, std::int64_t size);

/// One row's place in the batch.
struct RowPlace {
  std::int64_t document = 0;
  std::int64_t offset = 0;  // from the document's start
  bool real = false;        // false: padding
};

/// Places of the local query rows.
std::vector<RowPlace> query_places(const PackedLayout& layout);

/// Places of all T_k storage rows.
std::vector<RowPlace> key_places(const PackedLayout& layout);

}  // namespace flashdsa::tools
