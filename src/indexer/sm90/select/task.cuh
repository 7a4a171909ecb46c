// What a selection task reads, and how its result leaves.
#pragma once

#include "indexer/sm90/select/selector.cuh"

namespace flashdsa::indexer::sm90::select_pass {

enum class Source { kScores, kCandidates };

template <typename Config>
inline constexpr Source kSourceOf =
    Config::kTasks == Tasks::kMerges ? Source::kCandidates : Source::kScores;

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

// Whether the result has more than keys.
__device__ __forceinline__ bool reports_ranks(const Output& out) {
  return out.partial.ranks != nullptr || out.scores != nullptr;
}

// The keys of the `want` columns staged in the bins, then -1. The bins and what the task has read
// may be overwritten then.
template <typename Config>
__device__ __forceinline__ void write_keys(SharedStorage<Config>& sm,
                                           const Input<kSourceOf<Config>>& input, int want,
                                           int topk) {
  constexpr int kOwn = kMaxTopk / Config::kThreads;
  const int thread = static_cast<int>(threadIdx.x);
  int32_t key[kOwn];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = thread + i * Config::kThreads;
    key[i] = at < want ? input.key_of(static_cast<int>(sm.bins[at])) : -1;
  }
  __syncthreads();
  const Output out = sm.output;
  int32_t* keys = out.partial.keys != nullptr ? out.partial.keys : out.indices;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = thread + i * Config::kThreads;
    if (at < topk) keys[at] = key[i];
  }
}

// The `want` ranks staged in the bins, as ranks or scores.
template <typename Config>
__device__ __forceinline__ void write_ranks(SharedStorage<Config>& sm, int want, int topk) {
  const int thread = static_cast<int>(threadIdx.x);
  const Output out = sm.output;
  __syncthreads();
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

}  // namespace flashdsa::indexer::sm90::select_pass
