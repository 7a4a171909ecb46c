#pragma once

#include <cstdint>

#include "indexer/sm90/plan/tables.h"

namespace flashdsa::indexer::sm90::select_pass {

inline constexpr int kMaxTopk = 2048;
static_assert(kLeastSegmentKeys / 2 >= kMaxTopk + 2 * static_cast<int>(kTileKeys),
              "a segment's visible keys outnumber K");

// What a launch's tasks are: rows or segments of at most kShortColumns columns, longer ones among
// them, or candidates to merge.
enum class Tasks { kShortRows, kLongRows, kMerges };

// Sizes of a selection CTA. Its buffer holds either dense words, one a column, or pairs of a rank
// and its column.
template <Tasks kTasksArg>
struct Config {
  static constexpr Tasks kTasks = kTasksArg;
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / 32;
  // 49 KiB each. Merges are few, and take more registers.
  static constexpr int kCtasPerSm = kTasks == Tasks::kMerges ? 2 : 4;
  static constexpr int kVectors = 2;                     // 16-byte loads of a thread and step
  static constexpr int kStep = kThreads * kVectors * 4;  // columns of a step
  static constexpr int kWords = 10240;                   // of the buffer
  static constexpr int kPairs = kWords / 2;
  static constexpr int kBins = 2048;
  static constexpr int kBinBits = 11;
  static constexpr int kList = kThreads;  // members of a bin that are ranked directly
  // Twice as many for a long row take longer than what they spare.
  static constexpr int kSampleLog2 = 10;
  static constexpr int kSample = 1 << kSampleLog2;

  static_assert(kMaxTopk % kThreads == 0 && kMaxTopk <= kBins, "results are staged in the bins");
  static_assert(kWords > 2 * kMaxTopk + static_cast<int>(kTileKeys),
                "more live entries than K, behind dead ones of an edge or a partial slot");
  static_assert(kPairs >= kMaxTopk + kStep, "a step fits behind the K best");
  static_assert(kWords < 1 << 16, "counts of slots share a word");
};

// Columns, from a multiple of 4, of a row that is selected without streaming.
inline constexpr int kShortColumns = 8192;

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
