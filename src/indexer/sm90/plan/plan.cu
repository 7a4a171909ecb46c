// Who does what: the tables of one block of rows and one window of keys.
//
//   plan_rows_kernel    one CTA, a thread per row group: the place of every row's scores, segments
//                       and candidate slots by running sums; where chunks begin
//   plan_chunk_kernel   a CTA per chunk, a thread per row group: score items, selection tasks, rows
//                       to merge
//
// A group's scores begin in chunk (offset / stride), where `stride` shares the window's scores
// evenly among as few chunks as needed; a chunk exceeds it by less than a group. Items cover what
// at least one row of the group sees: groups whose rows lie in several documents get several key
// ranges and nothing between them. They are sorted by key, so that CTAs running side by side share
// keys in second-level cache; their order within a chunk varies from run to run and no result shows
// it.

#include <cub/cub.cuh>

#include "core/cuda/check.h"
#include "indexer/sm90/plan/plan.h"
#include "indexer/sm90/plan/visible.cuh"

namespace flashdsa::indexer::sm90 {
namespace {

constexpr int kThreads = 1024;
constexpr int kBins = 2048;  // of the items' keys

// Raking, the default, would hold 32 sums a thread.
template <typename Sum>
using BlockScan = cub::BlockScan<Sum, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Sums over row groups.
struct Totals {
  int64_t floats;
  int32_t tasks, slots, merges;

  __device__ friend Totals operator+(Totals a, Totals b) {
    return {a.floats + b.floats, a.tasks + b.tasks, a.slots + b.slots, a.merges + b.merges};
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

// The visible keys of a group's rows, and the sums of its rows in the window.
template <int kGroupRows>
struct Group {
  KeyRange keys[kGroupRows];
  Totals sum{};

  __device__ __forceinline__ Group(const PlanParams& p, int group) {
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      const int row = group * kGroupRows + i;
      keys[i] = row < p.block.rows ? visible_keys(p.block, row) : KeyRange{};
    }
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) sum = sum + totals_of(row_in_window(p, keys[i]));
  }

  // The rows at their places, `before` being the sums of all groups before this one.
  __device__ __forceinline__ void write(const PlanParams& p, int group, Totals before) const {
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      RowPlan row = row_in_window(p, keys[i]);
      row.offset = before.floats;
      row.slot = before.slots;
      before = before + totals_of(row);
      const int at = group * kGroupRows + i;
      if (at < p.block.rows) p.tables.rows[at] = row;
    }
  }
};

__device__ void write_chunk(const PlanParams& p, int chunk, int group, Totals before) {
  p.tables.chunks[chunk] = {before.floats, group, before.tasks, before.slots, before.merges, 0, 0};
}

template <int kGroupRows>
__global__ void __launch_bounds__(kThreads, 1)
    plan_rows_kernel(const __grid_constant__ PlanParams p) {
  using Reduce = cub::BlockReduce<int64_t, kThreads>;
  using Scan = BlockScan<Totals>;
  __shared__ union {
    typename Reduce::TempStorage reduce;
    typename Scan::TempStorage scan;
  } s;
  __shared__ int64_t s_stride;
  __shared__ int s_used;
  __shared__ int s_chunk[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int groups = (p.block.rows + kGroupRows - 1) / kGroupRows;

  int64_t floats = 0;
  for (int g = thread; g < groups; g += kThreads) {
    floats += Group<kGroupRows>(p, g).sum.floats;
  }
  const int64_t total = Reduce(s.reduce).Sum(floats);
  if (thread == 0) {
    const int64_t used = max((total + p.chunk_stride - 1) / p.chunk_stride, int64_t{1});
    s_used = static_cast<int>(used);
    s_stride = max((total + used - 1) / used, int64_t{1});
    *p.tables.item_count = 0;
  }
  __syncthreads();

  Totals done{};
  int last_chunk = -1;  // of the groups before this step
  for (int first = 0; first < groups; first += kThreads) {
    const int group = first + thread;
    const Group<kGroupRows> mine(p, group);  // behind the last group: no rows
    Totals before, sum;
    Scan(s.scan).ExclusiveScan(
        mine.sum, before, Totals{}, [](Totals a, Totals b) { return a + b; }, sum);
    before = done + before;
    done = done + sum;
    // Groups without scores behind the last one that has some stay in its chunk.
    const int chunk = static_cast<int>(min(before.floats / s_stride, int64_t{s_used - 1}));
    s_chunk[thread] = chunk;
    __syncthreads();
    if (group < groups) {
      for (int c = (thread == 0 ? last_chunk : s_chunk[thread - 1]) + 1; c <= chunk; ++c) {
        write_chunk(p, c, group, before);
      }
      mine.write(p, group, before);
    }
    last_chunk = s_chunk[min(groups - first, kThreads) - 1];
    __syncthreads();
  }
  for (int c = last_chunk + 1 + thread; c <= p.chunks; c += kThreads) {
    write_chunk(p, c, groups, done);
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
      if (row < p.block.rows) plan = p.tables.rows[row];
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
      uint32_t high = low;
      for (int pass = 0; pass < kGroupRows;
           ++pass) {  // each pass adds a row at least, or none is left
#pragma unroll
        for (int i = 0; i < kGroupRows; ++i) {
          if (begin[i] <= high && end[i] > high && begin[i] >= low) high = end[i];
        }
      }
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

// The tasks and the merge of a planned row, `at` being the sums of all rows before it.
__device__ __forceinline__ void write_tasks(const PlanParams& p, int row, Totals mine, Totals at) {
  for (int s = 0; s < mine.tasks; ++s) p.tables.tasks[at.tasks + s] = {row, s};
  if (mine.merges != 0) p.tables.merges[at.merges] = row;
}

template <int kGroupRows>
__global__ void __launch_bounds__(kThreads, 1)
    plan_chunk_kernel(const __grid_constant__ PlanParams p) {
  using Scan = BlockScan<int>;
  using TaskScan = BlockScan<Totals>;
  __shared__ union {
    typename Scan::TempStorage scan;
    typename TaskScan::TempStorage tasks;
  } s;
  __shared__ int s_place[kBins];
  __shared__ int s_first;
  const int thread = static_cast<int>(threadIdx.x);
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
  Scan(s.scan).ExclusiveSum(own, own, items);
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

  Totals done{0, chunk.task, 0, chunk.merge};
  for (int first = chunk.group; first < end; first += kThreads) {
    const int group = first + thread;
    Totals row[kGroupRows], mine{};
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      const int at = group * kGroupRows + i;
      row[i] = group < end && at < p.block.rows ? totals_of(p.tables.rows[at]) : Totals{};
    }
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) mine = mine + row[i];
    Totals before, sum;
    TaskScan(s.tasks).ExclusiveScan(
        mine, before, Totals{}, [](Totals a, Totals b) { return a + b; }, sum);
    before = done + before;
    done = done + sum;
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      write_tasks(p, group * kGroupRows + i, row[i], before);
      before = before + row[i];
    }
    __syncthreads();
  }
}

}  // namespace

void launch_plan(const PlanParams& params, cudaStream_t stream) {
  const bool is_eight = params.group_rows == 8;
  const auto rows_kernel = is_eight ? plan_rows_kernel<8> : plan_rows_kernel<4>;
  rows_kernel<<<1, kThreads, 0, stream>>>(params);
  core::cuda::check_launch("plan_rows_kernel", dim3(1), kThreads, 0);
  const dim3 grid(static_cast<unsigned>(params.chunks));
  const auto chunk_kernel = is_eight ? plan_chunk_kernel<8> : plan_chunk_kernel<4>;
  chunk_kernel<<<grid, kThreads, 0, stream>>>(params);
  core::cuda::check_launch("plan_chunk_kernel", grid, kThreads, 0);
}

}  // namespace flashdsa::indexer::sm90
