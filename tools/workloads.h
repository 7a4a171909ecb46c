#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashdsa/tensor_view.h"
#include "tools/placement.h"
#include "tools/synth_batch.h"

namespace flashdsa::tools {

/// What a benchmark asks for. docs/benchmarks.md defines the workloads by name.
struct WorkloadRequest {
  std::string name;
  ModelShape shape;
  std::int64_t rows = 0;  // only the last rows of the workload; 0: all
  std::int64_t t_q = 0;   // of `custom` alone
  std::int64_t t_k = 0;
  std::uint64_t seed = 1;
  std::vector<std::string> texts;  // files, of `text` alone
  int threads = 0;
  bool attention = true;  // make q, kv, grad_out and a selection
  bool indexer = true;    // make index_q, index_k, head_weights
};

/// Inputs of every operation, and what is known of them.
struct Workload {
  std::string name;
  ModelShape shape;
  std::int64_t t_q = 0;
  std::int64_t t_k = 0;
  bool causal = false;  // false: every row sees all T_k keys, and there is no packed metadata

  Tensor cu_seqlens;                    // int32 [N+1], also where the workload is not causal
  std::optional<Tensor> query_indices;  // int32 [T_q]; absent: all rows
  Tensor starts;                        // int32 [T_q]
  Tensor causal_lengths;                // int32 [T_q]

  std::optional<Tensor> index_q, index_k, head_weights;  // with WorkloadRequest::indexer
  std::optional<Tensor> q, kv, grad_out;                 // with WorkloadRequest::attention
  std::optional<Tensor> topk_indices;                    // int32 [T_q, 1, K], likewise
  std::optional<Tensor> topk_length;                     // int32 [T_q], likewise
};

template <typename Body>
void for_each_tensor(Workload& workload, const Body& body) {
  for (Tensor* tensor : {&workload.cu_seqlens, &workload.starts, &workload.causal_lengths}) {
    body(*tensor);
  }
  for_each_optional({&workload.query_indices, &workload.index_q, &workload.index_k,
                     &workload.head_weights, &workload.q, &workload.kv, &workload.grad_out,
                     &workload.topk_indices, &workload.topk_length},
                    body);
}

std::span<const std::string_view> workload_names();

/// Throws Error(kValue) for an unknown name, sizes that the workload does not take, or texts that
/// are missing or unreadable.
Workload make_workload(const WorkloadRequest& request);

/// Slots that hold a key.
std::int64_t count_picks(const Tensor& topk_length);

/// (row, visible key) pairs of the rows with more than K visible keys: those that need a score.
std::int64_t count_scored_pairs(const Workload& workload);

/// Share of a row's keys that the row before it selected too, averaged over neighbouring rows that
/// see more than K keys of the same document; nothing when there are none.
std::optional<double> neighbour_overlap(const Workload& workload, const Tensor& topk_indices);

}  // namespace flashdsa::tools
