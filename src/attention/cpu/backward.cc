// Backward on the CPU, in chunks of query rows.
//
// Phase 1, rows in parallel: P and dS of every counted slot, grad_q, the sink's part. Phase 2, key
// segments in parallel (core::KeySegments): every segment adds the chunk's slots that lie in it to
// its rows of grad_kv.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/backends.h"
#include "attention/cpu/select_kernels.h"
#include "core/key_segments.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/scratch.h"

namespace flashdsa::attention::cpu {
namespace {

// A chunk holds P and dS of its rows: 0.7 MB a row at H = 64, K = 2048.
constexpr std::int64_t kChunkBytes = std::int64_t{64} << 20;
constexpr std::int64_t kMaxChunkRowsPerThread = 16;

// What phase 1 leaves for phase 2 of one row of the chunk.
struct ChunkRow {
  std::int32_t* keys;             // [K], the counted slots' keys
  std::int32_t* slots;            // [K], positions into keys, by segment, ascending inside one
  std::int32_t* segment_offsets;  // [segments + 1] into slots
  std::uint16_t* p;               // [K, even H]
  std::uint16_t* ds;              // [K, even H]
  std::uint32_t* q_pairs;
  std::uint32_t* grad_out_pairs;
  float* sink_terms;  // [H], P_sink * D
};

struct Plan {
  const BackwardParams& params;
  const Kernels& kernels;
  Sizes sizes;
  int threads;
  core::KeySegments segments;

  Plan(const BackwardParams& p, const Runtime& runtime)
      : params(p),
        kernels(select_kernels(runtime)),
        sizes(sizes_of(p)),
        threads(core::thread_count(runtime, std::max(p.t_q, p.t_k))),
        segments(p.t_k, p.head_dim * static_cast<std::int64_t>(sizeof(float)), p.topk, threads) {}

  ChunkRow carve(core::Carver& carver) const {
    const auto topk = static_cast<std::size_t>(params.topk);
    const std::size_t weights = topk * static_cast<std::size_t>(even_heads(sizes.heads));
    ChunkRow row;
    row.keys = carver.take<std::int32_t>(topk);
    row.slots = carver.take<std::int32_t>(topk);
    row.segment_offsets = carver.take<std::int32_t>(static_cast<std::size_t>(segments.count()) + 1);
    row.p = carver.take<std::uint16_t>(weights);
    row.ds = carver.take<std::uint16_t>(weights);
    row.q_pairs = carver.take<std::uint32_t>(kernels.pairs_words(sizes, sizes.head_dim));
    row.grad_out_pairs = carver.take<std::uint32_t>(kernels.pairs_words(sizes, kValueDim));
    row.sink_terms = carver.take<float>(static_cast<std::size_t>(params.heads));
    return row;
  }
};

// ln(e^lse + e^sink): the softmax's whole denominator.
float whole_lse(float lse, float sink) {
  if (sink == std::numeric_limits<float>::infinity()) return sink;
  const double a = lse, b = sink;
  const double top = std::max(a, b);
  return static_cast<float>(top + std::log1p(std::exp(std::min(a, b) - top)));
}

// A thread's numbers of one row's heads.
struct HeadScratch {
  float* lse;  // of the whole denominator
  float* key_mass;
  float* grad_dot_out;

  HeadScratch(void* memory, std::int64_t heads)
      : lse(static_cast<float*>(memory)), key_mass(lse + heads), grad_dot_out(key_mass + heads) {}
};

// Phase 1 of row t.
void first_phase(const Plan& plan, std::int64_t t, const ChunkRow& chunk, const HeadScratch& head,
                 void* scratch) {
  const BackwardParams& p = plan.params;
  const std::int64_t heads = p.heads;
  auto* grad_q = static_cast<std::uint16_t*>(p.grad_q) + t * heads * p.head_dim;
  const std::int32_t key_count = counted_keys(p, t, chunk.keys);
  plan.segments.sort(chunk.keys, key_count, chunk.slots, chunk.segment_offsets);
  if (key_count == 0) {
    std::fill_n(grad_q, heads * p.head_dim, std::uint16_t{0});
    std::fill_n(chunk.sink_terms, heads, 0.0f);
    return;
  }
  const float* sink = static_cast<const float*>(p.attn_sink);
  const float* row_lse = static_cast<const float*>(p.lse) + t * p.lse_row_stride;
  for (std::int64_t h = 0; h < heads; ++h) {
    head.lse[h] = sink == nullptr ? row_lse[h] : whole_lse(row_lse[h], sink[h]);
    head.key_mass[h] = sink == nullptr ? 1.0f : std::exp(row_lse[h] - head.lse[h]);
  }
  BackwardRow row;
  row.q = static_cast<const std::uint16_t*>(p.q) + t * p.q_row_stride;
  row.q_head_stride = p.q_head_stride;
  row.kv = static_cast<const std::uint16_t*>(p.kv);
  row.kv_row_stride = p.kv_row_stride;
  row.keys = chunk.keys;
  row.key_count = key_count;
  row.out = static_cast<const std::uint16_t*>(p.out) + t * p.out_row_stride;
  row.out_head_stride = p.out_head_stride;
  row.grad_out = static_cast<const std::uint16_t*>(p.grad_out) + t * p.grad_out_row_stride;
  row.grad_out_head_stride = p.grad_out_head_stride;
  row.lse = head.lse;
  row.key_mass = head.key_mass;
  row.grad_q = grad_q;
  row.grad_dot_out = head.grad_dot_out;
  row.p = chunk.p;
  row.ds = chunk.ds;
  row.q_pairs = chunk.q_pairs;
  row.grad_out_pairs = chunk.grad_out_pairs;
  plan.kernels.backward_row(plan.sizes, row, scratch);
  for (std::int64_t h = 0; h < heads && sink != nullptr; ++h) {
    const bool takes_all = sink[h] == std::numeric_limits<float>::infinity();
    chunk.sink_terms[h] =
        (takes_all ? 1.0f : std::exp(sink[h] - head.lse[h])) * head.grad_dot_out[h];
  }
}

// Phase 2 of one segment and row.
void second_phase(const Plan& plan, std::int64_t segment, const ChunkRow& chunk,
                  float* accumulators) {
  const std::int32_t begin = chunk.segment_offsets[segment];
  AccumulateRow row;
  row.keys = chunk.keys;
  row.p = chunk.p;
  row.ds = chunk.ds;
  row.q_pairs = chunk.q_pairs;
  row.grad_out_pairs = chunk.grad_out_pairs;
  row.slots = chunk.slots + begin;
  row.slot_count = chunk.segment_offsets[segment + 1] - begin;
  if (row.slot_count > 0) plan.kernels.accumulate_grad_kv(plan.sizes, row, accumulators);
}

// Accumulators in the kernels' channel order to grad_kv.
void store_grad_kv(const Plan& plan, const float* accumulators) {
  const BackwardParams& p = plan.params;
  constexpr std::int64_t kRowsPerTask = 256;
  const std::int64_t tasks = (p.t_k + kRowsPerTask - 1) / kRowsPerTask;
  core::parallel_for(plan.threads, tasks, [&](std::int64_t task, int) {
    const std::int64_t end = std::min((task + 1) * kRowsPerTask, p.t_k);
    for (std::int64_t s = task * kRowsPerTask; s < end; ++s) {
      const float* row = accumulators + s * p.head_dim;
      if (p.grad_kv_dtype == DType::kFloat32) {
        plan.kernels.store_f32(plan.sizes, row, static_cast<float*>(p.grad_kv) + s * p.head_dim);
      } else {
        plan.kernels.store_bf16(plan.sizes, row,
                                static_cast<std::uint16_t*>(p.grad_kv) + s * p.head_dim);
      }
    }
  });
}

}  // namespace

void backward(const BackwardParams& params, const Runtime& runtime) {
  const Plan plan(params, runtime);
  const auto heads = static_cast<std::size_t>(params.heads);

  core::Carver measure;
  plan.carve(measure);
  const auto row_bytes = static_cast<std::int64_t>(measure.bytes());
  const std::int64_t chunk_rows =
      std::clamp(kChunkBytes / row_bytes, std::int64_t{1},
                 std::min<std::int64_t>(std::max<std::int64_t>(params.t_q, 1),
                                        kMaxChunkRowsPerThread * plan.threads));
  core::Scratch chunk_memory(runtime, static_cast<std::size_t>(chunk_rows * row_bytes));
  core::WorkerScratch worker_memory(runtime, core::thread_count(runtime, chunk_rows),
                                    plan.kernels.backward_scratch_bytes(plan.sizes),
                                    3 * heads * sizeof(float));
  // An FP32 grad_kv is its own accumulator when it is aligned as the kernels want it.
  const std::size_t accumulator_bytes =
      static_cast<std::size_t>(params.t_k * params.head_dim) * sizeof(float);
  const bool in_place =
      params.grad_kv_dtype == DType::kFloat32 &&
      reinterpret_cast<std::uintptr_t>(params.grad_kv) % core::Carver::kAlignment == 0;
  core::Scratch accumulator_memory(runtime, in_place ? 0 : accumulator_bytes);
  auto* accumulators = static_cast<float*>(in_place ? params.grad_kv : accumulator_memory.data());

  std::vector<ChunkRow> rows(static_cast<std::size_t>(chunk_rows));
  core::Carver carver(chunk_memory.data());
  for (ChunkRow& row : rows) row = plan.carve(carver);
  std::vector<double> grad_sink(params.attn_sink != nullptr ? heads : 0);
  core::ProgressReporter progress(runtime, params.t_q);

  std::fill_n(accumulators, params.t_k * params.head_dim, 0.0f);
  for (std::int64_t first = 0; first < params.t_q; first += chunk_rows) {
    const std::int64_t count = std::min(chunk_rows, params.t_q - first);
    core::parallel_for(plan.threads, count, [&](std::int64_t i, int worker) {
      first_phase(plan, first + i, rows[static_cast<std::size_t>(i)],
                  HeadScratch(worker_memory.second(worker), params.heads),
                  worker_memory.first(worker));
    });
    core::parallel_for(plan.threads, plan.segments.count(), [&](std::int64_t segment, int) {
      for (std::int64_t i = 0; i < count; ++i) {
        second_phase(plan, segment, rows[static_cast<std::size_t>(i)], accumulators);
      }
    });
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::size_t h = 0; h < grad_sink.size(); ++h) {
        grad_sink[h] -= rows[static_cast<std::size_t>(i)].sink_terms[h];
      }
    }
    progress.advance(count);
  }
  store_grad_kv(plan, accumulators);
  if (params.grad_attn_sink != nullptr) {
    auto* out = static_cast<float*>(params.grad_attn_sink);
    for (std::size_t h = 0; h < heads; ++h) out[h] = static_cast<float>(grad_sink[h]);
  }
}

}  // namespace flashdsa::attention::cpu
