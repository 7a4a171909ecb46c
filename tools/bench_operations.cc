#include "tools/bench_operations.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

#include "flashdsa/attention.h"
#include "flashdsa/error.h"
#include "flashdsa/indexer.h"
#include "flashdsa/metadata.h"
#include "flashdsa/selection.h"
#include "tools/synth_random.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kValueDim = 512;
constexpr std::int64_t kIndexDim = 128;
constexpr std::array<std::string_view, 9> kNames = {
    "metadata", "topk",     "indexer_backward",       "compact", "plan",
    "forward",  "backward", "backward_deterministic", "step"};
constexpr std::array<std::string_view, 3> kPlanUses = {"none", "reused", "built"};

double bytes_of(std::initializer_list<const Tensor*> tensors) {
  double sum = 0;
  for (const Tensor* tensor : tensors) sum += static_cast<double>(tensor->view().bytes());
  return sum;
}

/// A selection that somebody made: the workload or an indexer call.
struct SelectionTensors {
  Tensor topk_indices, topk_length;
};

template <typename Body>
void for_each_tensor(SelectionTensors& selection, const Body& body) {
  body(selection.topk_indices);
  body(selection.topk_length);
}

// Memory for results, beside the workload's tensors.
SelectionTensors allocate_selection(const Workload& workload, const Runtime& runtime) {
  const TensorView& place = workload.starts;
  return {allocate_beside(place, DType::kInt32, {workload.t_q, 1, workload.shape.topk}, runtime),
          allocate_beside(place, DType::kInt32, {workload.t_q}, runtime)};
}

ForwardOutputs allocate_forward(const Workload& workload, const Runtime& runtime) {
  const TensorView& place = workload.starts;
  const std::int64_t heads = workload.shape.heads;
  return {allocate_beside(place, DType::kBFloat16, {workload.t_q, heads, kValueDim}, runtime),
          allocate_beside(place, DType::kFloat32, {workload.t_q, heads}, runtime)};
}

BackwardOutputs allocate_backward(const Workload& workload, const Runtime& runtime) {
  const TensorView& place = workload.starts;
  const std::int64_t heads = workload.shape.heads, head_dim = workload.shape.head_dim;
  return {allocate_beside(place, DType::kBFloat16, {workload.t_q, heads, head_dim}, runtime),
          allocate_beside(place, DType::kBFloat16, {workload.t_k, 1, head_dim}, runtime)};
}

PackedMetadataArgs metadata_args(const Workload& workload) {
  PackedMetadataArgs args;
  args.cu_seqlens = workload.cu_seqlens;
  args.total_key_tokens = workload.t_k;
  if (workload.query_indices) args.query_indices = *workload.query_indices;
  return args;
}

IndexerTopkArgs topk_args(const Workload& workload, const SelectionTensors& selection) {
  IndexerTopkArgs args;
  args.index_q = *workload.index_q;
  args.index_k = *workload.index_k;
  args.head_weights = *workload.head_weights;
  args.starts = workload.starts;
  args.causal_lengths = workload.causal_lengths;
  args.topk_indices = selection.topk_indices;
  args.topk_length = selection.topk_length;
  return args;
}

SparseAttentionInputs attention_inputs(const Workload& workload,
                                       const SelectionTensors& selection) {
  SparseAttentionInputs inputs;
  inputs.q = *workload.q;
  inputs.kv = *workload.kv;
  inputs.topk_indices = selection.topk_indices;
  inputs.topk_length = selection.topk_length;
  inputs.softmax_scale = workload.shape.softmax_scale;
  return inputs;
}

AttentionForwardArgs forward_args(const Workload& workload, const SelectionTensors& selection,
                                  const ForwardOutputs& outputs) {
  AttentionForwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = attention_inputs(workload, selection);
  args.out = outputs.out;
  args.lse = outputs.lse;
  return args;
}

AttentionBackwardArgs backward_args(const Workload& workload, const SelectionTensors& selection,
                                    const ForwardOutputs& forward, const BackwardOutputs& outputs) {
  AttentionBackwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = attention_inputs(workload, selection);
  args.out = forward.out;
  args.lse = forward.lse;
  args.grad_out = *workload.grad_out;
  args.grad_q = outputs.grad_q;
  args.grad_kv = outputs.grad_kv;
  return args;
}

// Keys selected by all rows together: min(K, causal_length) each.
double picks_of(const Workload& workload) {
  double picks = 0;
  for (const std::int32_t length : workload.causal_lengths.span<std::int32_t>()) {
    picks += static_cast<double>(std::min<std::int64_t>(length, workload.shape.topk));
  }
  return picks;
}

/// FLOP and bytes by the formulae of docs/benchmarks.md.
struct Work {
  double flop = 0;
  double bytes = 0;
};

Work forward_work(const Workload& workload, const ForwardOutputs& outputs) {
  const auto heads = static_cast<double>(workload.shape.heads);
  const auto head_dim = static_cast<double>(workload.shape.head_dim);
  const double picks = picks_of(workload);
  const double per_pick = 2 * head_dim + sizeof(std::int32_t);
  return {2 * heads * picks * (head_dim + kValueDim),
          picks * per_pick + bytes_of({&*workload.q, &outputs.out, &outputs.lse})};
}

Work backward_work(const Workload& workload, const ForwardOutputs& forward,
                   const BackwardOutputs& outputs) {
  const auto heads = static_cast<double>(workload.shape.heads);
  const auto head_dim = static_cast<double>(workload.shape.head_dim);
  const double picks = picks_of(workload);
  const double per_pick = 2 * head_dim + sizeof(std::int32_t);
  return {2 * heads * picks * (3 * head_dim + 2 * kValueDim),
          picks * per_pick + bytes_of({&*workload.q, &forward.out, &forward.lse,
                                       &*workload.grad_out, &outputs.grad_q, &outputs.grad_kv})};
}

// Rows that select everything read nothing but their bounds.
Work topk_work(const Workload& workload, const SelectionTensors& selection) {
  const auto index_heads = static_cast<double>(workload.shape.index_heads);
  const auto lengths = workload.causal_lengths.span<std::int32_t>();
  const auto scored_rows =
      static_cast<double>(std::count_if(lengths.begin(), lengths.end(), [&](std::int32_t length) {
        return length > workload.shape.topk;
      }));
  const double query_bytes = bytes_of({&*workload.index_q, &*workload.head_weights});
  double bytes = bytes_of({&workload.starts, &workload.causal_lengths, &selection.topk_indices,
                           &selection.topk_length});
  bytes += query_bytes * scored_rows / static_cast<double>(workload.t_q);
  if (scored_rows > 0) bytes += bytes_of({&*workload.index_k});
  return {2 * index_heads * kIndexDim * static_cast<double>(count_scored_pairs(workload)), bytes};
}

Operation make_metadata(const PlacedWorkload& workload) {
  const auto result = std::make_shared<PackedMetadata>();
  Operation operation;
  operation.run = [&workload, result](const Runtime& runtime) {
    *result = prepare_packed_metadata(metadata_args(workload.placed), runtime);
  };
  operation.check = [&workload, result] {
    return check_metadata(workload.host, workload.placement.fetch_all(*result));
  };
  constexpr double kBytesPerRow = 4 + 4 + 1;  // starts, causal_lengths, query_valid
  operation.bytes =
      kBytesPerRow * static_cast<double>(workload.host.t_q) + bytes_of({&workload.host.cu_seqlens});
  if (workload.host.query_indices) operation.bytes += bytes_of({&*workload.host.query_indices});
  return operation;
}

Figure check_selection_there(const PlacedWorkload& workload, const SelectionTensors& there) {
  const SelectionTensors selection = workload.placement.fetch_all(there);
  return check_selection(workload.host, selection.topk_indices, selection.topk_length);
}

Operation make_topk(const PlacedWorkload& workload, const Runtime& chosen) {
  const SelectionTensors selection = allocate_selection(workload.placed, chosen);
  Operation operation;
  operation.run = [&workload, selection](const Runtime& runtime) {
    indexer_topk(topk_args(workload.placed, selection), runtime);
  };
  operation.check = [&workload, selection] { return check_selection_there(workload, selection); };
  const Work work = topk_work(workload.host, selection);
  operation.flop = work.flop;
  operation.bytes = work.bytes;
  return operation;
}

Tensor random_grad_scores(const Workload& workload) {
  const Tensor result = Tensor::host(DType::kFloat32, {workload.t_q, workload.shape.topk});
  const RandomStream stream(1, StreamId::kGradScores);
  std::uint64_t counter = 0;
  for (float& grad : result.span<float>()) grad = stream.normal(counter++);
  return result;
}

IndexerBackwardOutputs allocate_indexer_backward(const Workload& workload, const Runtime& runtime) {
  const TensorView& place = workload.starts;
  const std::int64_t index_heads = workload.shape.index_heads;
  return {allocate_beside(place, DType::kBFloat16, {workload.t_q, index_heads, kIndexDim}, runtime),
          allocate_beside(place, DType::kBFloat16, {workload.t_k, kIndexDim}, runtime),
          allocate_beside(place, DType::kFloat32, {workload.t_q, index_heads}, runtime)};
}

IndexerBackwardArgs indexer_backward_args(const Workload& workload, const Tensor& grad_scores,
                                          const IndexerBackwardOutputs& outputs) {
  IndexerBackwardArgs args;
  args.index_q = *workload.index_q;
  args.index_k = *workload.index_k;
  args.head_weights = *workload.head_weights;
  args.topk_indices = *workload.topk_indices;
  args.topk_length = workload.topk_length->view();
  args.grad_scores = grad_scores;
  args.grad_index_q = outputs.grad_index_q;
  args.grad_index_k = outputs.grad_index_k;
  args.grad_head_weights = outputs.grad_head_weights;
  return args;
}

// Gradients of the workload's own selection, three products a pick.
Operation make_indexer_backward(const PlacedWorkload& workload, const Runtime& chosen) {
  const Workload& host = workload.host;
  const Tensor grad_scores = random_grad_scores(host);
  const Tensor placed = workload.placement.place(grad_scores);
  const IndexerBackwardOutputs outputs = allocate_indexer_backward(workload.placed, chosen);
  Operation operation;
  operation.run = [&workload, placed, outputs](const Runtime& runtime) {
    indexer_backward(indexer_backward_args(workload.placed, placed, outputs), runtime);
  };
  operation.check = [&workload, grad_scores, outputs] {
    return check_indexer_backward(workload.host, *workload.host.topk_indices,
                                  *workload.host.topk_length, grad_scores,
                                  workload.placement.fetch_all(outputs));
  };
  const double picks = picks_of(host);
  constexpr double kBytesPerPick = 2 * kIndexDim + sizeof(std::int32_t) + sizeof(float);
  operation.flop = 6 * static_cast<double>(host.shape.index_heads * kIndexDim) * picks;
  operation.bytes =
      kBytesPerPick * picks + bytes_of({&*host.index_q, &*host.head_weights, &outputs.grad_index_q,
                                        &outputs.grad_index_k, &outputs.grad_head_weights});
  return operation;
}

// The workload's rows with their slots shuffled and every tenth of them a hole.
Tensor disordered(const Workload& workload) {
  const Tensor result = Tensor::host(DType::kInt32, {workload.t_q, workload.shape.topk});
  const auto topk = static_cast<std::size_t>(workload.shape.topk);
  const auto source = workload.topk_indices->span<std::int32_t>();
  std::copy(source.begin(), source.end(), result.view().as<std::int32_t>());
  const RandomStream stream(1, StreamId::kSample);
  std::uint64_t counter = 0;
  for (std::size_t first = 0; first < source.size(); first += topk) {
    const auto row = result.span<std::int32_t>().subspan(first, topk);
    for (std::size_t j = topk; j-- > 1;) {
      const auto other = stream.below(counter++, static_cast<std::int64_t>(j) + 1);
      std::swap(row[j], row[static_cast<std::size_t>(other)]);
    }
    for (std::size_t j = 0; j < topk; j += 10) row[j] = -1;
  }
  return result;
}

Operation make_compact(const PlacedWorkload& workload, const Runtime& chosen) {
  const Tensor indices = disordered(workload.host);
  const Tensor placed = workload.placement.place(indices);
  const std::int64_t t_q = workload.host.t_q, topk = workload.host.shape.topk;
  const Tensor sorted = allocate_beside(placed, DType::kInt32, {t_q, topk}, chosen);
  const Tensor lengths = allocate_beside(placed, DType::kInt32, {t_q}, chosen);
  Operation operation;
  operation.run = [&workload, placed, sorted, lengths](const Runtime& runtime) {
    compact_and_sort({placed, workload.host.t_k, sorted, lengths}, runtime);
  };
  operation.check = [&workload, indices, sorted, lengths] {
    const Placement& placement = workload.placement;
    return check_compact(workload.host, indices, placement.fetch(sorted), placement.fetch(lengths));
  };
  operation.bytes = bytes_of({&indices, &sorted, &lengths});
  return operation;
}

SelectionTensors selection_of(const Workload& workload) {
  return {*workload.topk_indices, *workload.topk_length};
}

SelectionPlanArgs plan_args(const Workload& workload) {
  SelectionPlanArgs args;
  args.topk_indices = *workload.topk_indices;
  args.topk_length = workload.topk_length->view();
  args.total_key_tokens = workload.t_k;
  args.heads = workload.shape.heads;
  return args;
}

Operation make_plan(const PlacedWorkload& workload, const Runtime& chosen) {
  const auto plan = std::make_shared<SelectionPlan>();
  Operation operation;
  operation.run = [&workload, plan](const Runtime& runtime) {
    *plan = build_selection_plan(plan_args(workload.placed), runtime);
  };
  operation.check = [&workload, plan] {
    SelectionPlan there = *plan;
    there.storage = workload.placement.fetch(plan->storage);
    return check_plan(workload.host, there);
  };
  operation.run(chosen);  // says how large it is
  operation.plan_bytes = plan->bytes();
  operation.bytes = bytes_of({&*workload.host.topk_indices, &*workload.host.topk_length});
  operation.overlap = neighbour_overlap(workload.host, *workload.host.topk_indices);
  return operation;
}

// `selection` is the host's, `there` is where the call ran.
Figure check_forward_there(const PlacedWorkload& workload, const SelectionTensors& selection,
                           const ForwardOutputs& there) {
  return check_forward(workload.host, selection.topk_indices, selection.topk_length,
                       workload.placement.fetch_all(there), workload.placement.on_host());
}

Figure check_backward_there(const PlacedWorkload& workload, const SelectionTensors& selection,
                            const ForwardOutputs& forward, const BackwardOutputs& there) {
  return check_backward(workload.host, selection.topk_indices, selection.topk_length,
                        workload.placement.fetch_all(forward), workload.placement.fetch_all(there));
}

// The plan of an operation that walks one, as `use` says.
class OperationPlan {
 public:
  OperationPlan(const PlacedWorkload& workload, PlanUse use, const Runtime& chosen,
                Operation& operation)
      : use_(use) {
    build_ = [&workload, plan = plan_](const Runtime& runtime) {
      *plan = build_selection_plan(plan_args(workload.placed), runtime);
    };
    if (use_ == PlanUse::kNone) return;
    build_(chosen);
    operation.plan_bytes = plan_->bytes();
    if (use_ == PlanUse::kReused) operation.build_plan = build_;
  }

  // Before a call with `args`.
  void give(SparseAttentionInputs& args, const Runtime& runtime) const {
    if (use_ == PlanUse::kBuilt) build_(runtime);
    if (use_ != PlanUse::kNone) args.plan = plan_.get();
  }

 private:
  PlanUse use_;
  std::shared_ptr<SelectionPlan> plan_ = std::make_shared<SelectionPlan>();
  std::function<void(const Runtime&)> build_;
};

Operation make_forward(const PlacedWorkload& workload, const AttentionCalls& calls, PlanUse use,
                       const Runtime& chosen) {
  const SelectionTensors selection = selection_of(workload.placed);
  const ForwardOutputs outputs = allocate_forward(workload.placed, chosen);
  Operation operation;
  const OperationPlan plan(workload, use, chosen, operation);
  operation.run = [&workload, call = calls.forward, selection, outputs,
                   plan](const Runtime& runtime) {
    AttentionForwardArgs args = forward_args(workload.placed, selection, outputs);
    plan.give(args, runtime);
    call(args, runtime);
  };
  operation.check = [&workload, outputs] {
    return check_forward_there(workload, selection_of(workload.host), outputs);
  };
  const Work work = forward_work(workload.host, outputs);
  operation.flop = work.flop;
  operation.bytes = work.bytes;
  operation.overlap = neighbour_overlap(workload.host, *workload.host.topk_indices);
  return operation;
}

Operation make_backward(const PlacedWorkload& workload, const AttentionCalls& calls, PlanUse use,
                        const Runtime& chosen) {
  const SelectionTensors selection = selection_of(workload.placed);
  const ForwardOutputs forward = allocate_forward(workload.placed, chosen);
  const BackwardOutputs outputs = allocate_backward(workload.placed, chosen);
  calls.forward(forward_args(workload.placed, selection, forward), chosen);
  Operation operation;
  const OperationPlan plan(workload, use, chosen, operation);
  operation.run = [&workload, call = calls.backward, selection, forward, outputs,
                   plan](const Runtime& runtime) {
    AttentionBackwardArgs args = backward_args(workload.placed, selection, forward, outputs);
    plan.give(args, runtime);
    call(args, runtime);
  };
  operation.check = [&workload, forward, outputs] {
    return check_backward_there(workload, selection_of(workload.host), forward, outputs);
  };
  const Work work = backward_work(workload.host, forward, outputs);
  operation.flop = work.flop;
  operation.bytes = work.bytes;
  operation.overlap = neighbour_overlap(workload.host, *workload.host.topk_indices);
  return operation;
}

Operation make_backward_deterministic(const PlacedWorkload& workload, const Runtime& chosen) {
  Operation operation = make_backward(workload, {}, PlanUse::kNone, chosen);
  operation.run = [run = operation.run](const Runtime& runtime) {
    Runtime ordered = runtime;
    ordered.mode = Mode::kDeterministic;
    run(ordered);
  };
  return operation;
}

// Metadata, selection, forward and backward in order, each on the results of the one before.
Operation make_step(const PlacedWorkload& workload, const Runtime& chosen) {
  const SelectionTensors selection = allocate_selection(workload.placed, chosen);
  const ForwardOutputs forward = allocate_forward(workload.placed, chosen);
  const BackwardOutputs outputs = allocate_backward(workload.placed, chosen);
  Operation operation;
  operation.run = [&placed = workload.placed, selection, forward, outputs](const Runtime& runtime) {
    const PackedMetadata metadata = prepare_packed_metadata(metadata_args(placed), runtime);
    IndexerTopkArgs args = topk_args(placed, selection);
    args.starts = metadata.starts;
    args.causal_lengths = metadata.causal_lengths;
    indexer_topk(args, runtime);
    attention_forward(forward_args(placed, selection, forward), runtime);
    attention_backward(backward_args(placed, selection, forward, outputs), runtime);
  };
  operation.check = [&workload, selection, forward, outputs] {
    const SelectionTensors chosen_keys = workload.placement.fetch_all(selection);
    return worst(check_selection_there(workload, selection),
                 worst(check_forward_there(workload, chosen_keys, forward),
                       check_backward_there(workload, chosen_keys, forward, outputs)));
  };
  for (const Work& work :
       {topk_work(workload.host, selection), forward_work(workload.host, forward),
        backward_work(workload.host, forward, outputs)}) {
    operation.flop += work.flop;
    operation.bytes += work.bytes;
  }
  return operation;
}

}  // namespace

std::span<const std::string_view> operation_names() { return kNames; }

std::string plan_use_name(PlanUse use) {
  return std::string(kPlanUses[static_cast<std::size_t>(use)]);
}

PlanUse parse_plan_use(const std::string& text) {
  const auto* use = std::find(kPlanUses.begin(), kPlanUses.end(), text);
  if (use == kPlanUses.end()) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: --plan must be among none, reused, built, got '{}'", text));
  }
  return static_cast<PlanUse>(use - kPlanUses.begin());
}

bool takes_plan(std::string_view operation) {
  return operation == "forward" || operation == "backward";
}

bool needs_attention(std::string_view operation) {
  return operation != "metadata" && operation != "topk";
}

bool needs_indexer(std::string_view operation) {
  return operation == "topk" || operation == "indexer_backward" || operation == "step";
}

std::string refusal(std::string_view operation, const Workload& workload) {
  if (workload.causal || (operation != "metadata" && operation != "step")) return "";
  return fmt::format("{} needs documents, and in workload {} every row sees all keys", operation,
                     workload.name);
}

Operation make_operation(std::string_view name, const PlacedWorkload& workload,
                         const AttentionCalls& calls, PlanUse plan, const Runtime& runtime) {
  if (name == "metadata") return make_metadata(workload);
  if (name == "topk") return make_topk(workload, runtime);
  if (name == "indexer_backward") return make_indexer_backward(workload, runtime);
  if (name == "compact") return make_compact(workload, runtime);
  if (name == "plan") return make_plan(workload, runtime);
  if (name == "forward") return make_forward(workload, calls, plan, runtime);
  if (name == "backward") return make_backward(workload, calls, plan, runtime);
  if (name == "backward_deterministic") return make_backward_deterministic(workload, runtime);
  if (name == "step") return make_step(workload, runtime);
  throw Error(ErrorCode::kInternal,
              fmt::format("{}:{}: there is no operation {}", __FILE__, __LINE__, name));
}

}  // namespace flashdsa::tools
