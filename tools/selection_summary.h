#pragma once

#include "tools/pipeline.h"

namespace flashdsa::tools {

/// What a person wants to know of a selection.
struct SelectionSummary {
  std::int64_t trivial_rows = 0;  ///< rows with 0 < causal_length <= K: everything is selected
  std::int64_t keys = 0;          ///< selected keys of all rows
  double mean_overlap = 0;        ///< see below
  std::int64_t neighbours = 0;    ///< pairs of rows that mean_overlap averages over
};

/// `mean_overlap` is the share of a row's keys that the row before selected too, averaged over the
/// rows that have keys and whose predecessor has keys of the same document.
SelectionSummary summarize(const PackedMetadata& metadata, const Selection& selection);

/// Adds the summary to a report.
void describe_selection(Report& report, const PackedMetadata& metadata, const Selection& selection);

}  // namespace flashdsa::tools
