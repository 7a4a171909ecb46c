// Packed metadata (SPEC section 2) from host tensors: one walk over the rows, whose positions
// ascend, beside one walk over the documents.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <vector>

#include "flashdsa/error.h"
#include "metadata/backends.h"

namespace flashdsa::metadata::cpu {
namespace {

constexpr auto kName = "prepare_packed_metadata";

// A rule that the contents break. Capture-safe builds keep the status, the others throw.
struct Violation : Error {
  Violation(MetadataStatus which, const std::string& sentence)
      : Error(ErrorCode::kValue, fmt::format("{}: {}", kName, sentence)), status(which) {}

  MetadataStatus status;
};

// Boundaries of N documents, in 64 bits, so that no difference wraps.
using Boundaries = std::vector<std::int64_t>;

Boundaries boundaries_of(const TensorView& view) {
  const auto* values = view.as<std::int32_t>();
  return {values, values + view.elements()};
}

void check_boundaries(const char* name, const Boundaries& values, bool lenient,
                      MetadataStatus wrong_start, MetadataStatus wrong_order) {
  if (values[0] != 0) {
    throw Violation(wrong_start, fmt::format("{} must start at 0, got {}", name, values[0]));
  }
  for (std::size_t d = 0; d + 1 < values.size(); ++d) {
    const std::int64_t length = values[d + 1] - values[d];
    if (length > 0 || (lenient && length == 0)) continue;
    throw Violation(wrong_order,
                    fmt::format("{} must be {}increasing, got {} before {} at document {}", name,
                                lenient ? "" : "strictly ", values[d], values[d + 1], d));
  }
}

// The local rows' storage positions; without query_indices row t is at t.
class Positions {
 public:
  Positions(const std::optional<TensorView>& indices, std::int64_t total)
      : count_(indices ? indices->shape[0] : total) {
    if (!indices) return;
    if (indices->dtype == DType::kInt32) {
      narrow_ = indices->as<std::int32_t>();
    } else {
      wide_ = indices->as<std::int64_t>();
    }
  }

  std::int64_t count() const { return count_; }
  std::int64_t operator[](std::int64_t t) const {
    if (narrow_ != nullptr) return narrow_[t];
    return wide_ != nullptr ? wide_[t] : t;
  }

 private:
  std::int64_t count_;
  const std::int32_t* narrow_ = nullptr;
  const std::int64_t* wide_ = nullptr;
};

void check_positions(const Positions& positions, std::int64_t total, QueryMode mode) {
  for (std::int64_t t = 0; t < positions.count(); ++t) {
    const std::int64_t g = positions[t];
    if (g >= 0 && g < total) continue;
    throw Violation(
        MetadataStatus::kPositionOutside,
        fmt::format("query_indices must lie in 0..{}, got {} in row {}", total - 1, g, t));
  }
  for (std::int64_t t = 1; t < positions.count(); ++t) {
    const std::int64_t g = positions[t], before = positions[t - 1];
    if (mode == QueryMode::kContiguous && g != before + 1) {
      throw Violation(
          MetadataStatus::kPositionGap,
          fmt::format("query_indices must be one increasing interval in contiguous mode, got {} "
                      "after {} in row {}",
                      g, before, t));
    }
    if (g <= before) {
      throw Violation(
          MetadataStatus::kPositionOrder,
          fmt::format("query_indices must be strictly increasing, got {} after {} in row {}", g,
                      before, t));
    }
  }
}

struct Problem {
  Boundaries cu;
  Boundaries padded;
  Positions positions;
  const std::uint8_t* padding_mask;  // or null; as a bool a byte above 1 would be undefined
  std::int64_t total;
};

Problem problem_of(const PackedMetadataArgs& args) {
  return {boundaries_of(args.cu_seqlens),
          boundaries_of(args.cu_seqlens_padded.value_or(args.cu_seqlens)),
          Positions(args.query_indices, args.total_key_tokens),
          args.padding_mask ? args.padding_mask->as<std::uint8_t>() : nullptr,
          args.total_key_tokens};
}

// Throws the first broken rule, in the order of MetadataStatus.
void check(const PackedMetadataArgs& args, const Problem& problem) {
  const char* padded_name = args.cu_seqlens_padded ? "cu_seqlens_padded" : "cu_seqlens";
  check_boundaries("cu_seqlens", problem.cu, args.lenient, MetadataStatus::kCuSeqlensStart,
                   MetadataStatus::kCuSeqlensOrder);
  check_boundaries(padded_name, problem.padded, args.lenient, MetadataStatus::kPaddedStart,
                   MetadataStatus::kPaddedOrder);
  if (problem.padded.back() != problem.total) {
    throw Violation(MetadataStatus::kPaddedEnd,
                    fmt::format("{} must end at total_key_tokens = {}, got {}", padded_name,
                                problem.total, problem.padded.back()));
  }
  std::int64_t longest = 0;
  for (std::size_t d = 0; d + 1 < problem.cu.size(); ++d) {
    const std::int64_t real = problem.cu[d + 1] - problem.cu[d];
    const std::int64_t stored = problem.padded[d + 1] - problem.padded[d];
    if (stored < real) {
      throw Violation(
          MetadataStatus::kPaddedBelowReal,
          fmt::format("cu_seqlens_padded must give document {} at least its real length {}, got {}",
                      d, real, stored));
    }
    longest = std::max(longest, real);
  }
  if (args.max_seqlen && *args.max_seqlen != longest) {
    throw Violation(MetadataStatus::kMaxSeqlen,
                    fmt::format("max_seqlen must be the largest real length {}, got {}", longest,
                                *args.max_seqlen));
  }
  check_positions(problem.positions, problem.total, args.query_mode);
}

// A maximal run of consecutive rows of one document.
struct Segment {
  std::int64_t first_row;
  std::int64_t start;           // of the document, in storage
  std::int64_t first_position;  // of the first query, in storage
  std::int64_t last_position;
};

// Fills starts, causal_lengths and query_valid; returns the segments.
std::vector<Segment> walk_rows(const Problem& problem, PackedMetadata& result) {
  const auto starts = result.starts.span<std::int32_t>();
  const auto causal_lengths = result.causal_lengths.span<std::int32_t>();
  const auto query_valid = result.query_valid.span<bool>();
  std::vector<Segment> segments;
  std::size_t d = 0;
  result.all_rows_nonempty = true;
  for (std::int64_t t = 0; t < problem.positions.count(); ++t) {
    const std::int64_t g = problem.positions[t];
    const std::size_t before = d;
    while (g >= problem.padded[d + 1]) ++d;
    const std::int64_t start = problem.padded[d];
    if (segments.empty() || d != before) segments.push_back({t, start, g, g});
    segments.back().last_position = g;

    const bool masked = problem.padding_mask != nullptr && problem.padding_mask[t] != 0;
    const bool valid = g < start + problem.cu[d + 1] - problem.cu[d] && !masked;
    const auto row = static_cast<std::size_t>(t);
    starts[row] = static_cast<std::int32_t>(start);
    causal_lengths[row] = valid ? static_cast<std::int32_t>(g + 1 - start) : 0;
    query_valid[row] = valid;
    result.all_rows_nonempty = result.all_rows_nonempty && valid;
  }
  return segments;
}

// Offsets of the segments; entries behind the last one, up to `capacity`, repeat its end.
void fill_segments(const Problem& problem, const std::vector<Segment>& segments,
                   std::int64_t capacity, PackedMetadata& result) {
  result.segment_cu_q = Tensor::host(DType::kInt32, {capacity + 1});
  result.segment_cu_k = Tensor::host(DType::kInt32, {capacity + 1});
  result.q_causal_offsets = Tensor::host(DType::kInt32, {capacity});
  const auto cu_q = result.segment_cu_q.span<std::int32_t>();
  const auto cu_k = result.segment_cu_k.span<std::int32_t>();
  const auto offsets = result.q_causal_offsets.span<std::int32_t>();
  cu_q[0] = cu_k[0] = 0;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    const std::int64_t end_row =
        s + 1 < segments.size() ? segments[s + 1].first_row : problem.positions.count();
    const std::int64_t keys = segment.last_position + 1 - segment.start;
    cu_q[s + 1] = static_cast<std::int32_t>(end_row);
    cu_k[s + 1] = static_cast<std::int32_t>(cu_k[s] + keys);
    offsets[s] = static_cast<std::int32_t>(segment.first_position - segment.start);
    result.max_seqlen_q = std::max(result.max_seqlen_q, end_row - segment.first_row);
    result.max_seqlen_k = std::max(result.max_seqlen_k, keys);
  }
  std::fill(cu_q.begin() + std::ssize(segments) + 1, cu_q.end(), cu_q[segments.size()]);
  std::fill(cu_k.begin() + std::ssize(segments) + 1, cu_k.end(), cu_k[segments.size()]);
  std::fill(offsets.begin() + std::ssize(segments), offsets.end(), 0);
}

Tensor valid_rows(const Tensor& query_valid) {
  const auto valid = query_valid.span<bool>();
  Tensor rows = Tensor::host(DType::kInt64, {std::count(valid.begin(), valid.end(), true)});
  auto next = rows.span<std::int64_t>().begin();
  for (std::size_t t = 0; t < valid.size(); ++t) {
    if (valid[t]) *next++ = static_cast<std::int64_t>(t);
  }
  return rows;
}

// The segments' key prefixes, one behind the other, then -1 up to `size` entries.
Tensor prefix_rows(const std::vector<Segment>& segments, std::int64_t size) {
  Tensor rows = Tensor::host(DType::kInt64, {size});
  auto next = rows.span<std::int64_t>().begin();
  for (const Segment& segment : segments) {
    const std::int64_t keys = segment.last_position + 1 - segment.start;
    std::iota(next, next + keys, segment.start);
    next += keys;
  }
  std::fill(next, rows.span<std::int64_t>().end(), -1);
  return rows;
}

PackedMetadata empty_rows(const Problem& problem) {
  const std::int64_t rows = problem.positions.count();
  PackedMetadata result;
  result.total_key_tokens = problem.total;
  result.starts = Tensor::host(DType::kInt32, {rows});
  result.causal_lengths = Tensor::host(DType::kInt32, {rows});
  result.query_valid = Tensor::host(DType::kBool, {rows});
  std::ranges::fill(result.starts.span<std::int32_t>(), 0);
  std::ranges::fill(result.causal_lengths.span<std::int32_t>(), 0);
  std::ranges::fill(result.query_valid.span<bool>(), false);
  return result;
}

PackedMetadata build_exact(const PackedMetadataArgs& args, const Problem& problem) {
  check(args, problem);
  PackedMetadata result = empty_rows(problem);
  const std::vector<Segment> segments = walk_rows(problem, result);
  fill_segments(problem, segments, std::ssize(segments), result);
  // A valid row always has a key.
  if (!result.all_rows_nonempty) result.valid_row_indices = valid_rows(result.query_valid);
  if (problem.positions.count() != problem.total) {
    result.key_source_indices =
        prefix_rows(segments, result.segment_cu_k.span<std::int32_t>().back());
  }
  return result;
}

PackedMetadata build_capture_safe(const PackedMetadataArgs& args, const Problem& problem) {
  PackedMetadata result = empty_rows(problem);
  MetadataStatus status = MetadataStatus::kGood;
  std::vector<Segment> segments;
  try {
    check(args, problem);
    segments = walk_rows(problem, result);
  } catch (const Violation& violation) {
    status = violation.status;
  }
  fill_segments(problem, segments, std::ssize(problem.cu) - 1, result);
  if (args.key_sources && problem.positions.count() != problem.total) {
    result.key_source_indices = prefix_rows(segments, problem.total);
  }
  result.max_seqlen_q = problem.positions.count();
  result.max_seqlen_k = problem.total;
  result.all_rows_nonempty = false;
  result.status = Tensor::host(DType::kInt32, {1});
  result.status->span<std::int32_t>()[0] = static_cast<std::int32_t>(status);
  return result;
}

}  // namespace

std::string refusal(const BuildParams& params) {
  const bool on_host = params.args.cu_seqlens.device.kind == DeviceKind::kCpu;
  return on_host ? "" : "the tensors are not on the host";
}

void build(const BuildParams& params, const Runtime&) {
  const Problem problem = problem_of(params.args);
  params.result = params.args.capture_safe ? build_capture_safe(params.args, problem)
                                           : build_exact(params.args, problem);
}

}  // namespace flashdsa::metadata::cpu
