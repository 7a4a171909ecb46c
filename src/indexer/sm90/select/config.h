#pragma once

#include <cstdint>

#include "indexer/sm90/plan/tables.h"

namespace flashdsa::indexer::sm90::select_pass {

inline constexpr int kMaxTopk = 2048;
static_assert(kLeastSegmentKeys / 2 >= kMaxTopk + 2 * static_cast<int>(kTileKeys),
              "a segment's visible keys outnumber K");

// Sizes of a selection CTA. Its buffer holds either dense ranks, one a column, or pairs of a rank
// and its column.
template <int kThreadsArg, int kVectorsArg, int kWordsArg, int kCtasPerSmArg, int kLongDenseArg>
struct Config {
  static constexpr int kThreads = kThreadsArg;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kCtasPerSm = kCtasPerSmArg;
  static constexpr int kVectors = kVectorsArg;           // 16-byte loads of a thread and step
  static constexpr int kStep = kThreads * kVectors * 4;  // columns of a step
  static constexpr int kWords = kWordsArg;               // of the buffer
  static constexpr int kPairs = kWords / 2;
  static constexpr int kLongDense =
      kLongDenseArg;  // dense columns of a row that exceeds the buffer
  static constexpr int kBins = 2048;
  static constexpr int kBinBits = 11;
  static constexpr int kList = kThreads;  // members of a bin that are ranked directly

  static_assert(kMaxTopk % kThreads == 0 && kMaxTopk <= kBins, "results are staged in the bins");
  static_assert(kLongDense % 4 == 0 && kLongDense <= kWords, "dense columns fit the buffer");
  static_assert(kLongDense > 2 * kMaxTopk + static_cast<int>(kTileKeys),
                "more live entries than K, behind dead ones of an edge or a partial slot");
  static_assert(kPairs >= kMaxTopk + kStep, "a step fits behind the K best");
  static_assert(kWords < 1 << 16, "counts of slots share a word");
};

// 64 KiB and three CTAs an SM, best for long rows; 40 KiB and four, best up to 10240 columns.
using LongRows = Config<256, 4, 16384, 3, 10240>;
using ShortRows = Config<256, 2, 10240, 4, 10240>;
// Merges are few, and take more registers.
using Merges = Config<256, 4, 16384, 2, 10240>;

// Partial selections: [slots, stride] ranks and keys, ascending keys; a rank of 0 is no entry.
struct Candidates {
  std::uint32_t* ranks;
  std::int32_t* keys;
};

// Where a task's result goes: topk entries, the live ones first.
struct Output {
  Candidates partial;  // null when the result is final
  std::int32_t* indices;
  float* scores;  // or null
};

template <typename Config>
struct SharedStorage {
  alignas(16) std::uint32_t words[Config::kWords];  // dense ranks; or kPairs ranks, kPairs columns
  alignas(16) std::uint32_t bins[Config::kBins];    // histogram; staging of up to K results
  std::uint32_t list[Config::kList];
  alignas(16) std::uint32_t warp_sum[2][Config::kWarps];
  std::uint32_t warp_max[Config::kWarps];
  std::uint32_t warp_min[Config::kWarps];
  Output output;  // of the task; kept here to spare registers
  std::uint32_t bin, above, in_bin, listed, threshold, equal;
  std::int32_t first_task, tasks;  // of the launch
  std::int32_t ticket;
};

struct KernelParams {
  const RowPlan* rows;
  const ChunkBegin* chunk;  // of this launch, and the next entry
  Tickets* tickets;
  const Task* tasks;
  const std::int32_t* merges;
  const float* scores;  // of the chunk

  Candidates slots;               // of the chunk's segments
  Candidates kept;                // [block rows], of earlier windows
  std::int32_t candidate_stride;  // K, rounded up to a multiple of 4

  std::int32_t topk;
  std::int32_t* topk_indices;  // [block rows, K]
  float* topk_scores;          // [block rows, K] or null
};

}  // namespace flashdsa::indexer::sm90::select_pass
