#include "flashdsa/attention.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <new>
#include <optional>

#include "attention/backends.h"
#include "core/check_data.h"
#include "core/out_of_memory.h"
#include "core/validate.h"

namespace flashdsa {
namespace {

using attention::kValueDim;
using core::Dim;
using core::Layout;
using core::Role;

constexpr auto kForward = "attention_forward";
constexpr auto kBackward = "attention_backward";

const Dim kRows{"T_q", 0, core::kMaxRows};
const Dim kKeys{"T_k", 0, core::kMaxRows};
const Dim kHeads{"H", 1, 128};
const Dim kHeadDim{"D", 512, 576, 64};
const Dim kTopk{"K", 1, 2048};

struct RealTypes {
  std::vector<DType> real;    // q, kv and what has their type
  std::vector<DType> single;  // attn_sink, lse and what has their type
};

// The types that go with q: BF16 and FP32, or FP64 throughout.
RealTypes types_beside(const TensorView& q) {
  if (q.dtype == DType::kFloat64) return {{DType::kFloat64}, {DType::kFloat64}};
  return {{DType::kBFloat16}, {DType::kFloat32}};
}

void check_inputs(core::Validator& validator, const SparseAttentionInputs& args,
                  const RealTypes& types) {
  validator.check({
      {"q",
       &args.q,
       {DType::kBFloat16, DType::kFloat64},
       {kRows, kHeads, kHeadDim},
       Layout::kInnerContiguous},
      {"kv", &args.kv, types.real, {kKeys, 1, kHeadDim}, Layout::kInnerContiguous},
      {"topk_indices",
       &args.topk_indices,
       {DType::kInt32},
       {kRows, 1, kTopk},
       Layout::kInnerContiguous},
      {"topk_length", core::optional_view(args.topk_length), {DType::kInt32}, {kRows}},
      {"attn_sink", core::optional_view(args.attn_sink), types.single, {kHeads}},
  });
  const double scale = args.softmax_scale;
  const auto rounded = static_cast<float>(scale);
  if (!(std::isfinite(scale) && std::isfinite(rounded) && rounded > 0)) {
    validator.refuse(
        fmt::format("softmax_scale must be a positive finite FP32 number, got {}", scale));
  }
}

void fill_common(attention::CommonParams& params, const SparseAttentionInputs& args) {
  params.real = args.q.dtype;
  params.t_q = args.q.shape[0];
  params.t_k = args.kv.shape[0];
  params.heads = args.q.shape[1];
  params.head_dim = args.q.shape[2];
  params.topk = args.topk_indices.shape[2];
  params.softmax_scale = args.softmax_scale;
  params.device = args.q.device;
  params.q = args.q.data;
  params.q_row_stride = args.q.strides[0];
  params.q_head_stride = args.q.strides[1];
  params.kv = args.kv.data;
  params.kv_row_stride = args.kv.strides[0];
  params.topk_indices = args.topk_indices.as<std::int32_t>();
  params.topk_indices_row_stride = args.topk_indices.strides[0];
  params.topk_length = args.topk_length ? args.topk_length->as<std::int32_t>() : nullptr;
  params.attn_sink = args.attn_sink ? args.attn_sink->data : nullptr;
}

// The plan of the call, checked, or none where the mode forbids it. What it was built from cannot
// be seen any more.
std::optional<selection::PlanView> checked_plan(core::Validator& validator,
                                                const SparseAttentionInputs& args,
                                                const Runtime& runtime) {
  if (args.plan == nullptr) return std::nullopt;
  const SelectionPlan& plan = *args.plan;
  const std::int64_t t_q = args.q.shape[0], t_k = args.kv.shape[0];
  const std::int64_t topk = args.topk_indices.shape[2];
  const std::int64_t group = selection::plan_group(args.q.shape[1]);
  if (plan.query_rows != t_q || plan.topk != topk || plan.total_key_tokens != t_k ||
      plan.group != group) {
    validator.refuse(fmt::format(
        "plan must be built for T_q = {}, K = {}, T_k = {} and groups of {} rows, got one for "
        "T_q = {}, K = {}, T_k = {} and groups of {} rows",
        t_q, topk, t_k, group, plan.query_rows, plan.topk, plan.total_key_tokens, plan.group));
  }
  const selection::PlanSizes sizes{t_q, topk, group};
  const auto bytes = static_cast<std::int64_t>(selection::plan_bytes(sizes));
  validator.check({"plan.storage", &plan.storage.view(), {DType::kUInt8}, {bytes}});
  const void* storage = plan.storage.view().data;
  if (reinterpret_cast<std::uintptr_t>(storage) % alignof(selection::PlanItem) != 0) {
    validator.refuse(fmt::format("plan.storage must lie at a multiple of {} bytes, got {}",
                                 alignof(selection::PlanItem), fmt::ptr(storage)));
  }
  if (runtime.mode == Mode::kInvariant) return std::nullopt;
  return selection::plan_view(storage, sizes);
}

void check_selection(const char* operation, const SparseAttentionInputs& args,
                     const Runtime& runtime) {
  core::check_selection(operation, args.topk_indices, core::optional_view(args.topk_length),
                        args.kv.shape[0], runtime);
}

}  // namespace

void attention_forward(const AttentionForwardArgs& args, const Runtime& runtime) try {
  core::Validator validator(kForward);
  const RealTypes types = types_beside(args.q);
  check_inputs(validator, args, types);
  validator.check({
      {"out",
       &args.out,
       types.real,
       {kRows, kHeads, kValueDim},
       Layout::kContiguous,
       Role::kOutput},
      {"lse", &args.lse, types.single, {kRows, kHeads}, Layout::kContiguous, Role::kOutput},
      {"max_logits",
       core::optional_view(args.max_logits),
       types.single,
       {kRows, kHeads},
       Layout::kContiguous,
       Role::kOutput},
  });
  const auto plan = checked_plan(validator, args, runtime);
  validator.check_outputs_disjoint();

  attention::ForwardParams params;
  fill_common(params, args);
  params.plan = plan ? &*plan : nullptr;
  params.out = args.out.data;
  params.lse = args.lse.data;
  params.max_logits = args.max_logits ? args.max_logits->data : nullptr;
  check_selection(kForward, args, runtime);
  attention::dispatch_forward(params, runtime);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kForward);
}

void attention_backward(const AttentionBackwardArgs& args, const Runtime& runtime) try {
  core::Validator validator(kBackward);
  const RealTypes types = types_beside(args.q);
  check_inputs(validator, args, types);
  std::vector<DType> grad_kv_types = types.real;
  if (args.q.dtype == DType::kBFloat16) grad_kv_types.push_back(DType::kFloat32);
  validator.check({
      {"out", &args.out, types.real, {kRows, kHeads, kValueDim}, Layout::kInnerContiguous},
      {"lse", &args.lse, types.single, {kRows, kHeads}, Layout::kInnerContiguous},
      {"grad_out",
       &args.grad_out,
       types.real,
       {kRows, kHeads, kValueDim},
       Layout::kInnerContiguous},
      {"grad_q",
       &args.grad_q,
       types.real,
       {kRows, kHeads, kHeadDim},
       Layout::kContiguous,
       Role::kOutput},
      {"grad_kv",
       &args.grad_kv,
       grad_kv_types,
       {kKeys, 1, kHeadDim},
       Layout::kContiguous,
       Role::kOutput},
      {"grad_attn_sink",
       core::optional_view(args.grad_attn_sink),
       types.single,
       {kHeads},
       Layout::kContiguous,
       Role::kOutput},
  });
  if (args.grad_attn_sink && !args.attn_sink) {
    validator.refuse("grad_attn_sink needs attn_sink, got none");
  }
  const auto plan = checked_plan(validator, args, runtime);
  validator.check_outputs_disjoint();

  attention::BackwardParams params;
  fill_common(params, args);
  params.plan = plan ? &*plan : nullptr;
  params.out = args.out.data;
  params.out_row_stride = args.out.strides[0];
  params.out_head_stride = args.out.strides[1];
  params.lse = args.lse.data;
  params.lse_row_stride = args.lse.strides[0];
  params.grad_out = args.grad_out.data;
  params.grad_out_row_stride = args.grad_out.strides[0];
  params.grad_out_head_stride = args.grad_out.strides[1];
  params.grad_q = args.grad_q.data;
  params.grad_kv = args.grad_kv.data;
  params.grad_kv_dtype = args.grad_kv.dtype;
  params.grad_attn_sink = args.grad_attn_sink ? args.grad_attn_sink->data : nullptr;
  check_selection(kBackward, args, runtime);
  attention::dispatch_backward(params, runtime);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kBackward);
}

}  // namespace flashdsa
