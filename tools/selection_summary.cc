#include "tools/selection_summary.h"

#include <fmt/format.h>

namespace flashdsa::tools {
namespace {

// Common entries of two ascending lists.
std::int64_t count_common(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::int64_t common = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i] == b[j]) ++common;
    const bool advance_a = a[i] <= b[j];
    const bool advance_b = b[j] <= a[i];
    i += advance_a ? 1 : 0;
    j += advance_b ? 1 : 0;
  }
  return common;
}

}  // namespace

SelectionSummary summarize(const PackedMetadata& metadata, const Selection& selection) {
  const auto starts = metadata.starts.span<std::int32_t>();
  const auto visible = metadata.causal_lengths.span<std::int32_t>();
  const auto lengths = selection.topk_length->span<std::int32_t>();
  const auto indices = selection.topk_indices.span<std::int32_t>();
  const auto topk = static_cast<std::size_t>(selection.topk_indices.view().shape[2]);
  const auto keys_of = [&](std::size_t row) {
    return indices.subspan(row * topk, static_cast<std::size_t>(lengths[row]));
  };
  SelectionSummary summary;
  double overlap = 0;
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    const auto keys = keys_of(row);
    summary.keys += lengths[row];
    if (keys.empty()) continue;
    if (static_cast<std::size_t>(visible[row]) <= topk) ++summary.trivial_rows;
    if (row == 0 || lengths[row - 1] == 0 || starts[row] != starts[row - 1]) continue;
    overlap += static_cast<double>(count_common(keys_of(row - 1), keys)) /
               static_cast<double>(keys.size());
    ++summary.neighbours;
  }
  if (summary.neighbours > 0) {
    summary.mean_overlap = overlap / static_cast<double>(summary.neighbours);
  }
  return summary;
}

void describe_selection(Report& report, const PackedMetadata& metadata,
                        const Selection& selection) {
  const SelectionSummary summary = summarize(metadata, selection);
  report.add("trivial rows", "trivial_rows", summary.trivial_rows,
             fmt::format("{} (no more than {} visible keys)", summary.trivial_rows,
                         selection.topk_indices.view().shape[2]));
  report.add("selected keys", "selected_keys", summary.keys);
  report.add("mean overlap", "mean_overlap", summary.mean_overlap,
             summary.neighbours == 0
                 ? "no neighbouring rows"
                 : fmt::format("{:.1f} % of a row's keys stand in the row before",
                               100 * summary.mean_overlap));
}

}  // namespace flashdsa::tools
