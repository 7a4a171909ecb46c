#include "tools/synth_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "flashdsa/error.h"
#include "tools/synth_random.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 31) - 2;

// e^(u * ln ratio) for a uniform u: log-uniform in [1, ratio).
double draw_log_uniform(const RandomStream& stream, std::uint64_t counter, double log_ratio) {
  return portable_exp(stream.uniform(counter) * log_ratio);
}

// ln x for x >= 1 by bisection of portable_exp.
double portable_log(double x) {
  double low = 0, high = 700;
  for (int step = 0; step < 60; ++step) {
    const double middle = 0.5 * (low + high);
    (portable_exp(middle) < x ? low : high) = middle;
  }
  return low;
}

RowPlace place_of(const PackedLayout& layout, std::int64_t position) {
  const auto& padded = layout.cu_seqlens_padded;
  const auto after = std::upper_bound(padded.begin(), padded.end(), position);
  RowPlace place;
  place.document = after - padded.begin() - 1;
  place.offset = position - padded[static_cast<std::size_t>(place.document)];
  place.real = place.offset < layout.length(place.document);
  return place;
}

std::vector<std::int32_t> zigzag_positions(const PackedLayout& layout, std::int64_t rank,
                                           std::int64_t size) {
  std::vector<std::int32_t> positions;
  const auto& padded = layout.cu_seqlens_padded;
  for (std::size_t d = 0; d + 1 < padded.size(); ++d) {
    const std::int64_t storage = padded[d + 1] - padded[d];
    if (storage % (2 * size) != 0) {
      throw Error(ErrorCode::kValue,
                  fmt::format("synth: zigzag needs every document's storage to be a multiple of "
                              "2 * cp_size = {}, got {}; use --pad-to",
                              2 * size, storage));
    }
    const std::int64_t chunk = storage / (2 * size);
    for (const std::int64_t piece : {rank, 2 * size - 1 - rank}) {
      for (std::int64_t i = 0; i < chunk; ++i) {
        positions.push_back(static_cast<std::int32_t>(padded[d] + piece * chunk + i));
      }
    }
  }
  return positions;
}

}  // namespace

std::int64_t PackedLayout::length(std::int64_t document) const {
  const auto d = static_cast<std::size_t>(document);
  return cu_seqlens[d + 1] - cu_seqlens[d];
}

std::int64_t PackedLayout::longest() const {
  std::int64_t result = 0;
  for (std::int64_t d = 0; d < documents(); ++d) result = std::max(result, length(d));
  return result;
}

std::vector<std::int64_t> draw_lengths(std::int64_t tokens, std::int64_t shortest,
                                       std::int64_t longest, std::uint64_t seed) {
  const RandomStream stream(seed, StreamId::kDocuments);
  const double log_ratio =
      portable_log(static_cast<double>(longest) / static_cast<double>(shortest));
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = tokens; left > 0; left -= lengths.back()) {
    const double drawn =
        static_cast<double>(shortest) * draw_log_uniform(stream, lengths.size(), log_ratio);
    lengths.push_back(std::min(left, static_cast<std::int64_t>(drawn)));
  }
  return lengths;
}

std::vector<std::int64_t> split_tokens(std::int64_t tokens, std::int64_t documents,
                                       std::uint64_t seed) {
  if (documents > tokens) {
    throw Error(ErrorCode::kValue,
                fmt::format("synth: {} documents need as many tokens, got {}", documents, tokens));
  }
  constexpr double kLogRatio = 3.688879454113936;  // ln 40, the spread of packed training data
  const RandomStream stream(seed, StreamId::kDocuments);
  std::vector<double> shares(static_cast<std::size_t>(documents));
  for (std::size_t d = 0; d < shares.size(); ++d) {
    shares[d] = draw_log_uniform(stream, d, kLogRatio);
  }
  const double total = std::accumulate(shares.begin(), shares.end(), 0.0);
  // Cumulative rounding, so that the parts add up; every document gets one token beforehand.
  std::vector<std::int64_t> lengths(shares.size());
  const auto spare = static_cast<double>(tokens - documents);
  double reached = 0;
  std::int64_t given = 0;
  for (std::size_t d = 0; d < shares.size(); ++d) {
    reached += shares[d];
    const bool last = d + 1 == shares.size();
    const std::int64_t until =
        last ? tokens - documents : static_cast<std::int64_t>(spare * (reached / total));
    lengths[d] = 1 + until - given;
    given = until;
  }
  return lengths;
}

PackedLayout pack_documents(std::span<const std::int64_t> lengths, std::int64_t pad_to) {
  PackedLayout layout;
  std::int64_t real = 0, storage = 0;
  layout.cu_seqlens.push_back(0);
  layout.cu_seqlens_padded.push_back(0);
  for (const std::int64_t length : lengths) {
    real += length;
    storage += (length + pad_to - 1) / pad_to * pad_to;
    if (storage > kMaxTokens) {
      throw Error(
          ErrorCode::kValue,
          fmt::format("synth: the storage must have at most {} rows, got more", kMaxTokens));
    }
    layout.cu_seqlens.push_back(static_cast<std::int32_t>(real));
    layout.cu_seqlens_padded.push_back(static_cast<std::int32_t>(storage));
  }
  layout.total_key_tokens = storage;
  layout.query_positions.resize(static_cast<std::size_t>(storage));
  std::iota(layout.query_positions.begin(), layout.query_positions.end(), 0);
  return layout;
}

void take_rank(PackedLayout& layout, CpOrder order, std::int64_t rank, std::int64_t size) {
  if (order == CpOrder::kZigzag) {
    layout.query_positions = zigzag_positions(layout, rank, size);
  } else {
    const std::int64_t begin = layout.total_key_tokens * rank / size;
    const std::int64_t end = layout.total_key_tokens * (rank + 1) / size;
    layout.query_positions.resize(static_cast<std::size_t>(end - begin));
    std::iota(layout.query_positions.begin(), layout.query_positions.end(),
              static_cast<std::int32_t>(begin));
  }
  if (layout.query_positions.empty()) {
    throw Error(ErrorCode::kValue,
                fmt::format("synth: rank {} of {} must hold at least one query row, got none of {}",
                            rank, size, layout.total_key_tokens));
  }
}

std::vector<RowPlace> query_places(const PackedLayout& layout) {
  std::vector<RowPlace> places;
  places.reserve(layout.query_positions.size());
  for (const std::int32_t position : layout.query_positions) {
    places.push_back(place_of(layout, position));
  }
  return places;
}

std::vector<RowPlace> key_places(const PackedLayout& layout) {
  std::vector<RowPlace> places;
  places.reserve(static_cast<std::size_t>(layout.total_key_tokens));
  for (std::int64_t position = 0; position < layout.total_key_tokens; ++position) {
    places.push_back(place_of(layout, position));
  }
  return places;
}

}  // namespace flashdsa::tools
