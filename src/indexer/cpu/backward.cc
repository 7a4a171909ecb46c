// Gradients of the selected scores on the CPU, in chunks of query rows.
//
// Phase 1, rows in parallel: the factors g * w * 1[dot > 0] of every counted slot, grad_index_q and
// grad_head_weights. Phase 2, key segments in parallel (core::KeySegments): every segment adds the
// chunk's slots that lie in it to its rows of grad_index_k.

#include <algorithm>
#include <vector>

#include "core/key_segments.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/scratch.h"
#include "indexer/backends.h"
#include "indexer/cpu/select_kernels.h"

namespace flashdsa::indexer::cpu {
namespace {

// A chunk holds the factors of its rows: 0.3 MB a row at H_index = 64, K = 2048.
constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;
constexpr std::int64_t kMaxChunkRowsPerThread = 16;

constexpr auto kKeyBytes = kIndexDim * static_cast<std::int64_t>(sizeof(float));  // of FP32 sums

// What phase 1 leaves for phase 2 of one row of the chunk.
struct ChunkRow {
  std::int32_t* keys;             // [K], the counted slots' keys
  std::int32_t* slots;            // [K], positions into keys, by segment, ascending inside one
  std::int32_t* segment_offsets;  // [segments + 1] into slots
  std::uint16_t* factors;         // [K, even H_index]
  std::uint32_t* q_pairs;
};

// A thread's numbers of one row.
struct RowScratch {
  float* grad_scores;   // [K], of the counted slots
  float* weights;       // [H_index]
  float* grad_weights;  // [H_index]
};

class Gradients {
 public:
  Gradients(const BackwardParams& params, const Runtime& runtime)
      : params_(params),
        kernels_(select_kernels(runtime)),
        heads_(static_cast<std::int32_t>(params.index_heads)),
        // An FP32 grad_index_k is its own accumulator when it is aligned as the kernels want it.
        in_place_(
            params.grad_index_k_dtype == DType::kFloat32 &&
            reinterpret_cast<std::uintptr_t>(params.grad_index_k) % core::Carver::kAlignment == 0),
        threads_(affordable_threads(runtime)),
        segments_(params.t_k, kKeyBytes, params.topk, threads_),
        chunk_rows_(affordable_rows(runtime)) {}

  void run(const Runtime& runtime) {
    core::Scratch chunk_memory(runtime, static_cast<std::size_t>(chunk_rows_ * row_bytes()));
    core::WorkerScratch worker_memory(runtime, threads_, kernels_.backward_scratch_bytes(heads_),
                                      row_scratch_bytes());
    core::Scratch accumulator_memory(
        runtime, in_place_ ? 0 : static_cast<std::size_t>(params_.t_k * kKeyBytes));
    auto* accumulators =
        static_cast<float*>(in_place_ ? params_.grad_index_k : accumulator_memory.data());
    std::vector<ChunkRow> rows(static_cast<std::size_t>(chunk_rows_));
    core::Carver carver(chunk_memory.data());
    for (ChunkRow& row : rows) row = carve(carver);
    core::ProgressReporter progress(runtime, params_.t_q);

    std::fill_n(accumulators, params_.t_k * kIndexDim, 0.0f);
    for (std::int64_t first = 0; first < params_.t_q; first += chunk_rows_) {
      const std::int64_t count = std::min(chunk_rows_, params_.t_q - first);
      core::parallel_for(threads_, count, [&](std::int64_t i, int worker) {
        core::Carver own(worker_memory.second(worker));
        first_phase(first + i, rows[static_cast<std::size_t>(i)], carve_row_scratch(own),
                    worker_memory.first(worker));
      });
      core::parallel_for(threads_, segments_.count(), [&](std::int64_t segment, int) {
        for (std::int64_t i = 0; i < count; ++i) {
          second_phase(segment, rows[static_cast<std::size_t>(i)], accumulators);
        }
      });
      progress.advance(count);
    }
    store(accumulators);
  }

 private:
  ChunkRow carve(core::Carver& carver) const {
    const auto topk = static_cast<std::size_t>(params_.topk);
    ChunkRow row;
    row.keys = carver.take<std::int32_t>(topk);
    row.slots = carver.take<std::int32_t>(topk);
    row.segment_offsets =
        carver.take<std::int32_t>(static_cast<std::size_t>(segments_.count()) + 1);
    row.factors = carver.take<std::uint16_t>(topk * static_cast<std::size_t>(even_heads(heads_)));
    row.q_pairs = carver.take<std::uint32_t>(kernels_.pairs_words(heads_));
    return row;
  }

  std::int64_t row_bytes() const {
    core::Carver measure;
    carve(measure);
    return static_cast<std::int64_t>(measure.bytes());
  }

  RowScratch carve_row_scratch(core::Carver& carver) const {
    const auto heads = static_cast<std::size_t>(heads_);
    RowScratch row;
    row.grad_scores = carver.take<float>(static_cast<std::size_t>(params_.topk));
    row.weights = carver.take<float>(heads);
    row.grad_weights = carver.take<float>(heads);
    return row;
  }

  std::size_t row_scratch_bytes() const {
    core::Carver measure;
    carve_row_scratch(measure);
    return measure.bytes();
  }

  std::int64_t thread_bytes() const {
    return static_cast<std::int64_t>(kernels_.backward_scratch_bytes(heads_) + row_scratch_bytes());
  }

  // What the accumulators leave of the budget.
  std::int64_t budget(const Runtime& runtime) const {
    const auto whole = static_cast<std::int64_t>(runtime.scratch_budget_bytes);
    return std::max<std::int64_t>(whole - (in_place_ ? 0 : params_.t_k * kKeyBytes), 0);
  }

  // Half of the budget is for threads; one always runs.
  int affordable_threads(const Runtime& runtime) const {
    const int wanted = core::thread_count(runtime, std::max(params_.t_q, params_.t_k));
    return static_cast<int>(
        std::clamp<std::int64_t>(budget(runtime) / 2 / thread_bytes(), 1, wanted));
  }

  std::int64_t affordable_rows(const Runtime& runtime) const {
    const std::int64_t left = budget(runtime) - threads_ * thread_bytes();
    const std::int64_t most =
        std::min(std::max<std::int64_t>(params_.t_q, 1), kMaxChunkRowsPerThread * threads_);
    return std::clamp<std::int64_t>(std::min(left, kChunkBytes) / row_bytes(), 1, most);
  }

  // Writes the keys of row t's counted slots and the gradients of their scores, in slot order;
  // returns their number.
  std::int32_t counted_slots(std::int64_t t, std::int32_t* keys, float* grad_scores) const {
    std::int64_t slots = params_.topk;
    if (params_.topk_length != nullptr) {
      slots = std::clamp<std::int64_t>(params_.topk_length[t], 0, params_.topk);
    }
    const std::int32_t* row = params_.topk_indices + t * params_.topk_indices_row_stride;
    const float* grads =
        static_cast<const float*>(params_.grad_scores) + t * params_.grad_scores_row_stride;
    std::int32_t count = 0;
    for (std::int64_t j = 0; j < slots; ++j) {
      if (row[j] < 0 || row[j] >= params_.t_k) continue;
      keys[count] = row[j];
      grad_scores[count++] = grads[j];
    }
    return count;
  }

  void first_phase(std::int64_t t, const ChunkRow& chunk, const RowScratch& own,
                   void* scratch) const {
    const std::int64_t heads = params_.index_heads;
    auto* grad_q = static_cast<std::uint16_t*>(params_.grad_index_q) + t * heads * kIndexDim;
    const std::int32_t key_count = counted_slots(t, chunk.keys, own.grad_scores);
    segments_.sort(chunk.keys, key_count, chunk.slots, chunk.segment_offsets);
    if (key_count == 0) {
      std::fill_n(grad_q, heads * kIndexDim, std::uint16_t{0});
      std::fill_n(own.grad_weights, heads, 0.0f);
    } else {
      read_weights(params_, t, own.weights);
      BackwardRow row;
      row.heads = heads_;
      row.q = static_cast<const std::uint16_t*>(params_.index_q) + t * params_.index_q_row_stride;
      row.q_head_stride = params_.index_q_head_stride;
      row.weights = own.weights;
      row.index_k = static_cast<const std::uint16_t*>(params_.index_k);
      row.index_k_row_stride = params_.index_k_row_stride;
      row.keys = chunk.keys;
      row.grad_scores = own.grad_scores;
      row.key_count = key_count;
      row.grad_q = grad_q;
      row.grad_weights = own.grad_weights;
      row.factors = chunk.factors;
      row.q_pairs = chunk.q_pairs;
      kernels_.backward_row(row, scratch);
    }
    write_grad_weights(t, own.grad_weights);
  }

  void write_grad_weights(std::int64_t t, const float* from) const {
    const std::int64_t at = t * params_.index_heads;
    if (params_.weights_dtype == DType::kFloat32) {
      std::copy_n(from, params_.index_heads, static_cast<float*>(params_.grad_head_weights) + at);
    } else {
      std::transform(from, from + params_.index_heads,
                     static_cast<BFloat16*>(params_.grad_head_weights) + at,
                     [](float value) { return BFloat16(value); });
    }
  }

  void second_phase(std::int64_t segment, const ChunkRow& chunk, float* accumulators) const {
    const std::int32_t begin = chunk.segment_offsets[segment];
    AccumulateRow row;
    row.heads = heads_;
    row.keys = chunk.keys;
    row.factors = chunk.factors;
    row.q_pairs = chunk.q_pairs;
    row.slots = chunk.slots + begin;
    row.slot_count = chunk.segment_offsets[segment + 1] - begin;
    if (row.slot_count > 0) kernels_.accumulate_grad_index_k(row, accumulators);
  }

  // Accumulators in the kernels' channel order to grad_index_k.
  void store(const float* accumulators) const {
    constexpr std::int64_t kRowsPerTask = 256;
    const std::int64_t tasks = (params_.t_k + kRowsPerTask - 1) / kRowsPerTask;
    core::parallel_for(threads_, tasks, [&](std::int64_t task, int) {
      const std::int64_t first = task * kRowsPerTask;
      const std::int64_t count = std::min(kRowsPerTask, params_.t_k - first);
      const float* rows = accumulators + first * kIndexDim;
      if (params_.grad_index_k_dtype == DType::kFloat32) {
        kernels_.store_f32(rows, count,
                           static_cast<float*>(params_.grad_index_k) + first * kIndexDim);
      } else {
        kernels_.store_bf16(rows, count,
                            static_cast<std::uint16_t*>(params_.grad_index_k) + first * kIndexDim);
      }
    });
  }

  const BackwardParams& params_;
  const Kernels& kernels_;
  std::int32_t heads_;
  bool in_place_;
  int threads_;
  core::KeySegments segments_;
  std::int64_t chunk_rows_;
};

}  // namespace

void backward(const BackwardParams& params, const Runtime& runtime) {
  Gradients(params, runtime).run(runtime);
}

}  // namespace flashdsa::indexer::cpu
