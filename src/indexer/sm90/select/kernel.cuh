// Exact top-k of the indexer's scores: the min(K, n) best of a row, ascending keys, then -1. Order
// by SPEC section 3: higher score first, NaN above +inf, -0 equal to +0, the smaller key on a tie.
//
// Grid: CTAs that draw tasks from a counter. A task is a segment of a row, or the candidates of a
// row's segments and earlier windows.
//
// A sample of the scores says where the K-th lies, with near certainty. What it says is checked by
// counting, so the result does not depend on it; a sample that has misled costs time. Rows of up
// to kShortColumns columns: short_row.cuh. Longer ones:
//
// Sparse phase: what is above the threshold is appended to the buffer as a pair (score, column), in
// column order. The first threshold is the sample's bound, somewhat below the K-th. When the pairs
// run out of room, the K best stay, in column order, and the K-th becomes the threshold: a later
// equal has a larger key, and K that outrank it are held already. When fewer than K have passed at
// the end, the row is read again, behind a dense phase.
//
// Dense phase, also of candidates and of rows too short for a sample: what fits into the buffer
// goes there whole, as ranks; an entry's column follows from its place. Of longer input the first
// kWords columns, whose K-th is the first threshold.
//
// This is exact for any input: the K-th of a part never outranks the K-th of the whole, nothing is
// dropped by arrival, and the order needs no sort. A row of n scores has about
// K + 5 sqrt(K n / kSample) + 5 n / kSample that pass, in whatever order they come.
//
// Outputs: a row of one task, or of merged candidates without a later window, goes to the results;
// other tasks leave ranks and keys for the merge.
//
// Shared memory, bytes: words 40960, bins 8192, list 1024, the rest 208. Barriers: __syncthreads
// alone.
#pragma once

#include "core/cuda/ptx.cuh"
#include "indexer/sm90/select/short_row.cuh"

namespace flashdsa::indexer::sm90::select_pass {

using core::cuda::cp_async_16;
using core::cuda::cp_async_wait_all;
using core::cuda::shared_address;

template <typename Config>
struct RowSelection {
  static constexpr Source kSource = kSourceOf<Config>;
  static constexpr int kOwnResults = kMaxTopk / Config::kThreads;
  static constexpr int kLoads = Config::kVectors * 4;
  static constexpr int kLeastRest = 2048;  // columns beyond K that make up for a sample

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
      : selector(s), sm(s.sm), input(in), topk(k), origin(in.begin & ~3) {}

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
    const int dense = min(all, Config::kWords);
    for (int i = thread * 4; i < dense; i += Config::kThreads * 4) {
      cp_async_16(shared_address(&sm.words[i]), input.address(origin + i), 16);
    }
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
    if (at < input.begin || at + Config::kStep > input.end) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int column = at + own_column + i / 4 * 128 + i % 4;
        if (column < input.begin || column >= input.end) pass &= ~(1u << i);
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

  // Columns from `at` to the end. Unless there is a threshold yet, the dense columns before `at`
  // give it.
  __device__ void stream(int at) {
    __syncthreads();
    for (bool full = !pairs; at < input.end;) {
      if (full) {
        compact();
        if (threshold == kNanRank) break;  // nothing ranks above NaN
        full = false;
      }
      const float bound = score_of(threshold);
      load(at);
      while (!full && at < input.end) {
        uint32_t word[kLoads];
#pragma unroll
        for (int j = 0; j < Config::kVectors; ++j) {
          word[4 * j] = next[j].x;
          word[4 * j + 1] = next[j].y;
          word[4 * j + 2] = next[j].z;
          word[4 * j + 3] = next[j].w;
        }
        load(at + Config::kStep);
        const uint32_t pass = passing(word, at, bound);
        const Places places = places_of(pass);
        full = count + places.total > Config::kPairs;  // then this step is looked at again
        if (!full) {
          append(word, at, pass, places);
          at += Config::kStep;
        }
      }
      close_pairs();
    }
  }

  // Selects from the buffer and writes; results are staged so that they leave in full lines.
  __device__ void finish() {
    const int live = pairs ? count : input.live, want = min(live, topk);
    Threshold kth;
    __syncthreads();
    rank_appended();
    if (live > topk) {
      kth = selector.kth(count, topk);
    } else {
      __syncthreads();
    }
    const auto runs = selector.scan_runs(count, kth);
    selector.emit(runs, kth, [&](int to, int entry, uint32_t) { sm.bins[to] = column_of(entry); });
    write_keys(sm, input, want, topk);
    if (!reports_ranks(sm.output)) return;
    selector.emit(runs, kth, [&](int to, int, uint32_t rank) { sm.bins[to] = rank; });
    write_ranks(sm, want, topk);
  }

  // Rank of the lowest of a few more than K * kSample / n of kSample scores spread over the row:
  // five standard deviations more than the row's K best are expected to have among them.
  __device__ uint32_t sampled_bound() {
    constexpr int kPiecesLog2 = Config::kSampleLog2 - 3;  // of 32 bytes
    const int first = (input.begin + 7) & ~7;
    const int pieces = (input.end - first) / 8;
    selector.highest = 0;
    selector.lowest = ~0u;
#pragma unroll
    for (int i = thread; i < Config::kSample / 4; i += Config::kThreads) {
      // At a scattered place of its share of the row, which no period of the scores meets.
      const uint32_t index = static_cast<uint32_t>(i) >> 1;
      const uint32_t place = (index << 32 - kPiecesLog2) + (index * 0x9E3779B9u >> kPiecesLog2);
      const int piece = static_cast<int>(__umulhi(place, static_cast<uint32_t>(pieces)));
      const uint4 v =
          __ldcg(static_cast<const uint4*>(input.address(first + piece * 8 + (i & 1) * 4)));
      const uint4 rank = make_uint4(to_rank(v.x), to_rank(v.y), to_rank(v.z), to_rank(v.w));
      selector.highest = max(max(max(selector.highest, rank.x), max(rank.y, rank.z)), rank.w);
      selector.lowest = min(min(min(selector.lowest, rank.x), min(rank.y, rank.z)), rank.w);
      *reinterpret_cast<uint4*>(&sm.words[4 * i]) = rank;
    }
    const float share = static_cast<float>(topk) / static_cast<float>(input.live);
    const float expected = share * Config::kSample;
    const int wanted = static_cast<int>(expected + 5.f * sqrtf(expected * (1.f - share)) + 5.f);
    return selector.kth(Config::kSample, min(wanted, Config::kSample - 1)).rank;
  }

  // Makes the sample's bound the threshold; false: there is no sample, or it has no bound.
  __device__ bool begin_behind_sample() {
    if (Config::kTasks != Tasks::kLongRows || input.live < topk + kLeastRest) return false;
    const uint32_t lowest = sampled_bound();
    if (lowest == kNanRank) return false;  // no score is a bound below it
    // What equals it passes too. The next rank below +0 is that of -0, which no score has.
    threshold = lowest == kZeroRank ? lowest - 2 : lowest - 1;
    selector.highest = 0;
    selector.lowest = lowest;
    count = ranked = 0;
    pairs = true;
    return true;
  }

  __device__ int begin_dense() {
    pairs = false;
    threshold = 0;
    selector.highest = 0;
    selector.lowest = ~0u;
    return fill_dense();
  }

  __device__ void run() {
    if constexpr (Config::kTasks == Tasks::kShortRows) {
      begin_dense();
    } else {
      bool sampled = begin_behind_sample();
      for (int at = sampled ? origin : begin_dense();;) {
        if (at < input.end) stream(at);
        if (!sampled || count >= topk) break;
        __syncthreads();  // the buffer is free
        at = begin_dense();
        sampled = false;
      }
    }
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
  if constexpr (Config::kTasks == Tasks::kShortRows) {
    if (input.live > p.topk && ShortRow<Config>(selector, input, p.topk).run()) return;
  }
  RowSelection<Config>(selector, input, p.topk).run();
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
  RowSelection<Config>(selector, input, p.topk).run();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    indexer_select_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto& sm = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  Selector<Config> selector(sm);
  constexpr bool kMerges = Config::kTasks == Tasks::kMerges;
  std::int32_t* tickets = kMerges ? &p.tickets->merges : &p.tickets->tasks;
  int ticket = 0;
  core::cuda::await_earlier_kernels();
  core::cuda::let_next_kernel_start();
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
