#include "tests/support/planned_rows.h"

#include <limits>
#include <set>
#include <utility>

#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

std::vector<std::int32_t> range(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> keys;
  for (std::int32_t i = 0; i < count; ++i) keys.push_back(first + i);
  return keys;
}

}  // namespace

AttentionProblem mixed_rows(const AttentionShape& shape, std::uint64_t seed) {
  AttentionProblem problem = random_attention(shape, seed);
  Random random(seed + 1);
  const auto topk = static_cast<std::int32_t>(shape.topk);
  const std::int32_t lengths[] = {0, 1, 31, 32, 33, 63, 64, 65};
  std::vector<std::int32_t> drifting = random.subset(shape.t_k, topk);
  for (std::int64_t t = 0; t < shape.t_q; ++t) {
    const auto place = static_cast<std::int32_t>(t % 8);
    std::set<std::int32_t> next;
    for (const std::int32_t key : drifting) {
      if (random.uniform() < 0.95) next.insert(key);
    }
    while (next.size() < drifting.size()) {
      next.insert(static_cast<std::int32_t>(random.integer(0, shape.t_k - 1)));
    }
    drifting.assign(next.begin(), next.end());

    std::vector<std::int32_t> slots = drifting;
    switch (t / 8 % 5) {
      case 0:
        slots = range(10 + place, topk / 2 + 7 * place);
        break;
      case 2:
        slots = random.subset(shape.t_k, lengths[place]);
        break;
      case 3:
        if (place == 1) slots[3] = -1, slots[9] = static_cast<std::int32_t>(shape.t_k);
        if (place == 2) std::swap(slots.front(), slots.back()), slots[5] = slots[6];
        if (place == 3) slots.clear();
        break;
      case 4:
        slots = place == 4 ? range(20, 40) : std::vector<std::int32_t>{};
        break;
      default:
        break;
    }
    problem.set_row(t, slots);
  }
  std::vector<double> sinks(static_cast<std::size_t>(shape.heads), 0.5);
  sinks[0] = -std::numeric_limits<double>::infinity();
  problem.set_sink(sinks);
  return problem;
}

SelectionPlan build_plan(const SparseAttentionInputs& inputs, const Runtime& runtime) {
  return build_selection_plan(
      {inputs.topk_indices, inputs.topk_length, inputs.kv.shape[0], inputs.q.shape[1]}, runtime);
}

std::vector<selection::PlanItem> items_of(const AttentionProblem& problem) {
  const SelectionPlan plan = build_plan(problem.inputs(), {});
  const selection::PlanView view =
      selection::plan_view(plan.storage.view().data, {plan.query_rows, plan.topk, plan.group});
  return {view.items, view.items + *view.item_count};
}

}  // namespace flashdsa::test
