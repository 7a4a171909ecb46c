// Indexer top-k on Hopper. Scores go through scratch a chunk at a time:
//
//   for every block of query rows
//     weights as FP32, rows that need no score, an aligned copy of index_q if need be
//     for every window of keys (one, unless the budget is small or keys are many)
//       an aligned copy of its index_k if need be; the plan: who does what, made on the device
//       for every chunk of rows: scores, selection, merge of long rows' and windows' selections
//
// Every loop's length follows from sizes alone, so a call synchronises with nothing and can be
// captured. A chunk that the plan leaves empty costs the launch of empty kernels.

#include <algorithm>

#include "core/cuda/check.h"
#include "core/device.h"
#include "core/progress.h"
#include "core/scratch.h"
#include "indexer/backends.h"
#include "indexer/sm90/plan/plan.h"
#include "indexer/sm90/plan/rows.h"
#include "indexer/sm90/schedule.h"
#include "indexer/sm90/scores/launch.h"
#include "indexer/sm90/select/launch.h"

namespace flashdsa::indexer::sm90 {
namespace {

class Call {
 public:
  Call(const TopkParams& params, const Runtime& runtime)
      : p_(params),
        stream_(static_cast<cudaStream_t>(runtime.stream.handle)),
        problem_{params.t_q,
                 std::max<std::int64_t>(params.t_k, 1),
                 params.index_heads,
                 params.topk,
                 !score_pass::is_mappable(given_queries()),
                 !score_pass::is_mappable(given_keys()),
                 core::cuda::multiprocessors(params.device.index)},
        schedule_(make_schedule(problem_, static_cast<std::int64_t>(std::min<std::size_t>(
                                              runtime.scratch_budget_bytes, kMostBudget)))),
        scratch_(runtime, scratch_bytes(), params.device) {
    core::Carver carver(scratch_.data());
    memory_ = carve(carver, problem_, schedule_);
  }

  // Progress counts the rows whose work has been queued.
  void run(const Runtime& runtime) {
    core::ProgressReporter progress(runtime, p_.t_q);
    for (std::int64_t row = 0; row < p_.t_q; row += schedule_.block_rows) {
      const std::int64_t rows = std::min(schedule_.block_rows, p_.t_q - row);
      launch_rows(rows_params(row, rows), stream_);
      if (p_.t_k > 0) {
        if (problem_.packs_queries) pack_queries(row, rows);
        for (std::int64_t w = 0; w < schedule_.windows; ++w) run_window(row, rows, w);
      }
      progress.advance(rows);
    }
  }

 private:
  // Places of scores in a chunk have 32 bits.
  static constexpr std::size_t kMostBudget = std::size_t{1} << 33;

  std::size_t scratch_bytes() const {
    core::Carver count;
    carve(count, problem_, schedule_);
    return count.bytes();
  }

  score_pass::Queries given_queries() const {
    return {static_cast<const __nv_bfloat16*>(p_.index_q), p_.t_q, p_.index_heads,
            p_.index_q_row_stride, p_.index_q_head_stride};
  }
  score_pass::Keys given_keys() const {
    return {static_cast<const __nv_bfloat16*>(p_.index_k), p_.t_k, p_.index_k_row_stride};
  }

  BlockRows block(std::int64_t row, std::int64_t rows) const {
    return {p_.starts + row,
            p_.causal_lengths + row,
            static_cast<std::int32_t>(rows),
            static_cast<std::uint32_t>(p_.t_k),
            static_cast<std::int32_t>(p_.topk),
            p_.topk_scores != nullptr};
  }

  float* scores_of(std::int64_t row) const {
    return p_.topk_scores == nullptr ? nullptr
                                     : static_cast<float*>(p_.topk_scores) + row * p_.topk;
  }

  RowsParams rows_params(std::int64_t row, std::int64_t rows) const {
    const bool is_bf16 = p_.weights_dtype == DType::kBFloat16;
    const auto weight_bytes = static_cast<std::int64_t>(dtype_size(p_.weights_dtype));
    RowsParams params{};
    params.block = block(row, rows);
    params.head_weights = static_cast<const std::byte*>(p_.head_weights) +
                          row * p_.head_weights_row_stride * weight_bytes;
    params.head_weights_row_stride = p_.head_weights_row_stride;
    params.weights_are_bf16 = is_bf16;
    params.heads = static_cast<std::int32_t>(p_.index_heads);
    params.padded_heads = score_pass::padded_heads(p_.index_heads);
    const std::int64_t group = score_pass::group_rows(p_.index_heads);
    params.padded_rows = static_cast<std::int32_t>((rows + group - 1) / group * group);
    params.weights = memory_.weights;
    params.topk_indices = p_.topk_indices + row * p_.topk;
    params.topk_length = p_.topk_length == nullptr ? nullptr : p_.topk_length + row;
    params.topk_scores = scores_of(row);
    return params;
  }

  void pack_queries(std::int64_t row, std::int64_t rows) const {
    const auto* from = static_cast<const __nv_bfloat16*>(p_.index_q) + row * p_.index_q_row_stride;
    launch_pack_heads({from, rows, p_.index_heads, p_.index_q_row_stride, p_.index_q_head_stride},
                      block(row, rows), even_heads(p_.index_heads), memory_.queries, stream_);
  }

  CUtensorMap query_map(std::int64_t rows) const {
    if (!problem_.packs_queries) return score_pass::query_map(given_queries());
    const std::int64_t heads = even_heads(p_.index_heads);
    return score_pass::query_map({memory_.queries, rows, heads, heads * kIndexDim, kIndexDim});
  }

  // The window's keys, copied anew where the copy holds another window's.
  CUtensorMap key_map(std::int64_t first_row, std::int64_t begin, std::int64_t end) const {
    if (!problem_.packs_keys) return score_pass::key_map(given_keys());
    if (first_row == 0 || schedule_.has_windows()) {
      const auto* from =
          static_cast<const __nv_bfloat16*>(p_.index_k) + begin * p_.index_k_row_stride;
      launch_pack_heads({from, end - begin, 1, p_.index_k_row_stride, kIndexDim}, {}, 1,
                        memory_.keys, stream_);
    }
    return score_pass::key_map({memory_.keys, end - begin, kIndexDim});
  }

  void run_window(std::int64_t row, std::int64_t rows, std::int64_t window) const {
    const std::int64_t begin = window * schedule_.window_keys;
    const std::int64_t end = std::min(begin + schedule_.window_keys, p_.t_k);
    const CUtensorMap queries = query_map(rows), keys = key_map(row, begin, end);
    launch_plan(plan_params(row, rows, begin, end), stream_);
    for (std::int64_t c = 0; c < schedule_.chunks; ++c) {
      score_pass::KernelParams scores = scores_params(row, rows, begin);
      scores.chunk = memory_.tables.chunks + c;
      scores.tickets = memory_.tables.tickets + c;
      score_pass::launch_scores(scores, queries, keys, problem_.multiprocessors, stream_);

      select_pass::KernelParams select = select_params(row);
      select.chunk = scores.chunk;
      select.tickets = scores.tickets;
      select_pass::launch_select(select, std::min(schedule_.segment_keys, schedule_.window_keys),
                                 problem_.multiprocessors, stream_);
      if (schedule_.has_merges()) {
        select_pass::launch_merge(select, problem_.multiprocessors, stream_);
      }
    }
  }

  PlanParams plan_params(std::int64_t row, std::int64_t rows, std::int64_t begin,
                         std::int64_t end) const {
    PlanParams params{};
    params.block = block(row, rows);
    params.window_begin = static_cast<std::uint32_t>(begin);
    params.window_end = static_cast<std::uint32_t>(end);
    params.group_rows = score_pass::group_rows(p_.index_heads);
    params.chunk_stride = schedule_.chunk_stride;
    params.chunks = static_cast<std::int32_t>(schedule_.chunks);
    params.span_keys = static_cast<std::uint32_t>(schedule_.span_keys);
    params.segment_keys = static_cast<std::uint32_t>(schedule_.segment_keys);
    params.tables = memory_.tables;
    return params;
  }

  score_pass::KernelParams scores_params(std::int64_t row, std::int64_t rows,
                                         std::int64_t window_begin) const {
    score_pass::KernelParams params{};
    params.weights = memory_.weights;
    params.rows = memory_.tables.rows;
    params.items = memory_.tables.items;
    params.scores = memory_.scores;
    params.block_rows = static_cast<std::int32_t>(rows);
    params.map_row = problem_.packs_queries ? 0 : static_cast<std::int32_t>(row);
    params.map_key = problem_.packs_keys ? static_cast<std::uint32_t>(window_begin) : 0;
    params.heads = static_cast<std::int32_t>(p_.index_heads);
    return params;
  }

  select_pass::KernelParams select_params(std::int64_t row) const {
    select_pass::KernelParams params{};
    params.rows = memory_.tables.rows;
    params.tasks = memory_.tables.tasks;
    params.merges = memory_.tables.merges;
    params.scores = memory_.scores;
    params.slots = {memory_.slots.ranks, memory_.slots.keys};
    params.kept = {memory_.kept.ranks, memory_.kept.keys};
    params.candidate_stride = static_cast<std::int32_t>(candidate_stride(p_.topk));
    params.topk = static_cast<std::int32_t>(p_.topk);
    params.topk_indices = p_.topk_indices + row * p_.topk;
    params.topk_scores = scores_of(row);
    return params;
  }

  const TopkParams& p_;
  cudaStream_t stream_;
  Problem problem_;
  Schedule schedule_;
  core::Scratch scratch_;
  Memory memory_;
};

}  // namespace

std::string refusal(const CommonParams& params) {
  if (params.device.kind != DeviceKind::kCuda) return "the tensors are not on a CUDA device";
  if (params.real != DType::kBFloat16) return "takes bfloat16 only";
  return core::sm90_refusal(params.device.index);
}

void topk(const TopkParams& params, const Runtime& runtime) {
  if (params.t_q == 0) return;
  const core::cuda::DeviceGuard guard(params.device.index);
  Call(params, runtime).run(runtime);
}

}  // namespace flashdsa::indexer::sm90
