// Exact top-k of the indexer's scores: the min(K, n) best of a row, ascending keys, then -1. Order
// by SPEC section 3: higher score first, NaN above +inf, -0 equal to +0, the smaller key on a tie.
//
// Grid: CTAs that draw tasks from a counter. A task is a segment of a row, whose scores it reads
// once, in column order, or the candidates of a row's segments and earlier windows.
//
// Dense phase: what fits into the buffer goes there whole, as ranks; an entry's column follows from
// its place. Of longer input the first kLongDense columns.
//
// Sparse phase: the K best of the buffer become pairs (rank, column) in column order, the K-th
// becomes the threshold. From then on only what is strictly above it is appended, in column order:
// a later equal has a larger key, and K that outrank it are held already. When the pairs run out of
// room: select, keep K, raise the threshold.
//
// This is exact for any input: the K-th of a part never outranks the K-th of the whole, nothing is
// dropped by arrival, and the order needs no sort. Random scores give a row of n columns about
// K * ln(n / kLongDense) candidates behind the dense part; ascending ones are the worst case and
// select anew every kPairs - K columns.
//
// Outputs: a row of one task, or of merged candidates without a later window, goes to the results;
// other tasks leave ranks and keys for the merge.
//
// Shared memory, bytes: words 65536 (LongRows, Merges) or 40960 (ShortRows), bins 8192, list 1024,
// the rest 208. Barriers: __syncthreads alone.
#pragma once

#include "core/cuda/ptx.cuh"
#include "indexer/sm90/select/selector.cuh"

namespace flashdsa::indexer::sm90::select_pass {

using core::cuda::cp_async_16;
using core::cuda::cp_async_wait_all;
using core::cuda::shared_address;

enum class Source { kScores, kCandidates };

// Words that a task reads, columns [begin, end): scores, or ranks with dead entries among them.
template <Source kSource>
struct Input;

template <>
struct Input<Source::kScores> {
  const float* scores;  // of column 0
  uint32_t first_key;   // of column 0
  int begin, end;
  int live;

  __device__ __forceinline__ const void* address(int column) const { return scores + column; }
  __device__ __forceinline__ int32_t key_of(int column) const {
    return static_cast<int32_t>(first_key) + column;
  }
};

template <>
struct Input<Source::kCandidates> {
  Candidates kept;   // of the row, columns [0, kept_end)
  Candidates slots;  // of the row's first segment
  int kept_end;
  int begin, end;
  int live;

  __device__ __forceinline__ const void* address(int column) const {
    return column < kept_end ? kept.ranks + column : slots.ranks + (column - kept_end);
  }
  __device__ __forceinline__ int32_t key_of(int column) const {
    return column < kept_end ? kept.keys[column] : slots.keys[column - kept_end];
  }
};

template <typename Config, Source kSource>
struct RowSelection {
  static constexpr int kOwnResults = kMaxTopk / Config::kThreads;
  static constexpr int kLoads = Config::kVectors * 4;

  Selector<Config>& selector;
  SharedStorage<Config>& sm;
  const Input<kSource>& input;
  const int topk;
  const int thread = static_cast<int>(threadIdx.x);
  // A warp owns consecutive columns of a step.
  const int own_column = (thread >> 5) * (Config::kVectors * 128) + (thread & 31) * 4;

  int origin;  // column of the dense entry 0
  int count;   // entries in use
  int ranked;  // of them, those that hold ranks; the others hold scores
  bool pairs = false;
  uint32_t threshold = 0;  // rank; 0: everything passes
  uint4 next[Config::kVectors];

  __device__ RowSelection(Selector<Config>& s, const Input<kSource>& in, int k)
      : selector(s), sm(s.sm), input(in), topk(k), origin(in.begin & ~3) {
    selector.highest = 0;
    selector.lowest = ~0u;
  }

  static __device__ __forceinline__ uint32_t to_rank(uint32_t word) {
    return kSource == Source::kScores ? rank_of(__uint_as_float(word)) : word;
  }

  __device__ __forceinline__ void load(int at) {
#pragma unroll
    for (int j = 0; j < Config::kVectors; ++j) {
      const int column = at + own_column + j * 128;
      next[j] = column < input.end ? __ldcg(static_cast<const uint4*>(input.address(column)))
                                   : make_uint4(0, 0, 0, 0);
    }
  }

  // The input's first columns into the buffer; returns the first column that is not there.
  __device__ int fill_dense() {
    const int all = input.end - origin;
    const int dense = all <= Config::kWords ? all : Config::kLongDense;
    for (int i = thread * 4; i < dense; i += Config::kThreads * 4) {
      cp_async_16(shared_address(&sm.words[i]), input.address(origin + i), 16);
    }
    load(origin + dense);  // of the stream behind them, if there is one
    cp_async_wait_all();
    for (int i = thread * 4; i < dense; i += Config::kThreads * 4) rank_piece(i);
    count = ranked = dense;
    return origin + dense;
  }

  // Turns this thread's words i .. i + 3 into ranks; columns outside the input are dead.
  __device__ __forceinline__ void rank_piece(int i) {
    uint4& piece = *reinterpret_cast<uint4*>(&sm.words[i]);
    const uint4 v = piece;
    uint32_t rank[4] = {to_rank(v.x), to_rank(v.y), to_rank(v.z), to_rank(v.w)};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = origin + i + e;
      if (column < input.begin || column >= input.end) rank[e] = 0;
      selector.highest = max(selector.highest, rank[e]);
      if (rank[e] != 0) selector.lowest = min(selector.lowest, rank[e]);
    }
    piece = make_uint4(rank[0], rank[1], rank[2], rank[3]);
  }

  __device__ __forceinline__ void rank_appended() {
    if constexpr (kSource == Source::kScores) {
      for (int i = ranked + thread; i < count; i += Config::kThreads) {
        const uint32_t rank = rank_of(__uint_as_float(sm.words[i]));
        sm.words[i] = rank;
        selector.highest = max(selector.highest, rank);
      }
    }
  }

  __device__ __forceinline__ uint32_t column_of(int entry) const {
    return pairs ? sm.words[Config::kPairs + entry] : static_cast<uint32_t>(origin + entry);
  }

  // Keeps the K best as pairs, in column order, and raises the threshold.
  __device__ void compact() {
    rank_appended();
    const Threshold kth = selector.kth(count, topk);
    const auto runs = selector.scan_runs(count, kth);
    selector.emit(runs, kth, [&](int to, int entry, uint32_t) { sm.bins[to] = column_of(entry); });
    __syncthreads();
    uint32_t column[kOwnResults];
#pragma unroll
    for (int i = 0; i < kOwnResults; ++i) column[i] = sm.bins[thread + i * Config::kThreads];
    __syncthreads();
    selector.emit(runs, kth, [&](int to, int, uint32_t rank) { sm.bins[to] = rank; });
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwnResults; ++i) {
      const int to = thread + i * Config::kThreads;
      if (to < topk) {
        sm.words[to] = sm.bins[to];
        sm.words[Config::kPairs + to] = column[i];
      }
    }
    count = ranked = topk;
    pairs = true;
    threshold = kth.rank;
    selector.lowest = kth.rank;
  }

  // Whether a word outranks the threshold; `bound` is the threshold's score.
  __device__ __forceinline__ bool passes(uint32_t word, float bound) const {
    if (kSource == Source::kScores) return !(__uint_as_float(word) <= bound);
    return word > threshold;
  }

  // Bit 4j + e: word e of vector j passes and lies inside the input.
  __device__ __forceinline__ uint32_t passing(const uint32_t (&word)[kLoads], int at,
                                              float bound) const {
    uint32_t pass = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (passes(word[i], bound)) pass |= 1u << i;
    }
    if (at + Config::kStep > input.end) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (at + own_column + i / 4 * 128 + i % 4 >= input.end) pass &= ~(1u << i);
      }
    }
    return pass;
  }

  // Places of a step's candidates: those of the warp's runs of 128 columns, 8 bits a run, in all
  // and before this lane; the CTA's before this warp, and in all.
  struct Places {
    uint32_t runs, before_lane;
    int first, total;
  };
  __device__ __forceinline__ Places places_of(uint32_t pass) {
    Places places{0, 0, count, 0};
    if (__any_sync(kAllLanes, pass != 0)) {
      uint32_t own = 0;
#pragma unroll
      for (int j = 0; j < Config::kVectors; ++j) {
        own |= static_cast<uint32_t>(__popc(pass >> (4 * j) & 15u)) << (8 * j);
      }
      uint32_t inclusive = own;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const uint32_t left = __shfl_up_sync(kAllLanes, inclusive, d);
        if (selector.lane >= d) inclusive += left;
      }
      places.runs = __shfl_sync(kAllLanes, inclusive, 31);
      places.before_lane = inclusive - own;
    }
    uint32_t* sums = sm.warp_sum[selector.parity];
    if (selector.lane == 0) {
      // A run of 128 that pass all fills its 8 bits without a carry.
      sums[selector.warp] = __dp4a(places.runs, 0x01010101u, 0u);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) {
      const int sum = static_cast<int>(sums[i]);
      if (i < selector.warp) places.first += sum;
      places.total += sum;
    }
    selector.parity ^= 1;
    return places;
  }

  __device__ __forceinline__ void append(const uint32_t (&word)[kLoads], int at, uint32_t pass,
                                         const Places& places) {
    if (pass != 0) {
      int run = places.first;
#pragma unroll
      for (int j = 0; j < Config::kVectors; ++j) {
        int entry = run + static_cast<int>(places.before_lane >> (8 * j) & 255u);
        run += static_cast<int>(places.runs >> (8 * j) & 255u);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if ((pass >> (4 * j + e) & 1u) != 0) {
            sm.words[entry] = word[4 * j + e];
            if (kSource == Source::kCandidates) {
              selector.highest = max(selector.highest, word[4 * j + e]);
            }
            sm.words[Config::kPairs + entry] = static_cast<uint32_t>(at + own_column + j * 128 + e);
            ++entry;
          }
        }
      }
    }
    count += places.total;
    if (kSource == Source::kCandidates) ranked = count;
  }

  // The rest of the last 16-byte piece of the pairs' ranks is dead.
  __device__ __forceinline__ void close_pairs() {
    if (thread < 4 && count + thread < Config::kPairs) sm.words[count + thread] = 0;
  }

  // Columns from `at`, which is behind the dense ones, to the end.
  __device__ void stream(int at) {
    uint32_t word[kLoads];
    const auto take = [&] {
#pragma unroll
      for (int j = 0; j < Config::kVectors; ++j) {
        word[4 * j] = next[j].x;
        word[4 * j + 1] = next[j].y;
        word[4 * j + 2] = next[j].z;
        word[4 * j + 3] = next[j].w;
      }
      load(at + Config::kStep);
    };
    float bound = 0;
    __syncthreads();
    take();
    for (bool full = true;;) {
      if (full) {
        compact();
        if (threshold == kNanRank) break;  // nothing ranks above NaN
        bound = score_of(threshold);
        full = false;
      }
      const uint32_t pass = passing(word, at, bound);
      const Places places = places_of(pass);
      if (count + places.total > Config::kPairs) {
        close_pairs();
        full = true;  // this step is looked at again
        continue;
      }
      append(word, at, pass, places);
      at += Config::kStep;
      if (at >= input.end) break;
      take();
    }
    close_pairs();
  }

  // Selects from the buffer and writes; results are staged so that they leave in full lines.
  __device__ void finish() {
    const int live = pairs ? count : input.live, want = min(live, topk);
    Threshold kth;
    __syncthreads();
    if (live > topk) {
      rank_appended();
      kth = selector.kth(count, topk);
    }
    const auto runs = selector.scan_runs(count, kth);
    selector.emit(runs, kth, [&](int to, int entry, uint32_t) { sm.bins[to] = column_of(entry); });
    __syncthreads();
    int32_t key[kOwnResults];
#pragma unroll
    for (int i = 0; i < kOwnResults; ++i) {
      const int at = thread + i * Config::kThreads;
      key[i] = at < want ? input.key_of(static_cast<int>(sm.bins[at])) : -1;
    }
    __syncthreads();  // kept candidates have been read and may be overwritten
    const Output out = sm.output;
    int32_t* keys = out.partial.keys != nullptr ? out.partial.keys : out.indices;
#pragma unroll
    for (int i = 0; i < kOwnResults; ++i) {
      const int at = thread + i * Config::kThreads;
      if (at < topk) keys[at] = key[i];
    }
    if (out.partial.ranks == nullptr && out.scores == nullptr) return;
    selector.emit(runs, kth, [&](int to, int, uint32_t rank) { sm.bins[to] = rank; });
    __syncthreads();
    write_ranks(out, want);
  }

  __device__ __forceinline__ void write_ranks(const Output& out, int want) {
    if (out.partial.ranks != nullptr) {
      const int stride = (topk + 3) & ~3;  // of the slots; what is behind K is dead
      for (int at = thread; at < stride; at += Config::kThreads) {
        out.partial.ranks[at] = at < want ? sm.bins[at] : 0;
      }
      return;
    }
    for (int at = thread; at < topk; at += Config::kThreads) {
      float score = __uint_as_float(0xFF800000u);
      if (at < want) {  // one NaN for all
        score = sm.bins[at] == kNanRank ? __uint_as_float(0x7FC00000u) : score_of(sm.bins[at]);
      }
      out.scores[at] = score;
    }
  }

  __device__ void run() {
    const int at = fill_dense();
    if (at < input.end) stream(at);
    finish();
  }
};

__device__ __forceinline__ Output final_output(const KernelParams& p, int row) {
  const int64_t at = int64_t{row} * p.topk;
  return {{nullptr, nullptr},
          p.topk_indices + at,
          p.topk_scores != nullptr ? p.topk_scores + at : nullptr};
}

__device__ __forceinline__ Candidates at_slot(const Candidates& candidates, const KernelParams& p,
                                              int64_t slot) {
  return {candidates.ranks + slot * p.candidate_stride,
          candidates.keys + slot * p.candidate_stride};
}

template <typename Config>
__device__ __forceinline__ void select_segment(const KernelParams& p, Selector<Config>& selector,
                                               Task task) {
  const RowPlan row = p.rows[task.row];
  Input<Source::kScores> input;
  input.scores = p.scores + (row.offset - p.chunk->offset);
  input.first_key = row.first();
  input.begin = static_cast<int>(max(row.segment_begin(task.segment), row.begin - row.first()));
  input.end = static_cast<int>(min(row.segment_begin(task.segment + 1), row.end - row.first()));
  input.live = input.end - input.begin;
  if (threadIdx.x == 0) {
    selector.sm.output = final_output(p, task.row);
    if (row.is_merged()) {
      selector.sm.output.partial = at_slot(p.slots, p, row.slot - p.chunk->slot + task.segment);
    }
  }
  RowSelection<Config, Source::kScores>(selector, input, p.topk).run();
}

template <typename Config>
__device__ __forceinline__ void merge_row(const KernelParams& p, Selector<Config>& selector,
                                          int at) {
  const RowPlan row = p.rows[at];
  Input<Source::kCandidates> input;
  input.slots = at_slot(p.slots, p, row.slot - p.chunk->slot);
  input.kept_end = row.kept > 0 ? p.candidate_stride : 0;
  input.kept = at_slot(p.kept, p, at);
  input.begin = 0;
  input.end = input.kept_end + row.segments * p.candidate_stride;
  // Each of several segments has K keys and more.
  const uint32_t seen = row.end - row.begin;
  input.live = row.kept + (row.segments > 1 ? row.segments * p.topk
                                            : static_cast<int>(min(seen, uint32_t(p.topk))));
  if (threadIdx.x == 0) {
    selector.sm.output = final_output(p, at);
    if (row.continues != 0) selector.sm.output.partial = at_slot(p.kept, p, at);
  }
  RowSelection<Config, Source::kCandidates>(selector, input, p.topk).run();
}

template <typename Config, Source kSource>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    indexer_select_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& sm = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  Selector<Config> selector(sm);
  constexpr bool kMerges = kSource == Source::kCandidates;
  std::int32_t* tickets = kMerges ? &p.tickets->merges : &p.tickets->tasks;
  int ticket = 0;
  if (threadIdx.x == 0) {
    sm.first_task = kMerges ? p.chunk[0].merge : p.chunk[0].task;
    sm.tasks = (kMerges ? p.chunk[1].merge : p.chunk[1].task) - sm.first_task;
    ticket = atomicAdd(tickets, 1);
  }
  for (;;) {
    __syncthreads();  // the last task's shared memory is free
    if (threadIdx.x == 0) sm.ticket = ticket;
    __syncthreads();
    if (sm.ticket >= sm.tasks) return;
    const int at = sm.first_task + sm.tasks - 1 - sm.ticket;  // longer rows come later: reversed
    if (threadIdx.x == 0) ticket = atomicAdd(tickets, 1);     // while this task is worked on
    if constexpr (kMerges) {
      merge_row(p, selector, p.merges[at]);
    } else {
      select_segment(p, selector, p.tasks[at]);
    }
  }
}

}  // namespace flashdsa::indexer::sm90::select_pass
