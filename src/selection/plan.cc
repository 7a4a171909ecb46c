// The public face of selection plans, and their layout in memory.

#include <fmt/format.h>

#include <new>

#include "core/check_data.h"
#include "core/make_tensor.h"
#include "core/out_of_memory.h"
#include "core/scratch.h"
#include "core/validate.h"
#include "flashdsa/selection.h"
#include "selection/backends.h"

namespace flashdsa {
namespace selection {
namespace {

// Sets `arrays` to their places in the memory at `storage`; null: counts only. Returns the bytes.
std::size_t lay_out(void* storage, const PlanSizes& sizes, PlanArrays& arrays) {
  core::Carver carver(storage);
  const auto rows = static_cast<std::size_t>(sizes.t_q);
  const auto topk = static_cast<std::size_t>(sizes.topk);
  const auto group = static_cast<std::size_t>(sizes.group);
  arrays.item_count = carver.take<std::int32_t>(1);
  arrays.items = carver.take<PlanItem>(rows);
  arrays.row_first = carver.take<std::int32_t>(rows);
  arrays.row_keys = carver.take<std::int32_t>(rows);
  if (group > 1) {
    arrays.lists = carver.take<std::int32_t>(rows * topk);
    arrays.masks = carver.take<std::uint32_t>(rows * group * ((topk + 31) / 32));
  }
  return carver.bytes();
}

}  // namespace

std::size_t plan_bytes(const PlanSizes& sizes) {
  PlanArrays arrays;
  return lay_out(nullptr, sizes, arrays);
}

PlanView plan_view(const void* storage, const PlanSizes& sizes) {
  PlanArrays arrays;
  lay_out(const_cast<void*>(storage), sizes, arrays);  // a view does not write
  return {arrays.items,
          arrays.item_count,
          arrays.row_first,
          arrays.row_keys,
          arrays.lists,
          arrays.masks,
          static_cast<std::int32_t>(sizes.group),
          static_cast<std::int32_t>(sizes.topk)};
}

}  // namespace selection

namespace {

constexpr auto kName = "build_selection_plan";

}  // namespace

SelectionPlan build_selection_plan(const SelectionPlanArgs& args, const Runtime& runtime) try {
  using core::Dim;
  using core::Layout;
  const Dim rows{"T_q", 0, core::kMaxRows}, width{"K", 1, 2048};
  core::Validator validator(kName);
  validator.check({
      {"topk_indices",
       &args.topk_indices,
       {DType::kInt32},
       {rows, 1, width},
       Layout::kInnerContiguous},
      {"topk_length", core::optional_view(args.topk_length), {DType::kInt32}, {rows}},
  });
  if (args.total_key_tokens < 0 || args.total_key_tokens > core::kMaxRows) {
    validator.refuse(fmt::format("total_key_tokens must be in 0..{}, got {}", core::kMaxRows,
                                 args.total_key_tokens));
  }
  if (args.heads < 1 || args.heads > 128) {
    validator.refuse(fmt::format("heads must be in 1..128, got {}", args.heads));
  }

  selection::PlanParams params;
  params.sizes = {args.topk_indices.shape[0], args.topk_indices.shape[2],
                  selection::plan_group(args.heads)};
  params.t_k = args.total_key_tokens;
  params.device = args.topk_indices.device;
  params.topk_indices = args.topk_indices.as<std::int32_t>();
  params.topk_indices_row_stride = args.topk_indices.strides[0];
  params.topk_length = args.topk_length ? args.topk_length->as<std::int32_t>() : nullptr;
  core::check_selection(kName, args.topk_indices, core::optional_view(args.topk_length),
                        args.total_key_tokens, runtime);

  SelectionPlan plan;
  plan.query_rows = params.sizes.t_q;
  plan.topk = params.sizes.topk;
  plan.total_key_tokens = params.t_k;
  plan.group = params.sizes.group;
  const auto bytes = static_cast<std::int64_t>(selection::plan_bytes(params.sizes));
  plan.storage = core::make_tensor(DType::kUInt8, std::span(&bytes, 1), params.device, runtime);
  selection::lay_out(plan.storage.view().data, params.sizes, params.plan);
  selection::dispatch_build_plan(params, runtime);
  return plan;
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kName);
}

}  // namespace flashdsa
