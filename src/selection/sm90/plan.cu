// The selection plan (docs/selection_plan.md) on the device.
//
// G > 1: one CTA a group of G rows, kWarpsOfRow warps a row; each lane keeps its slots in
// registers.
//
//   registers: slots of the rows       shared: bits  [G][W words]   keys of a row in the window
//   ---------------------------------          before [W]           list places before a word
//   1 facts    row extent, first and last      list  [keys]         union, ascending
//              key, strictly ascending?        masks [chunks][rows] whose key it is
//   2 range?   of the runs G, G/2, .. 2: one range of keys small enough
//   3 count    where runs are left: bits, and the popcount of every run's OR, window by window;
//              nothing is written for runs whose union is too large
//   4 emit     of each run that pays: OR, scan, expansion into `list`, every slot's place in it
//              into `masks`; then both go out
//   5 items    staged at their first row; DeviceSelect closes the gaps between them
//
// The runs of a group are a binary heap: node 1 is the group, nodes 2n and 2n + 1 the halves of n,
// node G + r row r. Lane n of the first warp decides for node n; sets of nodes are words of bits.
//
// A window begins at the group's smallest key and is at most 32768 keys wide, so a group needs
// several only where its keys lie further apart.
//
// G = 1: one warp a row, extent and range only; all slots are read only where first and last key
// say that they may be a range.
//
// The slots fill most registers, hence loops of a few turns that are not unrolled.
//
// Nothing is ordered by an atomic: they compute maxima, sums and ORs. Nothing waits for the device.

#include <algorithm>
#include <cstddef>
#include <cub/cub.cuh>

#include "core/cuda/check.h"
#include "core/cuda/warp_rows.cuh"
#include "core/device.h"
#include "core/scratch.h"
#include "selection/backends.h"

namespace flashdsa::selection::sm90 {
namespace {

constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr int kMaxTopk = 2048;
constexpr int kMaxWindowWords = 1024;  // 4 KB of bits a row

template <int kGroup>
struct Config {
  static constexpr int kWarpsOfRow = kGroup == 2 ? 4 : 2;
  static constexpr int kThreads = 32 * kGroup * kWarpsOfRow;
  static constexpr int kCtasOfSm = kGroup == 2 ? 5 : 1024 / kThreads;  // 48, 64 registers
  static constexpr int kSlotsOfWarp = kMaxTopk / kWarpsOfRow;          // consecutive slots of a row
  static constexpr int kQuads = kSlotsOfWarp / (32 * 4);               // of a lane: four slots each
  static constexpr std::int64_t kUnionPercent = plan_union_percent(kGroup);
  static_assert(2 * kGroup <= 32, "a lane decides for each run");
};

// The kernel's parameters.
struct GroupParams {
  const std::int32_t* topk_indices;  // [T_q, K]
  std::int64_t row_stride;
  const std::int32_t* topk_length;  // [T_q] or null
  std::int64_t t_q;
  int topk;
  int t_k;
  bool aligned;  // every row begins at a multiple of 16 bytes
  int window_words;
  int list_room;  // the most keys of a union that pays, rounded up to 4
  PlanArrays plan;
  PlanItem* staged;  // [T_q], item at its first row, else rows = 0
};

struct SharedMemory {
  std::uint32_t* bits;    // [G][window_words]
  std::int32_t* list;     // [list_room]
  std::uint32_t* masks;   // [list_room / 32 + 1][G]
  std::uint16_t* before;  // [window_words]

  __host__ __device__ static std::size_t bytes(int group, int window_words, int list_room) {
    return (sizeof(std::uint32_t) * group + sizeof(std::uint16_t)) * window_words +
           sizeof(std::int32_t) * list_room + mask_words(group, list_room) * sizeof(std::uint32_t);
  }
  __host__ __device__ static std::size_t mask_words(int group, int list_room) {
    return static_cast<std::size_t>(group) * (list_room / 32 + 1);
  }
  __device__ SharedMemory(std::byte* memory, int group, int window_words, int list_room) {
    bits = reinterpret_cast<std::uint32_t*>(memory);
    list = reinterpret_cast<std::int32_t*>(bits + group * window_words);
    masks = reinterpret_cast<std::uint32_t*>(list + list_room);
    before = reinterpret_cast<std::uint16_t*>(masks + mask_words(group, list_room));
  }
};

// What the rows of a group are found to be.
template <int kGroup>
struct RowFacts {
  std::uint64_t last[kGroup];  // extent in the upper, the last counted key in the lower half
  std::int32_t first[kGroup];  // key of slot 0, or -1
  bool disorder[kGroup];       // not strictly ascending, or with holes

  __device__ int extent(int r) const { return static_cast<int>(last[r] >> 32); }
  __device__ int last_key(int r) const { return static_cast<int>(last[r]); }
  __device__ bool is_range(int r) const {
    return !disorder[r] && (extent(r) == 0 || last_key(r) - first[r] + 1 == extent(r));
  }
};

// A node of the heap of runs, and what holds for its rows.
struct Run {
  int first;  // row of the group
  int rows;   // that exist; 0: no such run
  int sum;    // of the rows' keys
  bool ascending;
  bool is_range;                 // one row or several, of a range small enough
  std::int32_t first_key, hull;  // of the range
};

template <int kGroup>
__device__ bool pays(std::int64_t keys, const Run& run) {
  return 100 * keys <= Config<kGroup>::kUnionPercent * run.sum;
}

template <int kGroup>
__device__ Run run_of(int node, int group_rows, const RowFacts<kGroup>& facts) {
  Run run{};
  const int size = kGroup >> (31 - __clz(node));
  run.first = node * size - kGroup;
  run.rows = max(min(size, group_rows - run.first), 0);
  run.ascending = run.is_range = true;
  std::int32_t low = INT32_MAX, high = -1;
#pragma unroll 1
  for (int r = run.first; r < run.first + run.rows; ++r) {
    run.ascending = run.ascending && !facts.disorder[r];
    run.is_range = run.is_range && facts.is_range(r);
    run.sum += facts.extent(r);
    if (facts.extent(r) == 0) continue;
    low = min(low, facts.first[r]);
    high = max(high, facts.last_key(r));
  }
  run.is_range = run.is_range && run.sum > 0;
  if (run.is_range) {
    run.first_key = low;
    run.hull = high - low + 1;
    run.is_range = run.rows == 1 || pays<kGroup>(run.hull, run);
  }
  return run;
}

// Whether a node above `node` is among `nodes`.
__device__ __forceinline__ bool is_inside(int node, unsigned nodes) {
  for (node /= 2; node > 0; node /= 2) {
    if ((nodes >> node & 1) != 0) return true;
  }
  return false;
}

// 0 <= number < limit
__device__ __forceinline__ bool is_within(int number, int limit) {
  return static_cast<unsigned>(number) < static_cast<unsigned>(limit);
}

// Four slots from `slot` on: keys, or -1 where a slot does not count.
__device__ __forceinline__ void load_quad(const GroupParams& p, const std::int32_t* slots, int slot,
                                          int length, std::int32_t (&key)[4]) {
  if (p.aligned && slot + 4 <= length) {
    const int4 quad = __ldg(reinterpret_cast<const int4*>(slots + slot));
    key[0] = quad.x, key[1] = quad.y, key[2] = quad.z, key[3] = quad.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = slot + i < length ? __ldg(slots + slot + i) : -1;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!is_within(key[i], p.t_k)) key[i] = -1;
  }
}

// Bits for words of shared memory: neighbours that go to one word take one atomic.
struct WordBits {
  std::uint32_t* words;
  int word = 0;
  std::uint32_t bits = 0;

  __device__ void add(int to, std::uint32_t bit) {
    if (to != word) flush();
    word = to;
    bits |= bit;
  }
  __device__ void flush() {
    if (bits != 0) atomicOr(words + word, bits);
    bits = 0;
  }
};

// One warp's slots of one row.
template <int kGroup>
struct RowSlots {
  std::int32_t key[Config<kGroup>::kQuads][4];

  // Part `part` of row t, which has no slots past T_q; a lane's quad i begins at its slot 128 i +
  // 4 lane. Returns the key in front of the part, or -1.
  __device__ std::int32_t load(const GroupParams& p, std::int64_t t, int part) {
    const std::int32_t* slots = p.topk_indices + t * p.row_stride;
    int length = t < p.t_q ? p.topk : 0;
    if (p.topk_length != nullptr && t < p.t_q) {
      length = min(max(__ldg(p.topk_length + t), 0), p.topk);
    }
    const int begin = part * Config<kGroup>::kSlotsOfWarp;
    const int slot = begin + 4 * static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < Config<kGroup>::kQuads; ++i) {
      load_quad(p, slots, slot + 128 * i, length, key[i]);
    }
    const std::int32_t previous = begin > 0 && begin <= length ? __ldg(slots + begin - 1) : -1;
    return is_within(previous, p.t_k) ? previous : -1;
  }

  // Adds part `part` to the facts of row r. `previous` is the key in front of it, or -1.
  __device__ void add_facts(RowFacts<kGroup>& facts, int r, int part, std::int32_t previous) const {
    const int begin = part * Config<kGroup>::kSlotsOfWarp;
    const int lane = threadIdx.x % 32;
    int extent = 0;
    std::int32_t last = 0;
    bool disorder = false;
#pragma unroll
    for (int i = 0; i < Config<kGroup>::kQuads; ++i) {
      // The first lane needs the last lane's key of the quads before.
      const std::int32_t around = __shfl_sync(kAllLanes, key[i][3], lane + 31);
      std::int32_t left = lane > 0 ? around : previous;
      previous = around;
      const int slot = begin + 128 * i + 4 * lane;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (key[i][j] >= 0) {
          // -1 is the largest unsigned number.
          const bool follows = static_cast<unsigned>(left) < static_cast<unsigned>(key[i][j]);
          disorder = disorder || (!follows && slot + j > 0);
          extent = slot + j + 1;
          last = key[i][j];
        }
        left = key[i][j];
      }
    }
    const auto most = static_cast<int>(__reduce_max_sync(kAllLanes, static_cast<unsigned>(extent)));
    if (extent == most && most > 0) {  // one lane
      atomicMax(reinterpret_cast<unsigned long long*>(&facts.last[r]),
                static_cast<unsigned long long>(extent) << 32 | static_cast<unsigned>(last));
    }
    if (__any_sync(kAllLanes, disorder) && lane == 0) facts.disorder[r] = true;
    if (begin == 0 && lane == 0) facts.first[r] = key[0][0];
  }

  // Whether quad i of an ascending row has no key in the window, which most quads of a group with
  // several windows have not.
  __device__ bool misses(int i, std::int32_t window, int words) const {
    const std::int32_t first = key[i][0], last = key[i][3];
    return first < 0 || first - window >= 32 * words || (last >= 0 && last < window);
  }

  // Sets the row's bits of the keys `window` .. `window` + 32 `words` - 1.
  __device__ void set_bits(std::uint32_t* bits, std::int32_t window, int words) const {
#pragma unroll
    for (int i = 0; i < Config<kGroup>::kQuads; ++i) {
      if (misses(i, window, words)) continue;
      WordBits out{bits};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = key[i][j] - window;
        if (key[i][j] >= 0 && is_within(at, 32 * words)) out.add(at / 32, 1u << (at % 32));
      }
      out.flush();
    }
  }

  // Sets the row's bits in the masks, `rows` words a chunk, for the keys of the window. `bits` are
  // those of the union.
  __device__ void set_masks(std::uint32_t* masks, int rows, const std::uint32_t* bits,
                            const std::uint16_t* before, std::int32_t window, int words) const {
#pragma unroll
    for (int i = 0; i < Config<kGroup>::kQuads; ++i) {
      if (misses(i, window, words)) continue;
      WordBits out{masks};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = key[i][j] - window;
        if (key[i][j] >= 0 && is_within(at, 32 * words)) {
          const std::uint32_t below = bits[at / 32] & ((1u << (at % 32)) - 1);
          const int place = before[at / 32] + __popc(below);
          out.add(place / 32 * rows, 1u << (place % 32));
        }
      }
      out.flush();
    }
  }
};

// Clears `words` words, a multiple of 4, from a multiple of 16 bytes on.
template <int kThreads>
__device__ __forceinline__ void clear(std::uint32_t* memory, int words) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < words / 4; i += kThreads) {
    reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
  }
}

// The keys that the bits of the group's rows stand for: `count` windows, one after the other.
struct Windows {
  std::int32_t begin;  // smallest key, rounded down to a word
  int words;           // of a window, a multiple of 4
  int count;

  __device__ std::int32_t window(int i) const { return begin + i * 32 * words; }
};

template <int kGroup>
__device__ Windows windows_of(const RowFacts<kGroup>& facts, int group_rows, int most_words) {
  std::int32_t low = INT32_MAX, high = -1;
#pragma unroll 1
  for (int r = 0; r < group_rows; ++r) {
    if (facts.disorder[r] || facts.extent(r) == 0) continue;
    low = min(low, facts.first[r]);
    high = max(high, facts.last_key(r));
  }
  Windows windows;
  windows.begin = low / 32 * 32;
  const auto words =
      static_cast<int>((static_cast<unsigned>(high - windows.begin) + 128) / 128 * 4);
  windows.words = min(words, most_words);
  windows.count = (words + windows.words - 1) / windows.words;
  return windows;
}

// A group's state in shared memory beside the large arrays.
template <int kGroup>
struct GroupState {
  RowFacts<kGroup> facts;
  Run runs[2 * kGroup];
  int union_keys[2 * kGroup];  // of the open runs
  unsigned open;               // runs whose unions are to be counted
  unsigned accepted;           // runs that may be one item
  unsigned unions;             // runs that become unions
  Windows windows;
};

// Lane n of a warp: run n from the facts, and what is left to count.
template <int kGroup>
__device__ void find_ranges(GroupState<kGroup>& s, int group_rows, int most_words) {
  const int node = static_cast<int>(threadIdx.x);
  Run run{};
  if (node > 0 && node < 2 * kGroup) s.runs[node] = run = run_of(node, group_rows, s.facts);
  const unsigned accepted =
      __ballot_sync(kAllLanes, run.rows == 1 || (run.rows > 1 && run.is_range));
  const unsigned open = __ballot_sync(kAllLanes, run.rows > 1 && run.ascending && run.sum > 0 &&
                                                     !run.is_range && !is_inside(node, accepted));
  if (node > 0) return;
  s.accepted = accepted;
  s.open = open;
  s.unions = 0;
  if (open != 0) s.windows = windows_of(s.facts, group_rows, most_words);
}

// Lane n of a warp: whether run n becomes a union.
template <int kGroup>
__device__ void find_unions(GroupState<kGroup>& s) {
  const int node = static_cast<int>(threadIdx.x);
  const bool good = (s.open >> node & 1) != 0 && pays<kGroup>(s.union_keys[node], s.runs[node]);
  const unsigned accepted = s.accepted | __ballot_sync(kAllLanes, good);
  const unsigned unions = __ballot_sync(kAllLanes, good && !is_inside(node, accepted));
  __syncwarp();  // all lanes have read s.accepted
  if (node > 0) return;
  s.accepted = accepted;
  s.unions = unions;
}

// Lane n of a warp: stages the item of run n, if it is one, and stores what holds for row n.
template <int kGroup>
__device__ void store_items(const GroupParams& p, const GroupState<kGroup>& s,
                            std::int64_t first_row, int group_rows) {
  const int node = static_cast<int>(threadIdx.x);
  if (node < group_rows) {
    p.plan.row_keys[first_row + node] = s.facts.extent(node);
    p.plan.row_first[first_row + node] = s.facts.first[node];
    p.staged[first_row + node].rows = 0;
  }
  __syncwarp();
  if ((s.accepted >> node & 1) == 0 || is_inside(node, s.accepted)) return;
  const Run& run = s.runs[node];
  PlanItem item{};
  item.first_row = static_cast<std::int32_t>(first_row) + run.first;
  item.rows = run.rows;
  if (run.is_range) {
    item.kind = ItemKind::kRange;
    item.keys = run.hull;
    item.first_key = run.first_key;
  } else if ((s.unions >> node & 1) != 0) {
    item.kind = ItemKind::kUnion;
    item.keys = s.union_keys[node];
  } else {
    item.kind = ItemKind::kSlots;
    item.keys = run.sum;  // the extent of the single row
  }
  p.staged[item.first_row] = item;
}

// Adds to union_keys [G] of every run the keys of its rows in the window. `bits` [G][words].
template <int kGroup>
__device__ void count_unions(const std::uint32_t* bits, int words, int* union_keys) {
  int count[kGroup] = {};
#pragma unroll 1
  for (int w = static_cast<int>(threadIdx.x); w < words; w += Config<kGroup>::kThreads) {
    std::uint32_t node[2 * kGroup];
#pragma unroll
    for (int r = 0; r < kGroup; ++r) node[kGroup + r] = bits[r * words + w];
#pragma unroll
    for (int n = kGroup - 1; n > 0; --n) {
      node[n] = node[2 * n] | node[2 * n + 1];
      count[n] += __popc(node[n]);
    }
  }
#pragma unroll
  for (int n = 1; n < kGroup; ++n) {
    const int sum = __reduce_add_sync(kAllLanes, count[n]);
    if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(&union_keys[n], sum);
  }
}

template <int kGroup>
using Scan = cub::BlockScan<int, Config<kGroup>::kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

// Makes of a run's bits [rows][words] of one window their union, in the place of the first row's
// bits, `before`, and the part of the list behind its first `keys`. Returns the keys so far.
template <int kGroup>
__device__ int expand_union(const SharedMemory& s, typename Scan<kGroup>::TempStorage& scan,
                            std::uint32_t* union_bits, int rows, std::int32_t window, int words,
                            int keys) {
  const int words_of_thread = (words + Config<kGroup>::kThreads - 1) / Config<kGroup>::kThreads;
  const int begin = static_cast<int>(threadIdx.x) * words_of_thread;
  const int end = min(begin + words_of_thread, words);
  int count = 0;
#pragma unroll 1
  for (int w = begin; w < end; ++w) {
    std::uint32_t bits = 0;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) bits |= union_bits[r * words + w];
    union_bits[w] = bits;
    count += __popc(bits);
  }
  int place = 0, total = 0;
  Scan<kGroup>(scan).ExclusiveSum(count, place, total);
  place += keys;
#pragma unroll 1
  for (int w = begin; w < end; ++w) {
    s.before[w] = static_cast<std::uint16_t>(place);
    for (std::uint32_t left = union_bits[w]; left != 0; left &= left - 1) {
      s.list[place++] = window + 32 * w + __ffs(static_cast<int>(left)) - 1;
    }
  }
  return keys + total;
}

// Copies `count` words out of shared memory.
template <int kThreads>
__device__ void store_words(std::uint32_t* to, const std::uint32_t* from, int count) {
  int done = 0;
  if (reinterpret_cast<std::uintptr_t>(to) % 16 == 0) {
    done = count / 4 * 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count / 4; i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  }
#pragma unroll 1
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) to[i] = from[i];
}

template <int kGroup>
__global__ void __launch_bounds__(Config<kGroup>::kThreads, Config<kGroup>::kCtasOfSm)
    plan_groups_kernel(const __grid_constant__ GroupParams p) {
  using C = Config<kGroup>;
  extern __shared__ __align__(16) std::byte s_memory[];
  __shared__ GroupState<kGroup> s_group;
  __shared__ typename Scan<kGroup>::TempStorage s_scan;
  const SharedMemory s(s_memory, kGroup, p.window_words, p.list_room);

  const int tid = static_cast<int>(threadIdx.x);
  const int r = tid / 32 / C::kWarpsOfRow;
  const std::int64_t first_row = std::int64_t{blockIdx.x} * kGroup;
  const int group_rows = static_cast<int>(min(std::int64_t{kGroup}, p.t_q - first_row));

  // 1: facts
  if (tid < kGroup) {
    s_group.facts.last[tid] = 0;
    s_group.facts.first[tid] = -1;
    s_group.facts.disorder[tid] = false;
  }
  if (tid < 2 * kGroup) s_group.union_keys[tid] = 0;
  RowSlots<kGroup> row;
  const std::int32_t previous =
      row.load(p, r < group_rows ? first_row + r : p.t_q, tid / 32 % C::kWarpsOfRow);
  __syncthreads();
  row.add_facts(s_group.facts, r, tid / 32 % C::kWarpsOfRow, previous);
  __syncthreads();

  // 2: range?
  if (tid < 32) find_ranges(s_group, group_rows, p.window_words);
  __syncthreads();

  // 3: count
  const Windows& windows = s_group.windows;
  if (s_group.open != 0) {
    for (int i = 0; i < windows.count; ++i) {
      clear<C::kThreads>(s.bits, kGroup * windows.words);
      __syncthreads();
      if (!s_group.facts.disorder[r]) {
        row.set_bits(s.bits + r * windows.words, windows.window(i), windows.words);
      }
      __syncthreads();
      count_unions<kGroup>(s.bits, windows.words, s_group.union_keys);
      __syncthreads();
    }
    if (tid < 32) find_unions(s_group);
    __syncthreads();
  }

  // 4: emit
  for (unsigned left = s_group.unions; left != 0; left &= left - 1) {
    const int node = __ffs(static_cast<int>(left)) - 1;
    const int first = s_group.runs[node].first, rows = s_group.runs[node].rows;
    const int mask_words = (s_group.union_keys[node] + 31) / 32 * rows;
    const bool is_mine = r >= first && r < first + rows;
    std::uint32_t* bits = s.bits + first * windows.words;
#pragma unroll 1
    for (int i = tid; i < mask_words; i += C::kThreads) s.masks[i] = 0;
    int keys = 0;
    for (int i = 0; i < windows.count; ++i) {
      if (windows.count > 1) {  // a single window still holds the bits that were counted
        clear<C::kThreads>(bits, rows * windows.words);
        __syncthreads();
        if (is_mine) {
          row.set_bits(bits + (r - first) * windows.words, windows.window(i), windows.words);
        }
        __syncthreads();
      }
      keys = expand_union<kGroup>(s, s_scan, bits, rows, windows.window(i), windows.words, keys);
      __syncthreads();
      if (is_mine) {
        row.set_masks(s.masks + (r - first), rows, bits, s.before, windows.window(i),
                      windows.words);
      }
      __syncthreads();
    }
    const std::int64_t t = first_row + first;
    store_words<C::kThreads>(reinterpret_cast<std::uint32_t*>(p.plan.lists + t * p.topk),
                             reinterpret_cast<const std::uint32_t*>(s.list), keys);
    store_words<C::kThreads>(p.plan.masks + t * kGroup * ((p.topk + 31) / 32), s.masks, mask_words);
    __syncthreads();
  }

  // 5: items
  if (tid < 32) store_items(p, s_group, first_row, group_rows);
}

// G = 1: an item a row.
__global__ void __launch_bounds__(core::cuda::kRowThreads)
    plan_rows_kernel(const __grid_constant__ PlanParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto topk = static_cast<int>(p.sizes.topk), t_k = static_cast<int>(p.t_k);
  for (std::int64_t t = core::cuda::first_row(); t < p.sizes.t_q; t += core::cuda::row_step()) {
    const std::int32_t* slots = p.topk_indices + t * p.topk_indices_row_stride;
    const int length =
        p.topk_length == nullptr ? topk : min(max(__ldg(p.topk_length + t), 0), topk);
    const int extent = core::cuda::row_extent(slots, length, t_k);
    std::int32_t first = -1;
    bool is_range = false;
    if (extent > 0) {
      first = __ldg(slots);
      is_range = is_within(first, t_k) && __ldg(slots + extent - 1) - first + 1 == extent;
    }
    if (is_range) {
      bool follow = true;
#pragma unroll 8
      for (int j = lane; j < extent; j += 32) follow = follow && __ldg(slots + j) == first + j;
      is_range = __all_sync(kAllLanes, follow);
    }
    if (lane > 0) continue;
    PlanItem item{};
    item.first_row = static_cast<std::int32_t>(t);
    item.rows = 1;
    item.kind = is_range ? ItemKind::kRange : ItemKind::kSlots;
    item.keys = extent;
    item.first_key = is_range ? first : 0;
    p.plan.items[t] = item;
    p.plan.row_first[t] = first;
    p.plan.row_keys[t] = extent;
    if (t == 0) *p.plan.item_count = static_cast<std::int32_t>(p.sizes.t_q);
  }
}

void launch_plan_rows(const PlanParams& params, cudaStream_t stream) {
  const dim3 grid = core::cuda::grid_of_warps(params.sizes.t_q);
  plan_rows_kernel<<<grid, core::cuda::kRowThreads, 0, stream>>>(params);
  core::cuda::check_launch("plan_rows_kernel", grid, core::cuda::kRowThreads, 0);
}

template <int kGroup>
void launch_plan_groups(const GroupParams& params, cudaStream_t stream) {
  const std::size_t shared = SharedMemory::bytes(kGroup, params.window_words, params.list_room);
  core::cuda::allow_shared_memory(reinterpret_cast<const void*>(plan_groups_kernel<kGroup>),
                                  "plan_groups_kernel", shared);
  const dim3 grid(static_cast<unsigned>((params.t_q + kGroup - 1) / kGroup));
  plan_groups_kernel<kGroup><<<grid, Config<kGroup>::kThreads, shared, stream>>>(params);
  core::cuda::check_launch("plan_groups_kernel", grid, Config<kGroup>::kThreads, shared);
}

struct IsItem {
  __device__ bool operator()(const PlanItem& item) const { return item.rows > 0; }
};

void build_groups(const PlanParams& params, const Runtime& runtime, cudaStream_t stream) {
  const auto select = [&](void* memory, std::size_t& bytes, PlanItem* staged) {
    core::cuda::check(
        cub::DeviceSelect::If(memory, bytes, staged, params.plan.items, params.plan.item_count,
                              params.sizes.t_q, IsItem{}, stream),
        "selecting the items of a plan");
  };
  std::size_t select_bytes = 0;
  select(nullptr, select_bytes, nullptr);
  PlanItem* staged = nullptr;
  std::byte* select_memory = nullptr;
  const auto layout = [&](core::Carver& carver) {
    staged = carver.take<PlanItem>(static_cast<std::size_t>(params.sizes.t_q));
    select_memory = carver.take<std::byte>(select_bytes);
  };
  core::Carver count;
  layout(count);
  const core::Scratch scratch(runtime, count.bytes(), params.device);
  core::Carver carver(scratch.data());
  layout(carver);

  const auto group = static_cast<int>(params.sizes.group);
  const auto topk = static_cast<int>(params.sizes.topk);
  GroupParams kernel{};
  kernel.topk_indices = params.topk_indices;
  kernel.row_stride = params.topk_indices_row_stride;
  kernel.topk_length = params.topk_length;
  kernel.t_q = params.sizes.t_q;
  kernel.topk = topk;
  kernel.t_k = static_cast<int>(params.t_k);
  kernel.aligned = reinterpret_cast<std::uintptr_t>(params.topk_indices) % 16 == 0 &&
                   params.topk_indices_row_stride % 4 == 0;
  kernel.window_words =
      static_cast<int>(std::min<std::int64_t>(kMaxWindowWords, (params.t_k + 127) / 128 * 4 + 4));
  kernel.list_room = static_cast<int>(group * topk * plan_union_percent(group) / 100 + 3) / 4 * 4;
  kernel.plan = params.plan;
  kernel.staged = staged;
  if (group == 8) {
    launch_plan_groups<8>(kernel, stream);
  } else if (group == 4) {
    launch_plan_groups<4>(kernel, stream);
  } else {
    launch_plan_groups<2>(kernel, stream);
  }
  select(select_memory, select_bytes, staged);
}

}  // namespace

std::string refusal(const PlanParams& params) {
  if (params.device.kind != DeviceKind::kCuda) return "the tensors are not on a CUDA device";
  return core::sm90_refusal(params.device.index);
}

void build_plan(const PlanParams& params, const Runtime& runtime) {
  const core::cuda::DeviceGuard guard(params.device.index);
  const auto stream = static_cast<cudaStream_t>(runtime.stream.handle);
  if (params.sizes.t_q == 0) {
    core::cuda::check(cudaMemsetAsync(params.plan.item_count, 0, sizeof(std::int32_t), stream),
                      "clearing a plan of no rows");
  } else if (params.sizes.group == 1) {
    launch_plan_rows(params, stream);
  } else {
    build_groups(params, runtime, stream);
  }
}

}  // namespace flashdsa::selection::sm90
