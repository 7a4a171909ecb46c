#pragma once

#include <cstdint>
#include <vector>

#include "selection/plan_format.h"
#include "tests/support/attention_problem.h"

namespace flashdsa::test {

/// Rows in runs of eight: ranges that overlap, lists that drift, short and empty rows, drifting
/// ones among rows with holes, duplicates and slots out of range, and a range beside rows without
/// keys. With a sink.
AttentionProblem mixed_rows(const AttentionShape& shape, std::uint64_t seed);

SelectionPlan build_plan(const SparseAttentionInputs& inputs, const Runtime& runtime);

/// The items of the problem's plan, from the host's builder.
std::vector<selection::PlanItem> items_of(const AttentionProblem& problem);

}  // namespace flashdsa::test
