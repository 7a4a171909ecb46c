#include "attention/sm90/call_plan.h"

namespace flashdsa::attention::sm90 {

CallPlan::CallPlan(const CommonParams& params, bool walks_groups, const Runtime& runtime) {
  if (params.plan != nullptr) {
    view_ = *params.plan;
    return;
  }
  const std::int64_t group = selection::plan_group(params.heads);
  if (!walks_groups || group == 1 || params.t_q < kLeastRows) return;

  SelectionPlanArgs args;
  args.topk_indices = TensorView::contiguous(const_cast<std::int32_t*>(params.topk_indices),
                                             DType::kInt32, {params.t_q, 1, params.topk},
                                             params.device);  // only read
  args.topk_indices.strides[0] = params.topk_indices_row_stride;
  if (params.topk_length != nullptr) {
    args.topk_length = TensorView::contiguous(const_cast<std::int32_t*>(params.topk_length),
                                              DType::kInt32, {params.t_q}, params.device);
  }
  args.total_key_tokens = params.t_k;
  args.heads = params.heads;
  Runtime on = runtime;
  on.backend = Backend::kSm90;
  on.check = false;  // the call has looked at the contents
  on.progress = nullptr;
  own_ = build_selection_plan(args, on);
  view_ = selection::plan_view(own_.storage.view().data, {params.t_q, params.topk, group});
}

}  // namespace flashdsa::attention::sm90
