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
using indexer::TopkParams;

constexpr auto kName = "indexer_topk";

// Checking mode: every row's visible keys lie inside the storage.
void check_rows(const IndexerTopkArgs& args, const Runtime& runtime) {
  if (!core::is_checking(kName, args.index_q.device, runtime)) return;
  const std::int64_t t_k = args.index_k.shape[0];
  const core::HostRows starts(args.starts, runtime), lengths(args.causal_lengths, runtime);
  for (std::int64_t t = 0; t < args.index_q.shape[0]; ++t) {
    const std::int64_t start = starts.row(0)[t];
    const std::int64_t length = lengths.row(0)[t];
    core::check_data(
        start >= 0 && start <= t_k, kName, "starts", t, [&] { return fmt::format("0..{}", t_k); },
        start);
    core::check_data(
        length >= 0 && length <= t_k - start, kName, "causal_lengths", t,
        [&] { return fmt::format("0..{}", t_k - start); }, length);
  }
}

}  // namespace

void indexer_topk(const IndexerTopkArgs& args, const Runtime& runtime) try {
  const bool is_double = args.index_q.dtype == DType::kFloat64;
  const DType real = is_double ? DType::kFloat64 : DType::kBFloat16;
  const DType single = is_double ? DType::kFloat64 : DType::kFloat32;
  const std::vector<DType> weight_types =
      is_double ? std::vector{DType::kFloat64} : std::vector{DType::kFloat32, DType::kBFloat16};
  const Dim rows{"T_q", 0, core::kMaxRows}, keys{"T_k", 0, core::kMaxRows};
  const Dim heads{"H_index", 1, 64}, width{"K", 1, 2048};

  core::Validator validator(kName);
  validator.check({
      {"index_q",
       &args.index_q,
       {DType::kBFloat16, DType::kFloat64},
       {rows, heads, kIndexDim},
       Layout::kInnerContiguous},
      {"index_k", &args.index_k, {real}, {keys, kIndexDim}, Layout::kInnerContiguous},
      {"head_weights", &args.head_weights, weight_types, {rows, heads}, Layout::kInnerContiguous},
      {"starts", &args.starts, {DType::kInt32}, {rows}},
      {"causal_lengths", &args.causal_lengths, {DType::kInt32}, {rows}},
      {"topk_indices",
       &args.topk_indices,
       {DType::kInt32},
       {rows, 1, width},
       Layout::kContiguous,
       Role::kOutput},
      {"topk_length",
       core::optional_view(args.topk_length),
       {DType::kInt32},
       {rows},
       Layout::kContiguous,
       Role::kOutput},
      {"topk_scores",
       core::optional_view(args.topk_scores),
       {single},
       {rows, width},
       Layout::kContiguous,
       Role::kOutput},
  });
  if (args.total_key_tokens && *args.total_key_tokens != args.index_k.shape[0]) {
    validator.refuse(fmt::format("index_k must have total_key_tokens = {} rows, got {}",
                                 *args.total_key_tokens, describe(args.index_k)));
  }
  validator.check_outputs_disjoint();

  TopkParams params;
  params.real = real;
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
  params.starts = args.starts.as<std::int32_t>();
  params.causal_lengths = args.causal_lengths.as<std::int32_t>();
  params.topk_indices = args.topk_indices.as<std::int32_t>();
  params.topk_length = args.topk_length ? args.topk_length->as<std::int32_t>() : nullptr;
  params.topk_scores = args.topk_scores ? args.topk_scores->data : nullptr;
  check_rows(args, runtime);
  indexer::dispatch_topk(params, runtime);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kName);
}

}  // namespace flashdsa
