#include "indexer/sm90/schedule.h"

#include <algorithm>

#include "indexer/params.h"
#include "indexer/sm90/scores/launch.h"

namespace flashdsa::indexer::sm90 {
namespace {

constexpr std::int64_t kMostBlockRows = 65536;
constexpr std::int64_t kFewRows = 512;  // blocks of fewer rows leave the device idle
constexpr std::int64_t kLeastWindowKeys = 512;
constexpr std::int64_t kMostChunkFloats = std::int64_t{1} << 31;  // offsets in a chunk have 32 bits
// Longer spans share the loads of a query tile, and 4096 leaves a longer tail than 2048.
constexpr std::int64_t kMostSpanKeys = 2048;
constexpr std::int64_t kLeastSpanKeys = 256;
constexpr std::int64_t kFloatBytes = sizeof(float);
constexpr std::int64_t kTile = kTileKeys;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
std::int64_t round_up(std::int64_t a, std::int64_t b) { return divide_up(a, b) * b; }

// Equal parts of `total` of at most `most`, which are multiples of `step`.
std::int64_t even_part(std::int64_t total, std::int64_t most, std::int64_t step) {
  return round_up(divide_up(total, divide_up(total, most)), step);
}

// All scratch but the scores.
std::int64_t fixed_bytes(const Problem& problem, Schedule schedule) {
  schedule.chunk_floats = 0;
  core::Carver count;
  carve(count, problem, schedule);
  return static_cast<std::int64_t>(count.bytes());
}

// Two items for every multiprocessor, also of few rows.
std::int64_t span_keys(const Problem& problem, std::int64_t block_rows, std::int64_t window_keys) {
  const std::int64_t groups = block_rows / score_pass::group_rows(problem.heads);
  std::int64_t span = kMostSpanKeys;
  while (span > kLeastSpanKeys && groups * (window_keys / span) < 2 * problem.multiprocessors) {
    span /= 2;
  }
  return span;
}

// Fills the schedule's other fields for these blocks and windows.
Schedule with_chunks(const Problem& problem, std::int64_t block_rows, std::int64_t window_keys,
                     std::int64_t budget_bytes) {
  Schedule schedule{};
  schedule.block_rows = block_rows;
  schedule.window_keys = window_keys;
  schedule.windows = divide_up(problem.t_k, window_keys);
  schedule.span_keys = span_keys(problem, block_rows, window_keys);
  const std::int64_t most = block_rows * window_keys;
  const std::int64_t group = score_pass::group_rows(problem.heads) * window_keys;
  const std::int64_t left = (budget_bytes - fixed_bytes(problem, schedule)) / kFloatBytes;
  schedule.chunk_floats =
      std::clamp(std::min(left, kMostChunkFloats) / kTile * kTile, std::min(2 * group, most), most);
  // A chunk's last group may begin just before the stride.
  schedule.chunk_stride = schedule.chunk_floats == most ? most : schedule.chunk_floats - group;
  schedule.chunks = divide_up(most, schedule.chunk_stride);
  // Two segments for every multiprocessor, when a chunk has as few rows as that.
  schedule.segment_keys =
      std::max(kLeastSegmentKeys,
               round_up(divide_up(schedule.chunk_floats, 2 * problem.multiprocessors), kTile));
  return schedule;
}

// The scores should have three quarters of the budget, if they can use as much.
bool is_good(const Problem& problem, const Schedule& schedule, std::int64_t budget_bytes) {
  const std::int64_t most = schedule.block_rows * schedule.window_keys;
  const std::int64_t bytes = fixed_bytes(problem, schedule) + schedule.chunk_floats * kFloatBytes;
  return bytes <= budget_bytes &&
         schedule.chunk_floats >= std::min(most, budget_bytes / 4 * 3 / kFloatBytes);
}

}  // namespace

Schedule make_schedule(const Problem& problem, std::int64_t budget_bytes) {
  const std::int64_t group = score_pass::group_rows(problem.heads);
  const std::int64_t most_rows = even_part(problem.t_q, kMostBlockRows, group);
  for (const std::int64_t few : {kFewRows, group}) {
    for (std::int64_t windows = 1;; windows *= 2) {
      const std::int64_t keys = std::max(round_up(divide_up(problem.t_k, windows), kTile),
                                         std::min(kLeastWindowKeys, round_up(problem.t_k, kTile)));
      for (std::int64_t blocks = 1;; blocks *= 2) {
        const std::int64_t rows = std::min(
            most_rows, std::max(few, even_part(problem.t_q, divide_up(most_rows, blocks), group)));
        const Schedule schedule = with_chunks(problem, rows, keys, budget_bytes);
        if (is_good(problem, schedule, budget_bytes)) return schedule;
        if (rows <= few) break;
      }
      if (keys <= kLeastWindowKeys) break;
    }
  }
  return with_chunks(problem, group, std::min(kLeastWindowKeys, round_up(problem.t_k, kTile)),
                     budget_bytes);
}

Memory carve(core::Carver& carver, const Problem& problem, const Schedule& schedule) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::int64_t rows = schedule.block_rows, keys = schedule.window_keys;
  const std::int64_t groups = rows / score_pass::group_rows(problem.heads);
  const std::int64_t stride = candidate_stride(problem.topk);
  Memory m;
  m.tables.rows = carver.take<RowPlan>(size(rows));
  // A chunk's stride holds a group of the longest rows at least.
  m.tables.chunks = carver.take<ChunkBegin>(size(groups + 2));
  m.tables.tickets = carver.take<Tickets>(size(groups + 1));
  m.tables.item_count = carver.take<std::int32_t>(1);
  // Every item and every task covers keys of one row at least, and only one of a row's is short.
  m.tables.items = carver.take<Item>(size(rows * (keys / schedule.span_keys + 1)));
  m.tables.tasks = carver.take<Task>(size(rows * (keys / kLeastSegmentKeys + 1)));
  m.weights = carver.take<float>(size(rows * score_pass::padded_heads(problem.heads)));
  if (problem.packs_queries) {
    m.queries = carver.take<__nv_bfloat16>(size(rows * even_heads(problem.heads) * kIndexDim));
  }
  if (problem.packs_keys) m.keys = carver.take<__nv_bfloat16>(size(keys * kIndexDim));
  if (schedule.has_windows() || keys > kLeastSegmentKeys) {
    m.tables.merges = carver.take<std::int32_t>(size(rows));
    // A row of n > segment_keys scores has at most 2 n / segment_keys segments.
    std::int64_t slots = schedule.has_windows() ? rows : 0;
    if (keys > kLeastSegmentKeys) {
      slots += std::min<std::int64_t>(4 * problem.multiprocessors,
                                      2 * divide_up(rows * keys, kLeastSegmentKeys));
    }
    m.slots = {carver.take<std::uint32_t>(size(slots * stride)),
               carver.take<std::int32_t>(size(slots * stride))};
  }
  if (schedule.has_windows()) {
    m.kept = {carver.take<std::uint32_t>(size(rows * stride)),
              carver.take<std::int32_t>(size(rows * stride))};
  }
  m.scores = carver.take<float>(size(schedule.chunk_floats));
  return m;
}

}  // namespace flashdsa::indexer::sm90
