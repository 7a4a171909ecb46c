#pragma once

#include <string>

#include "flashdsa/metadata.h"
#include "flashdsa/selection.h"
#include "flashdsa/tensor_view.h"
#include "tools/workloads.h"

namespace flashdsa::tools {

/// An error and what SPEC section 8 allows it to be.
struct Figure {
  std::string name;
  double value = 0;
  double bound = 0;

  bool ok() const { return value <= bound; }  // NaN is not
  std::string text() const;                   // "out rmse 1.7e-03 / 4.0e-03"
};

/// The figure that is nearest to its bound, or furthest beyond.
Figure worst(const Figure& a, const Figure& b);

/// Each judges what a timed call wrote, on a sample of its rows, and returns the worst figure.
/// Inputs come from the workload; `topk_indices` and `topk_length` are the selection the call used.
struct ForwardOutputs {
  Tensor out;  // BF16 [T_q, H, 512]
  Tensor lse;  // FP32 [T_q, H]
};
struct BackwardOutputs {
  Tensor grad_q;   // BF16 [T_q, H, D]
  Tensor grad_kv;  // BF16 [T_k, 1, D]
};

struct IndexerBackwardOutputs {
  Tensor grad_index_q;       // BF16 [T_q, H_index, 128]
  Tensor grad_index_k;       // BF16 [T_k, 128]
  Tensor grad_head_weights;  // FP32 [T_q, H_index]
};

template <typename Body>
void for_each_tensor(ForwardOutputs& outputs, const Body& body) {
  body(outputs.out);
  body(outputs.lse);
}

template <typename Body>
void for_each_tensor(BackwardOutputs& outputs, const Body& body) {
  body(outputs.grad_q);
  body(outputs.grad_kv);
}

template <typename Body>
void for_each_tensor(IndexerBackwardOutputs& outputs, const Body& body) {
  body(outputs.grad_index_q);
  body(outputs.grad_index_k);
  body(outputs.grad_head_weights);
}

/// out and lse of sampled rows against the reference backend in FP64. `tight`: the bound of lse on
/// host backends.
Figure check_forward(const Workload& workload, const Tensor& topk_indices,
                     const Tensor& topk_length, const ForwardOutputs& outputs, bool tight);

/// grad_q of sampled rows against the reference backend in FP64; sampled rows of grad_kv against
/// their sum over all query rows in FP64, from the same out and lse.
Figure check_backward(const Workload& workload, const Tensor& topk_indices,
                      const Tensor& topk_length, const ForwardOutputs& forward,
                      const BackwardOutputs& outputs);

/// grad_index_q and grad_head_weights of sampled rows against the reference backend in FP64;
/// sampled rows of grad_index_k against their sum over all query rows in FP64. `grad_scores` FP32
/// [T_q, K].
Figure check_indexer_backward(const Workload& workload, const Tensor& topk_indices,
                              const Tensor& topk_length, const Tensor& grad_scores,
                              const IndexerBackwardOutputs& outputs);

/// The form of every row, and the choice of sampled rows against FP64 scores.
Figure check_selection(const Workload& workload, const Tensor& topk_indices,
                       const Tensor& topk_length);

/// Rows of `starts` and `causal_lengths` that differ from the workload's own.
Figure check_metadata(const Workload& workload, const PackedMetadata& metadata);

/// Rows that differ from the sorted valid slots of `indices` int32 [T, K].
Figure check_compact(const Workload& workload, const Tensor& indices, const Tensor& sorted,
                     const Tensor& lengths);

/// Rows of a plan on the host whose keys are not those that the workload's selection has.
Figure check_plan(const Workload& workload, const SelectionPlan& plan);

}  // namespace flashdsa::tools
