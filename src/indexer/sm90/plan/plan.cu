// Who does what: the tables of one block of rows and one window of keys.
//
//   plan_rows_kernel    a thread per row: the place of its scores, its segments, tasks, candidate
//                       slots and its merge by running sums; where chunks begin. A CTA sums the
//                       rows before its own for itself: there are few, and their metadata is short
//   plan_chunk_kernel   a CTA per chunk, a thread per row group: score items
//
// A group's scores begin in chunk (offset / stride), where `stride` shares the window's scores
// evenly among as few chunks as needed; a chunk exceeds it by less than a group. Items cover what
// at least one row of the group sees: groups whose rows lie in several documents get several key
// ranges and nothing between them. They are sorted by key, so that CTAs running side by side share
// keys in second-level cache; their order within a chunk varies from run to run and no result shows
// it.

#include <cub/cub.cuh>

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "core/cuda/ptx.cuh"
#include "indexer/sm90/plan/plan.h"
#include "indexer/sm90/plan/visible.cuh"

namespace flashdsa::indexer::sm90 {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 2048;  // of the items' keys

// Raking, the default, would hold 32 sums a thread.
template <typename Sum>
using BlockScan = cub::BlockScan<Sum, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Sums over rows.
struct Totals {
  int64_t floats;
  int32_t tasks, slots, merges;

  __device__ friend Totals operator+(Totals a, Totals b) {
    return {a.floats + b.floats, a.tasks + b.tasks, a.slots + b.slots, a.merges + b.merges};
  }
};

// Of the rows before a CTA's, and the scores of all rows.
struct Sums {
  Totals before;
  int64_t floats;

  __device__ friend Sums operator+(Sums a, Sums b) {
    return {a.before + b.before, a.floats + b.floats};
  }
};

// A row with the visible keys `all` in the window, without its place.
__device__ __forceinline__ RowPlan row_in_window(const PlanParams& p, KeyRange all) {
  RowPlan plan{};
  const uint32_t begin = max(all.begin, p.window_begin), end = min(all.end, p.window_end);
  if (!needs_scores(p.block, all) || begin >= end) return plan;
  plan.begin = begin;
  plan.end = end;
  plan.segments = static_cast<int32_t>((plan.pitch() + p.segment_keys - 1) / p.segment_keys);
  plan.kept = static_cast<int32_t>(min(begin - all.begin, static_cast<uint32_t>(p.block.topk)));
  plan.continues = all.end > p.window_end;
  return plan;
}

__device__ __forceinline__ Totals totals_of(const RowPlan& plan) {
  if (plan.begin == plan.end) return {};
  const int32_t merged = plan.is_merged();
  return {plan.pitch(), plan.segments, merged * plan.segments, merged};
}

__device__ void write_chunk(const PlanParams& p, int chunk, int group, Totals before) {
  p.tables.chunks[chunk] = {before.floats, group, before.tasks, before.slots, before.merges, 0, 0};
}

// The tasks and the merge of a planned row, `at` being the sums of all rows before it.
__device__ __forceinline__ void write_tasks(const PlanParams& p, int row, Totals mine, Totals at) {
  for (int s = 0; s < mine.tasks; ++s) p.tables.tasks[at.tasks + s] = {row, s};
  if (mine.merges != 0) p.tables.merges[at.merges] = row;
}

template <int kGroupRows>
__global__ void __launch_bounds__(kThreads, 1)
    plan_rows_kernel(const __grid_constant__ PlanParams p) {
  using Reduce = cub::BlockReduce<Sums, kThreads>;
  using Scan = BlockScan<Totals>;
  __shared__ union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  } s;
  __shared__ Totals s_before;
  __shared__ int64_t s_stride;
  __shared__ int s_used;
  const int thread = static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x) * kThreads, row = first + thread;
  const int rows = p.block.rows, groups = (rows + kGroupRows - 1) / kGroupRows;

  core::cuda::await_earlier_kernels();
  core::cuda::let_next_kernel_start();
  Sums own{};
#pragma unroll 4
  for (int r = thread; r < rows; r += kThreads) {
    const Totals totals = totals_of(row_in_window(p, visible_keys(p.block, r)));
    if (r < first) own.before = own.before + totals;
    own.floats += totals.floats;
  }
  const Sums sums = Reduce(s.reduce).Reduce(own, [](Sums a, Sums b) { return a + b; });
  if (thread == 0) {
    const int64_t used = max((sums.floats + p.chunk_stride - 1) / p.chunk_stride, int64_t{1});
    s_used = static_cast<int>(used);
    s_stride = max((sums.floats + used - 1) / used, int64_t{1});
    s_before = sums.before;
  }
  __syncthreads();

  RowPlan plan{};  // behind the last row: nothing
  if (row < rows) plan = row_in_window(p, visible_keys(p.block, row));
  const Totals mine = totals_of(plan);
  Totals at;
  Scan(s.scan).ExclusiveScan(mine, at, Totals{}, [](Totals a, Totals b) { return a + b; });
  at = s_before + at;
  // Groups without scores behind the last one that has some stay in its chunk.
  const auto chunk_of = [&](int64_t floats) {
    return static_cast<int>(min(floats / s_stride, int64_t{s_used - 1}));
  };
  const int64_t group_floats = __shfl_sync(0xFFFFFFFFu, at.floats, thread % 32 & ~(kGroupRows - 1));
  if (row >= rows) return;
  plan.offset = at.floats;
  plan.slot = at.slots;
  p.tables.rows[row] = plan;
  write_tasks(p, row, mine, at);
  if (row == 0) {
    write_chunk(p, 0, 0, Totals{});
    *p.tables.item_count = 0;
  }
  if (row % kGroupRows == kGroupRows - 1 || row == rows - 1) {
    // The group's last row: the chunks that begin behind the group.
    const Totals after = at + mine;
    const int next = row / kGroupRows + 1;
    const int last = next < groups ? chunk_of(after.floats) : p.chunks;
    for (int c = chunk_of(group_floats) + 1; c <= last; ++c) write_chunk(p, c, next, after);
  }
}

// The key ranges, in whole tiles, that at least one of a group's rows sees, ascending and disjoint.
template <int kGroupRows>
struct GroupKeys {
  uint32_t begin[kGroupRows], end[kGroupRows];

  __device__ GroupKeys(const PlanParams& p, int group) {
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      const int row = group * kGroupRows + i;
      RowPlan plan{};
      if (row < p.block.rows) plan = row_in_window(p, visible_keys(p.block, row));
      begin[i] = plan.first();
      end[i] = plan.first() + plan.pitch();
    }
  }

  template <typename Use>
  __device__ void for_spans(uint32_t span, Use use) const {
    for (uint32_t from = 0;;) {
      uint32_t low = ~0u;
#pragma unroll
      for (int i = 0; i < kGroupRows; ++i) {
        if (begin[i] >= from && begin[i] < end[i]) low = min(low, begin[i]);
      }
      if (low == ~0u) return;
      uint32_t high = low, before;
      do {
        before = high;
#pragma unroll
        for (int i = 0; i < kGroupRows; ++i) {
          if (begin[i] <= high && end[i] > high && begin[i] >= low) high = end[i];
        }
      } while (high != before);  // until no row makes the range longer
      for (uint32_t key = low; key < high; key += span) use(key, min(high - key, span));
      from = high;
    }
  }
};

// Tiles of an item: each math warpgroup takes as many.
__device__ __forceinline__ int32_t even_tiles(uint32_t keys) {
  constexpr uint32_t kPairKeys = 2 * kTileKeys;
  return static_cast<int32_t>((keys + kPairKeys - 1) / kPairKeys * 2);
}

template <int kGroupRows>
__global__ void __launch_bounds__(kThreads, 1)
    plan_chunk_kernel(const __grid_constant__ PlanParams p) {
  using Scan = BlockScan<int>;
  __shared__ typename Scan::TempStorage s_scan;
  __shared__ int s_place[kBins];
  __shared__ int s_first;
  const int thread = static_cast<int>(threadIdx.x);
  core::cuda::await_earlier_kernels();
  core::cuda::let_next_kernel_start();
  const ChunkBegin chunk = p.tables.chunks[blockIdx.x];
  const int end = p.tables.chunks[blockIdx.x + 1].group;
  const uint32_t bin_keys =
      max(p.span_keys, (p.window_end - p.window_begin + kBins - 1) / kBins + kTileKeys);
  const auto place_of = [&](uint32_t key) -> int& {
    return s_place[min((key - min(key, p.window_begin)) / bin_keys, kBins - 1u)];
  };

  for (int b = thread; b < kBins; b += kThreads) s_place[b] = 0;
  __syncthreads();
  for (int g = chunk.group + thread; g < end; g += kThreads) {
    GroupKeys<kGroupRows>(p, g).for_spans(
        p.span_keys, [&](uint32_t key, uint32_t) { atomicAdd(&place_of(key), 1); });
  }
  __syncthreads();
  constexpr int kOwn = kBins / kThreads;
  int own[kOwn], items;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = s_place[thread * kOwn + i];
  Scan(s_scan).ExclusiveSum(own, own, items);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) s_place[thread * kOwn + i] = own[i];
  if (thread == 0) {
    s_first = atomicAdd(p.tables.item_count, items);
    p.tables.chunks[blockIdx.x].item = s_first;
    p.tables.chunks[blockIdx.x].items = items;
    p.tables.tickets[blockIdx.x] = {};
  }
  __syncthreads();
  for (int g = chunk.group + thread; g < end; g += kThreads) {
    GroupKeys<kGroupRows>(p, g).for_spans(p.span_keys, [&](uint32_t key, uint32_t keys) {
      Item& item = p.tables.items[s_first + atomicAdd(&place_of(key), 1)];
      item = {g * kGroupRows, key, even_tiles(keys), 0};
    });
  }
}

}  // namespace

void launch_plan(const PlanParams& params, cudaStream_t stream) {
  const bool is_eight = params.group_rows == 8;
  const auto rows_kernel = is_eight ? plan_rows_kernel<8> : plan_rows_kernel<4>;
  const dim3 row_grid(static_cast<unsigned>((params.block.rows + kThreads - 1) / kThreads));
  core::cuda::launch_behind(rows_kernel, row_grid, kThreads, 0, stream, params);
  core::cuda::check_launch("plan_rows_kernel", row_grid, kThreads, 0);
  const dim3 grid(static_cast<unsigned>(params.chunks));
  const auto chunk_kernel = is_eight ? plan_chunk_kernel<8> : plan_chunk_kernel<4>;
  core::cuda::launch_behind(chunk_kernel, grid, kThreads, 0, stream, params);
  core::cuda::check_launch("plan_chunk_kernel", grid, kThreads, 0);
}

}  // namespace flashdsa::indexer::sm90
