#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashdsa/selection.h"
#include "selection/plan_format.h"
#include "tests/support/host_tensor.h"

namespace flashdsa::test {

/// A selection: rows of slots, each cut to topk_length where there is one.
struct Selection {
  std::vector<std::vector<std::int32_t>> rows;  // shorter ones end in slots of -1
  std::int64_t topk = 0;
  std::int64_t t_k = 0;
  std::optional<std::vector<std::int32_t>> lengths;

  HostTensor indices() const;
  std::optional<HostTensor> topk_length() const;
  /// The counted keys of a row, in the order of its slots.
  std::vector<std::int32_t> keys(std::size_t row) const;
};

/// Rows of every sort in one selection: rows that drift from the one before, independent ones,
/// ranges, empty rows, single keys, holes, duplicates, unsorted rows, indices out of range.
Selection mixed_selection(std::int64_t t_q, std::int64_t topk, std::int64_t t_k,
                          std::uint64_t seed);

/// Full rows that keep nine tenths of their predecessor's keys, as `flashdsa bench` has them.
Selection drifting_selection(std::int64_t t_q, std::int64_t topk, std::int64_t t_k,
                             std::uint64_t seed);

/// The plan of a selection, in host memory.
SelectionPlan plan_of(const Selection& selection, std::int64_t heads, const Runtime& runtime);

/// What a plan on the host holds.
selection::PlanView view_of(const SelectionPlan& plan);

/// A plan in words, whatever is unspecified left out: a line for each item,
///   rows 0..1 union of 3 keys: 0 {4 7} 1 {4 9}
///   rows 2..4 range 5..9: 2 {5..7} 3 {} 4 {6..9}
///   rows 5..5 slots up to 3
std::string text(const SelectionPlan& plan);

/// The plan that the rules ask for, found without the library: each run of rows and its halves.
std::string expected_text(const Selection& selection, std::int64_t heads);

}  // namespace flashdsa::test
