#include "flashdsa/indexer.h"

#include <fmt/format.h>

#include <new>

#include "core/check_data.h"
#include "core/out_of_memory.h"
#include "core/validate.h"
#include "indexer/backends.h"

namespace flashdsa {
namespace {

using core::Dim;
using core::Layout;
using core::Role;
using indexer::kIndexDim;

constexpr auto kTopk = "indexer_topk";
constexpr auto kBackward = "indexer_backward";

const Dim kRows{"T_q", 0, core::kMaxRows};
const Dim kKeys{"T_k", 0, core::kMaxRows};
const Dim kHeads{"H_index", 1, 64};
const Dim kWidth{"K", 1, 2048};

// The types that go with index_q: BF16 beside FP32, or FP64 throughout.
struct Types {
  DType real;                  // index_q, index_k and what has their type
  DType single;                // scores and their gradients
  std::vector<DType> weights;  // head_weights
};

Types types_beside(const TensorView& index_q) {
  if (index_q.dtype == DType::kFloat64) {
    return {DType::kFloat64, DType::kFloat64, {DType::kFloat64}};
  }
  return {DType::kBFloat16, DType::kFloat32, {DType::kFloat32, DType::kBFloat16}};
}

// What top-k and backward share; `Args` is the one or the other.
template <typename Args>
void check_inputs(core::Validator& validator, const Args& args, const Types& types) {
  validator.check({
      {"index_q",
       &args.index_q,
       {DType::kBFloat16, DType::kFloat64},
       {kRows, kHeads, kIndexDim},
       Layout::kInnerContiguous},
      {"index_k", &args.index_k, {types.real}, {kKeys, kIndexDim}, Layout::kInnerContiguous},
      {"head_weights",
       &args.head_weights,
       types.weights,
       {kRows, kHeads},
       Layout::kInnerContiguous},
  });
}

template <typename Args>
void fill_common(indexer::CommonParams& params, const Args& args) {
  params.real = args.index_q.dtype;
  params.weights_dtype = args.head_weights.dtype;
  params.t_q = args.index_q.shape[0];
  params.t_k = args.index_k.shape[0];
  params.index_heads = args.index_q.shape[1];
  params.topk = args.topk_indices.shape[2];
  params.device = args.index_q.device;
  params.index_q = args.index_q.data;
  params.index_q_row_stride = args.index_q.strides[0];
  params.index_q_head_stride = args.index_q.strides[1];
  params.index_k = args.index_k.data;
  params.index_k_row_stride = args.index_k.strides[0];
  params.head_weights = args.head_weights.data;
  params.head_weights_row_stride = args.head_weights.strides[0];
}

// Checking mode: every row's visible keys lie inside the storage.
void check_rows(const IndexerTopkArgs& args, const Runtime& runtime) {
  if (!core::is_checking(kTopk, args.index_q.device, runtime)) return;
  const std::int64_t t_k = args.index_k.shape[0];
  const core::HostRows starts(args.starts, runtime), lengths(args.causal_lengths, runtime);
  for (std::int64_t t = 0; t < args.index_q.shape[0]; ++t) {
    const std::int64_t start = starts.row(0)[t];
    const std::int64_t length = lengths.row(0)[t];
    core::check_data(
        start >= 0 && start <= t_k, kTopk, "starts", t, [&] { return fmt::format("0..{}", t_k); },
        start);
    core::check_data(
        length >= 0 && length <= t_k - start, kTopk, "causal_lengths", t,
        [&] { return fmt::format("0..{}", t_k - start); }, length);
  }
}

}  // namespace

void indexer_topk(const IndexerTopkArgs& args, const Runtime& runtime) try {
  core::Validator validator(kTopk);
  const Types types = types_beside(args.index_q);
  check_inputs(validator, args, types);
  validator.check({
      {"starts", &args.starts, {DType::kInt32}, {kRows}},
      {"causal_lengths", &args.causal_lengths, {DType::kInt32}, {kRows}},
      {"topk_indices",
       &args.topk_indices,
       {DType::kInt32},
       {kRows, 1, kWidth},
       Layout::kContiguous,
       Role::kOutput},
      {"topk_length",
       core::optional_view(args.topk_length),
       {DType::kInt32},
       {kRows},
       Layout::kContiguous,
       Role::kOutput},
      {"topk_scores",
       core::optional_view(args.topk_scores),
       {types.single},
       {kRows, kWidth},
       Layout::kContiguous,
       Role::kOutput},
  });
  if (args.total_key_tokens && *args.total_key_tokens != args.index_k.shape[0]) {
    validator.refuse(fmt::format("index_k must have total_key_tokens = {} rows, got {}",
                                 *args.total_key_tokens, describe(args.index_k)));
  }
  validator.check_outputs_disjoint();

  indexer::TopkParams params;
  fill_common(params, args);
  params.starts = args.starts.as<std::int32_t>();
  params.causal_lengths = args.causal_lengths.as<std::int32_t>();
  params.topk_indices = args.topk_indices.as<std::int32_t>();
  params.topk_length = args.topk_length ? args.topk_length->as<std::int32_t>() : nullptr;
  params.topk_scores = args.topk_scores ? args.topk_scores->data : nullptr;
  check_rows(args, runtime);
  indexer::dispatch_topk(params, runtime);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kTopk);
}

void indexer_backward(const IndexerBackwardArgs& args, const Runtime& runtime) try {
  core::Validator validator(kBackward);
  const Types types = types_beside(args.index_q);
  check_inputs(validator, args, types);
  std::vector<DType> grad_index_k_types = {types.real};
  if (types.real == DType::kBFloat16) grad_index_k_types.push_back(DType::kFloat32);
  validator.check({
      {"topk_indices",
       &args.topk_indices,
       {DType::kInt32},
       {kRows, 1, kWidth},
       Layout::kInnerContiguous},
      {"topk_length", core::optional_view(args.topk_length), {DType::kInt32}, {kRows}},
      {"grad_scores", &args.grad_scores, {types.single}, {kRows, kWidth}, Layout::kInnerContiguous},
      {"grad_index_q",
       &args.grad_index_q,
       {types.real},
       {kRows, kHeads, kIndexDim},
       Layout::kContiguous,
       Role::kOutput},
      {"grad_index_k",
       &args.grad_index_k,
       grad_index_k_types,
       {kKeys, kIndexDim},
       Layout::kContiguous,
       Role::kOutput},
      {"grad_head_weights",
       &args.grad_head_weights,
       {args.head_weights.dtype},
       {kRows, kHeads},
       Layout::kContiguous,
       Role::kOutput},
  });
  validator.check_outputs_disjoint();

  indexer::BackwardParams params;
  fill_common(params, args);
  params.topk_indices = args.topk_indices.as<std::int32_t>();
  params.topk_indices_row_stride = args.topk_indices.strides[0];
  params.topk_length = args.topk_length ? args.topk_length->as<std::int32_t>() : nullptr;
  params.grad_scores = args.grad_scores.data;
  params.grad_scores_row_stride = args.grad_scores.strides[0];
  params.grad_index_q = args.grad_index_q.data;
  params.grad_index_k = args.grad_index_k.data;
  params.grad_index_k_dtype = args.grad_index_k.dtype;
  params.grad_head_weights = args.grad_head_weights.data;
  core::check_selection(kBackward, args.topk_indices, core::optional_view(args.topk_length),
                        params.t_k, runtime);
  indexer::dispatch_backward(params, runtime);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kBackward);
}

}  // namespace flashdsa
