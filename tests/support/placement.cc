#include "tests/support/placement.h"

#include "tests/support/engines.h"

namespace flashdsa::test {
namespace {

void place(TensorView& view, Mirror& mirror) { view = mirror.place(view); }

void place(std::optional<TensorView>& view, Mirror& mirror) {
  if (view) place(*view, mirror);
}

void place_inputs(SparseAttentionInputs& args, Mirror& mirror) {
  place(args.q, mirror);
  place(args.kv, mirror);
  place(args.topk_indices, mirror);
  place(args.topk_length, mirror);
  place(args.attn_sink, mirror);
}

// Calls function(arguments, runtime) where the runtime's backend works.
template <typename Args, typename Function>
auto call_placed(const Args& args, const Runtime& runtime, const Function& function) {
  if (!works_on_device(runtime.backend)) return function(args, runtime);
  Mirror mirror(runtime.stream);
  Runtime on_device = runtime;
  if (on_device.allocator == nullptr) on_device.allocator = &mirror.allocator();
  return function(placed(args, mirror), on_device);
}

}  // namespace

AttentionForwardArgs placed(AttentionForwardArgs args, Mirror& mirror) {
  place_inputs(args, mirror);
  place(args.out, mirror);
  place(args.lse, mirror);
  place(args.max_logits, mirror);
  return args;
}

AttentionBackwardArgs placed(AttentionBackwardArgs args, Mirror& mirror) {
  place_inputs(args, mirror);
  place(args.out, mirror);
  place(args.lse, mirror);
  place(args.grad_out, mirror);
  place(args.grad_q, mirror);
  place(args.grad_kv, mirror);
  place(args.grad_attn_sink, mirror);
  return args;
}

IndexerTopkArgs placed(IndexerTopkArgs args, Mirror& mirror) {
  place(args.index_q, mirror);
  place(args.index_k, mirror);
  place(args.head_weights, mirror);
  place(args.starts, mirror);
  place(args.causal_lengths, mirror);
  place(args.topk_indices, mirror);
  place(args.topk_length, mirror);
  place(args.topk_scores, mirror);
  return args;
}

IndexerBackwardArgs placed(IndexerBackwardArgs args, Mirror& mirror) {
  place(args.index_q, mirror);
  place(args.index_k, mirror);
  place(args.head_weights, mirror);
  place(args.topk_indices, mirror);
  place(args.topk_length, mirror);
  place(args.grad_scores, mirror);
  place(args.grad_index_q, mirror);
  place(args.grad_index_k, mirror);
  place(args.grad_head_weights, mirror);
  return args;
}

CompactAndSortArgs placed(CompactAndSortArgs args, Mirror& mirror) {
  place(args.indices, mirror);
  place(args.sorted_indices, mirror);
  place(args.lengths, mirror);
  return args;
}

PackedMetadataArgs placed(PackedMetadataArgs args, Mirror& mirror) {
  place(args.cu_seqlens, mirror);
  place(args.query_indices, mirror);
  place(args.cu_seqlens_padded, mirror);
  place(args.padding_mask, mirror);
  return args;
}

SelectionPlanArgs placed(SelectionPlanArgs args, Mirror& mirror) {
  place(args.topk_indices, mirror);
  place(args.topk_length, mirror);
  return args;
}

SelectionPlan on_host(const SelectionPlan& plan, const Runtime& runtime) {
  SelectionPlan result = plan;
  result.storage = copy_to(plan.storage, Device{}, runtime);
  return result;
}

PackedMetadata on_host(const PackedMetadata& metadata, const Runtime& runtime) {
  const auto copy = [&](Tensor& tensor) { tensor = copy_to(tensor, Device{}, runtime); };
  const auto copy_optional = [&](std::optional<Tensor>& tensor) {
    if (tensor) copy(*tensor);
  };
  PackedMetadata result = metadata;
  copy(result.starts);
  copy(result.causal_lengths);
  copy(result.query_valid);
  copy_optional(result.valid_row_indices);
  copy(result.segment_cu_q);
  copy(result.segment_cu_k);
  copy(result.q_causal_offsets);
  copy_optional(result.key_source_indices);
  copy_optional(result.status);
  return result;
}

void run_placed(const AttentionForwardArgs& args, const Runtime& runtime) {
  call_placed(args, runtime, attention_forward);
}

void run_placed(const AttentionBackwardArgs& args, const Runtime& runtime) {
  call_placed(args, runtime, attention_backward);
}

void run_placed(const IndexerTopkArgs& args, const Runtime& runtime) {
  call_placed(args, runtime, indexer_topk);
}

void run_placed(const IndexerBackwardArgs& args, const Runtime& runtime) {
  call_placed(args, runtime, indexer_backward);
}

void run_placed(const CompactAndSortArgs& args, const Runtime& runtime) {
  call_placed(args, runtime, compact_and_sort);
}

PackedMetadata run_placed(const PackedMetadataArgs& args, const Runtime& runtime) {
  return call_placed(args, runtime, [](const PackedMetadataArgs& there, const Runtime& on) {
    const PackedMetadata result = prepare_packed_metadata(there, on);
    return works_on_device(on.backend) ? on_host(result, on) : result;
  });
}

SelectionPlan run_placed(const SelectionPlanArgs& args, const Runtime& runtime) {
  return call_placed(args, runtime, [](const SelectionPlanArgs& there, const Runtime& on) {
    const SelectionPlan result = build_selection_plan(there, on);
    return works_on_device(on.backend) ? on_host(result, on) : result;
  });
}

}  // namespace flashdsa::test
