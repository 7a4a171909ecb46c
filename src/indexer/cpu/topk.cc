// Indexer top-k on the CPU.
//
// Rows are taken in blocks, each by one thread. A block walks the keys that its rows see: a panel
// of keys is packed once and scored by every row, the scores of some panels (about a thousand keys)
// stay in second-level cache, then each row takes from them what beats its threshold. Scratch does
// not grow with T_q or T_k. Rows that select all of their keys are written without a score.

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "core/progress.h"
#include "core/scratch.h"
#include "indexer/backends.h"
#include "indexer/cpu/row_selection.h"
#include "indexer/cpu/select_kernels.h"

namespace flashdsa::indexer::cpu {
namespace {

constexpr std::int64_t kTargetBlockKeys = 960;
constexpr std::int64_t kMaxBlockRows = 64;  // packing a panel costs 2 % of scoring it 64 times
constexpr std::int64_t kMinBlockRows = 8;

struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
  KeyRange intersect(KeyRange other) const {
    const std::int64_t low = std::max(begin, other.begin);
    return {low, std::max(low, std::min(end, other.end))};
  }
};

// A row of the block that needs scores.
struct ActiveRow {
  std::int64_t t;
  KeyRange keys;
  Query query;
  RowSelection selection;
};

// One thread's scratch, carved once.
struct BlockScratch {
  ActiveRow* rows;         // [block_rows]
  std::uint16_t* index_q;  // [block_rows, H_index, 128]
  float* weights;          // [block_rows, H_index]
  std::uint32_t* panel;    // [64, panel_keys]
  float* scores;           // [block_rows, block_keys], and what a vector reads beyond
  float* kept_scores;      // [block_rows, capacity]
  std::int32_t* kept_keys;
  std::uint32_t* ranks;  // [capacity]
};

class Selector {
 public:
  Selector(const TopkParams& params, const Runtime& runtime)
      : params_(params), kernels_(select_kernels(runtime)) {
    const std::int64_t panel = kernels_.panel_keys;
    block_keys_ = kTargetBlockKeys / panel * panel;
    capacity_ = RowSelection::capacity(params.topk, block_keys_);

    // As many rows and threads as the budget allows; one row on one thread always runs.
    const auto budget = static_cast<std::int64_t>(runtime.scratch_budget_bytes);
    const std::int64_t one_row = scratch_bytes(1);
    const std::int64_t each_row = scratch_bytes(2) - one_row;
    threads_ = static_cast<int>(
        std::clamp<std::int64_t>(budget / one_row, 1, core::thread_count(runtime, params.t_q)));
    const std::int64_t affordable =
        1 + std::max<std::int64_t>(budget / threads_ - one_row, 0) / each_row;
    const std::int64_t even_share = (params.t_q + threads_ - 1) / threads_;
    const std::int64_t wanted = std::max((even_share + 3) / 4, std::min(even_share, kMinBlockRows));
    block_rows_ = std::clamp<std::int64_t>(std::min(wanted, affordable), 1, kMaxBlockRows);
  }

  void run(const Runtime& runtime) {
    core::WorkerScratch scratch(runtime, threads_,
                                static_cast<std::size_t>(scratch_bytes(block_rows_)), 0);
    core::ProgressReporter progress(runtime, params_.t_q);
    const std::int64_t blocks = (params_.t_q + block_rows_ - 1) / block_rows_;
    core::parallel_for(threads_, blocks, [&](std::int64_t task, int worker) {
      // Later rows see more keys: they go first, so that no thread is left with a long one.
      const std::int64_t first = (blocks - 1 - task) * block_rows_;
      const std::int64_t end = std::min(first + block_rows_, params_.t_q);
      core::Carver carver(scratch.first(worker));
      select_rows(first, end, carve(carver, block_rows_));
      progress.advance(end - first);
    });
  }

 private:
  BlockScratch carve(core::Carver& carver, std::int64_t rows) const {
    const auto n = static_cast<std::size_t>(rows);
    const auto heads = static_cast<std::size_t>(params_.index_heads);
    const auto capacity = static_cast<std::size_t>(capacity_);
    const auto panel_keys = static_cast<std::size_t>(kernels_.panel_keys);
    BlockScratch s;
    s.rows = carver.take<ActiveRow>(n);
    s.index_q = carver.take<std::uint16_t>(n * heads * kIndexDim);
    s.weights = carver.take<float>(n * heads);
    s.panel = carver.take<std::uint32_t>(kIndexDim / 2 * panel_keys);
    s.scores = carver.take<float>(n * static_cast<std::size_t>(block_keys_) + 16);
    s.kept_scores = carver.take<float>(n * capacity);
    s.kept_keys = carver.take<std::int32_t>(n * capacity);
    s.ranks = carver.take<std::uint32_t>(capacity);
    return s;
  }

  std::int64_t scratch_bytes(std::int64_t rows) const {
    core::Carver count;
    carve(count, rows);
    return static_cast<std::int64_t>(count.bytes());
  }

  // The row's visible keys that lie in the storage.
  KeyRange visible(std::int64_t t) const {
    const std::int64_t start = params_.starts[t];
    return KeyRange{start, start + std::max(params_.causal_lengths[t], 0)}.intersect(
        {0, params_.t_k});
  }

  void select_rows(std::int64_t first, std::int64_t end, const BlockScratch& s) const {
    std::int64_t active = 0;
    KeyRange all{params_.t_k, 0};
    for (std::int64_t t = first; t < end; ++t) {
      const KeyRange keys = visible(t);
      if (keys.size() <= params_.topk && params_.topk_scores == nullptr) {
        write_whole_row(t, keys);
        continue;
      }
      prepare_row(t, keys, active++, s);
      if (keys.size() == 0) continue;  // such a row may start anywhere, beyond the storage too
      all = {std::min(all.begin, keys.begin), std::max(all.end, keys.end)};
    }
    for (std::int64_t key = all.begin; key < all.end; key += block_keys_) {
      score_block({key, std::min(key + block_keys_, all.end)}, active, s);
    }
    for (std::int64_t i = 0; i < active; ++i) write_selected_row(s.rows[i]);
  }

  // Row t becomes the block's active row i.
  void prepare_row(std::int64_t t, KeyRange keys, std::int64_t i, const BlockScratch& s) const {
    const std::int64_t heads = params_.index_heads;
    std::uint16_t* q = s.index_q + i * heads * kIndexDim;
    float* weights = s.weights + i * heads;
    const auto* from =
        static_cast<const std::uint16_t*>(params_.index_q) + t * params_.index_q_row_stride;
    for (std::int64_t h = 0; h < heads; ++h) {
      std::copy_n(from + h * params_.index_q_head_stride, kIndexDim, q + h * kIndexDim);
    }
    const auto numbers = static_cast<std::int32_t>(heads * kIndexDim);
    s.rows[i] = {
        t, keys,
        Query{q, weights, static_cast<std::int32_t>(heads), kernels_.least_magnitude(q, numbers)},
        RowSelection(static_cast<std::int32_t>(params_.topk), s.kept_scores + i * capacity_,
                     s.kept_keys + i * capacity_, s.ranks)};
    read_weights(params_, t, weights);
  }

  // Scores the block's keys for every active row that sees some of them, then selects.
  void score_block(KeyRange block, std::int64_t active, const BlockScratch& s) const {
    for (std::int64_t key = block.begin; key < block.end; key += kernels_.panel_keys) {
      const KeyRange keys{key, std::min(key + kernels_.panel_keys, block.end)};
      Panel panel{s.panel, 0};
      bool packed = false;
      for (std::int64_t i = 0; i < active; ++i) {
        if (s.rows[i].keys.intersect(keys).size() == 0) continue;
        if (!packed) {
          kernels_.pack_keys(
              static_cast<const std::uint16_t*>(params_.index_k) + key * params_.index_k_row_stride,
              params_.index_k_row_stride, static_cast<std::int32_t>(keys.size()), panel);
          packed = true;
        }
        kernels_.score_panel(s.rows[i].query, panel,
                             s.scores + i * block_keys_ + (key - block.begin));
      }
    }
    for (std::int64_t i = 0; i < active; ++i) {
      const KeyRange seen = s.rows[i].keys.intersect(block);
      if (seen.size() == 0) continue;
      s.rows[i].selection.append(kernels_, s.scores + i * block_keys_ + (seen.begin - block.begin),
                                 static_cast<std::int32_t>(seen.size()),
                                 static_cast<std::int32_t>(seen.begin));
    }
  }

  void write_whole_row(std::int64_t t, KeyRange keys) const {
    std::int32_t* row = params_.topk_indices + t * params_.topk;
    for (std::int64_t j = 0; j < keys.size(); ++j)
      row[j] = static_cast<std::int32_t>(keys.begin + j);
    std::fill(row + keys.size(), row + params_.topk, -1);
    if (params_.topk_length != nullptr)
      params_.topk_length[t] = static_cast<std::int32_t>(keys.size());
  }

  void write_selected_row(ActiveRow& active) const {
    RowSelection& selection = active.selection;
    selection.finish();
    const std::int64_t at = active.t * params_.topk;
    const std::int64_t size = selection.size();
    std::int32_t* row = params_.topk_indices + at;
    std::copy_n(selection.keys(), size, row);
    std::fill(row + size, row + params_.topk, -1);
    if (params_.topk_length != nullptr) params_.topk_length[active.t] = selection.size();
    if (params_.topk_scores == nullptr) return;
    float* scores = static_cast<float*>(params_.topk_scores) + at;
    // One NaN for all, since its bits depend on the kernel that made it.
    std::transform(selection.scores(), selection.scores() + size, scores, [](float score) {
      return std::isnan(score) ? std::numeric_limits<float>::quiet_NaN() : score;
    });
    std::fill(scores + size, scores + params_.topk, -std::numeric_limits<float>::infinity());
  }

  const TopkParams& params_;
  const Kernels& kernels_;
  std::int64_t block_keys_;
  std::int64_t capacity_;
  std::int64_t block_rows_;
  int threads_;
};

}  // namespace

std::string refusal(const CommonParams& params) {
  if (params.device.kind != DeviceKind::kCpu) return "the tensors are not on the host";
  if (params.real != DType::kBFloat16) return "takes bfloat16 only";
  return "";
}

void topk(const TopkParams& params, const Runtime& runtime) {
  Selector(params, runtime).run(runtime);
}

}  // namespace flashdsa::indexer::cpu
