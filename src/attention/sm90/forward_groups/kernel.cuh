// Sparse MLA attention, forward, on Hopper, for groups: the rows of neighbouring tokens with at
// most 32 heads, which select nearly the same keys.
//
//   S = softmax_scale q k,  P = softmax_j(S, and the sink),  out = sum_j P kv[i_j, :512]
//   lse = ln sum_j exp(S),  max_logits = max_j S
//
// Inputs and outputs: ForwardKernelParams. An item is a kUnion or kRange item of the plan
// (selection/plan_format.h), and a row of its tile a token and a head: up to 64. Keys: the list of
// a union, or consecutive numbers. kSlots items are passed over. A word of validity bits per token
// and 32 keys says which keys are the token's; the others have P = 0, like what is behind the last
// key, zero rows. Tile rows past the item's last repeat it and are not stored.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ...    Tile: 64 rows x 64 keys.
// Warpgroups                                                                       registers
//   0     producer: cp.async gather of 32-key slots into the ring, validity words        40
//   1     score: S, masks, online softmax, P; lse, max_logits                            152
//   2, 3  value: O = sum P V of value channels 0..255 and 256..511; out                  160
// The softmax is taken against a reference maximum that moves only when the true one outgrows it
// by 2^8; P and its sum share it, so the result is exact and O is almost never rescaled.
//
// A NaN or infinity in a value reaches every row of its item, because 0 * NaN is NaN. Where O of an
// item of several tokens is not finite, the value warps flag it. When the CTA has walked its items
// and one is flagged, it does the tokens of flagged items again, each alone over its own slots: the
// repair.
//
// Shared memory, bytes (D = 576 / 512): q 73728 / 65536, ring 147456 / 131072, P 8192, the rest
// 756, padded: 230400 / 205824. The ring consists of groups of eight keys, each block after block
// in the 128-byte swizzle: one copy is the K operand of S and, transposed, the V operand.
//
// Barriers; G is the most tokens of an item
//   kv_full[slot]   128 cp.async + G of 0   1 waits, parity 0     keys and validity words are there
//   kv_empty[slot]  8 warps of 2, 3;        0 waits, parity 1     O has read them, S before; 1 has
//                   4 G lanes of 1                                read the validity words
//   p_full          32 lanes of 1           2, 3 wait, parity 0   P and alpha are there
//   p_empty[half]   64 lanes of 2, 3        1 waits, parity 1     O has read this half of P (and
//                                                                 alpha, before)
//   inverse_full    32 lanes of 1           2, 3 wait, parity 0   the item's inverse is there
//   inverse_empty   256 threads of 2, 3     1 waits, parity 1     it has been read
//   walk_end        all threads             all wait, parity 0    the flags are there
// Named barrier kScoreQuery: 1 meets; q may be overwritten, it is there.
// Every lane that writes or reads alpha, an inverse or a validity word arrives itself: racecheck
// follows neither one lane's arrival for its warp nor named barriers of a part of the block.
//
// Rounded to BF16: P, as operand of the second product (its sum is not), and out. All else is FP32.
// S is summed in parts (kSums in config.h). The order of every sum is that of the item's keys.
#pragma once

#include <cmath>

#include "attention/sm90/forward_common.cuh"
#include "attention/sm90/forward_groups/config.h"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::forward_groups {

using namespace core::cuda;

inline constexpr int kScoreQuery = 1;  // named barrier

// ------------------------------------------------------------------------------ small things

// Query rows of one tile: `heads` heads of each of `tokens` neighbouring tokens. Tile row r is head
// r % heads of token r / heads; rows past the last repeat it.
struct Item {
  int64_t token;  // the first
  int tokens;
  int heads;
  selection::ItemKind kind;
  int keys;       // to look at, 0: no token has any
  int first_key;  // of a range
  int64_t index;  // in the plan

  __device__ __forceinline__ int rows() const { return tokens * heads; }
};

// The token of tile row `row` within its item.
__device__ __forceinline__ int token_of(const KernelParams& p, const Item& item, int row) {
  return min(row, item.rows() - 1) * p.inverse_heads >> 16;
}

__device__ __forceinline__ selection::PlanItem plan_item_at(const KernelParams& p, int64_t index) {
  const int4* from = reinterpret_cast<const int4*>(p.plan.items + index);
  const int4 low = __ldg(from);
  selection::PlanItem item{};
  item.first_row = low.x;
  item.rows = low.y;
  item.kind = static_cast<selection::ItemKind>(low.z);
  item.keys = low.w;
  item.first_key = __ldg(&p.plan.items[index].first_key);
  return item;
}

// The items of this CTA, one after the other, then the repairs; every warpgroup walks them alike.
class Walk {
 public:
  __device__ __forceinline__ explicit Walk(const KernelParams& p)
      : index_(blockIdx.x), count_(__ldg(p.plan.item_count)) {}

  template <typename Config>
  __device__ __forceinline__ bool next(const KernelParams& p, SharedStorage<Config>& shared,
                                       Item& item) {
    for (;; index_ += gridDim.x) {
      if (index_ >= count_) {
        if (is_repair_) return false;
        barrier_arrive(&shared.walk_end);
        barrier_wait(&shared.walk_end, 0);
        if (!__any_sync(kAllLanes, shared.repairs != 0)) return false;
        is_repair_ = true;
        index_ = blockIdx.x;
      }
      item.index = index_;
      item.heads = p.heads;
      const selection::PlanItem planned = plan_item_at(p, index_);
      if (planned.kind == selection::ItemKind::kSlots) {
        pass_over(p);
        continue;
      }
      if (is_repair_) {
        if (planned.rows == 1 || !is_flagged(p, index_)) continue;
        take_row(item, planned.first_row + repaired_, p.extents);
        if (++repaired_ < planned.rows) return true;
        repaired_ = 0;
      } else {
        item.token = planned.first_row;
        item.tokens = planned.rows;
        item.kind = planned.kind;
        item.keys = planned.keys;
        item.first_key = planned.first_key;
      }
      index_ += gridDim.x;
      return true;
    }
  }

 private:
  // To the last of the kSlots items from index_ on; a warp looks at 32 at a time.
  __device__ __forceinline__ void pass_over(const KernelParams& p) {
    for (;; index_ += 32 * int64_t{gridDim.x}) {
      const int64_t index = index_ + int64_t{threadIdx.x % 32 + 1} * gridDim.x;
      const bool stops =
          index >= count_ || plan_item_at(p, index).kind != selection::ItemKind::kSlots;
      const uint32_t lanes = __ballot_sync(kAllLanes, stops);
      if (lanes == 0) continue;
      index_ += int64_t{__ffs(static_cast<int>(lanes)) - 1} * gridDim.x;
      return;
    }
  }

  static __device__ __forceinline__ void take_row(Item& item, int64_t token,
                                                  const int32_t* extents) {
    item.token = token;
    item.tokens = 1;
    item.kind = selection::ItemKind::kSlots;
    item.keys = __ldg(extents + token);
    item.first_key = 0;
  }

  // Written by the value warps of this CTA.
  static __device__ __forceinline__ bool is_flagged(const KernelParams& p, int64_t index) {
    const auto* flags = reinterpret_cast<const volatile uint64_t*>(p.not_finite);
    return __any_sync(kAllLanes, flags[index] != 0);
  }

  int64_t index_;
  int64_t count_;
  bool is_repair_ = false;
  int repaired_ = 0;  // tokens of this item
};

template <typename Config>
__device__ __forceinline__ int tiles_of(const Item& item) {
  return (item.keys + Config::kTileKeys - 1) / Config::kTileKeys;
}

// Place in the ring, and the parity that the next wait for it uses.
template <typename Config>
struct RingPosition {
  int slot;
  uint32_t parity;

  __device__ __forceinline__ void advance(int slots) {
    slot += slots;
    if (slot == Config::kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// ------------------------------------------------------------------------------ producer

// This thread's share of a slot: piece `piece` of every block of keys `row` and `row` + 16, whose
// kv rows are key_a and key_b; -1 gives zeros. `to` is piece `piece` of key `row`, `kv` of row 0.
template <typename Config>
__device__ __forceinline__ void gather(uint32_t to, const char* kv, int64_t row_bytes, int key_a,
                                       int key_b, uint64_t policy) {
  const char* from_a = kv + max(key_a, 0) * row_bytes;
  const char* from_b = kv + max(key_b, 0) * row_bytes;
  const int bytes_a = key_a >= 0 ? 16 : 0, bytes_b = key_b >= 0 ? 16 : 0;
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) {
    cp_async_16(to + block * 1024, from_a + block * 128, bytes_a, policy);
    cp_async_16(to + 2 * Config::kGroupBytes + block * 1024, from_b + block * 128, bytes_b, policy);
  }
}

// The keys of an item: lane i of a warp reads key i of a slot.
template <typename Config>
class ItemKeys {
 public:
  __device__ __forceinline__ ItemKeys(const KernelParams& p, const Item& item)
      : entries_(item.kind == selection::ItemKind::kUnion
                     ? p.plan.lists + item.token * p.plan.topk
                     : p.topk_indices + item.token * p.topk_indices_row_stride) {}

  // What stands there; -1 behind the last.
  __device__ __forceinline__ int at(const Item& item, int slot, int lane) const {
    const int position = slot * Config::kSlotKeys + lane;
    if (position >= item.keys) return -1;
    if (item.kind == selection::ItemKind::kRange) return item.first_key + position;
    return __ldg(entries_ + position);
  }

 private:
  const int32_t* entries_;  // of items that are no range
};

// Bits 0..n-1, for any n.
__device__ __forceinline__ uint32_t bits_below(int n) {
  return n >= 32 ? ~0u : (1u << max(n, 0)) - 1;
}

// Which keys of an item count for its tokens: lane r of a warp makes the validity words of token r,
// slot after slot. A union's words are read four slots at a time, four ahead.
template <typename Config>
class ItemMasks {
 public:
  static constexpr int kAhead = 4;

  __device__ __forceinline__ ItemMasks(const KernelParams& p, const Item& item, int lane)
      : token_(min(lane, item.tokens - 1)) {
    if (item.kind == selection::ItemKind::kRange) {
      const int64_t token = item.token + token_;
      const int keys = __ldg(p.plan.row_keys + token);
      if (keys > 0) first_ = __ldg(p.plan.row_first + token) - item.first_key;
      end_ = first_ + keys;
    }
    next_ = read(p, item, 0, lane);
  }

  // Before slots first .. first + 3 of the item.
  __device__ __forceinline__ void advance(const KernelParams& p, const Item& item, int first,
                                          int lane) {
    words_ = next_;
    next_ = read(p, item, first + kAhead, lane);
  }

  // Of slot first + i, in which the keys with a bit in `keys` exist.
  __device__ __forceinline__ uint32_t word(const Item& item, int first, int i,
                                           uint32_t keys) const {
    if (item.kind == selection::ItemKind::kUnion) {
      return __shfl_sync(kAllLanes, words_, i * item.tokens + token_);
    }
    if (item.kind == selection::ItemKind::kSlots) return keys;
    const int at = (first + i) * Config::kSlotKeys;
    return bits_below(end_ - at) & ~bits_below(first_ - at);
  }

 private:
  // Lane i * tokens + r: the word of token r in slot first + i of a union.
  static __device__ __forceinline__ uint32_t read(const KernelParams& p, const Item& item,
                                                  int first, int lane) {
    if (item.kind != selection::ItemKind::kUnion) return 0;
    const int at = first * item.tokens + lane;
    if (at >= chunks(item.keys) * item.tokens) return 0;
    return __ldg(p.plan.masks + (item.token << p.group_log2) * chunks(p.plan.topk) + at);
  }

  static __device__ __forceinline__ int chunks(int keys) {
    return (keys + Config::kSlotKeys - 1) / Config::kSlotKeys;
  }

  int token_;
  uint32_t words_ = 0, next_;
  int first_ = 0, end_ = 0;  // of the token's part of a range, from the item's first key
};

// Gathers the items' keys and writes the validity words. Keys are read four slots ahead: one ahead
// costs a global load's latency every time.
template <typename Config>
__device__ __forceinline__ void produce(const KernelParams& p, SharedStorage<Config>& shared) {
  constexpr int kAhead = ItemMasks<Config>::kAhead;
  const int thread = threadIdx.x & 127, lane = thread & 31, row = thread >> 3, piece = thread & 7;
  const uint64_t policy = l2_keep_policy();
  const char* kv = reinterpret_cast<const char*>(p.kv) + piece * 16;
  const uint32_t to = shared_address(shared.ring) + (row >> 3) * Config::kGroupBytes +
                      (row & 7) * 128 + ((piece ^ (row & 7)) << 4);
  RingPosition<Config> ring{0, 1};

  Item item;
  for (Walk walk(p); walk.next(p, shared, item);) {
    const int slots = tiles_of<Config>(item) * Config::kTileSlots;
    const ItemKeys<Config> keys(p, item);
    int ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = keys.at(item, i, lane);
    ItemMasks<Config> masks(p, item, lane);

    for (int first = 0; first < slots; first += kAhead) {
      masks.advance(p, item, first, lane);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= slots) break;
        const bool counts = static_cast<unsigned>(ahead[i]) < static_cast<unsigned>(p.t_k);
        const uint32_t valid = masks.word(item, first, i, __ballot_sync(kAllLanes, counts));
        const int key = counts ? ahead[i] : -1;
        const int key_a = __shfl_sync(kAllLanes, key, row);
        const int key_b = __shfl_sync(kAllLanes, key, row + 16);
        ahead[i] = keys.at(item, first + i + kAhead, lane);

        barrier_wait(&shared.kv_empty[ring.slot], ring.parity);
        gather<Config>(to + ring.slot * Config::kSlotBytes, kv, p.kv_row_bytes, key_a, key_b,
                       policy);
        barrier_arrive_cp_async(&shared.kv_full[ring.slot]);
        if (thread < 1 << p.group_log2) {
          shared.valid[ring.slot][thread] = valid;
          barrier_arrive(&shared.kv_full[ring.slot]);
        }
        ring.advance(1);
      }
    }
  }
}

// ------------------------------------------------------------------------------ score

// What a score thread keeps of its two rows, lane / 4 and lane / 4 + 8 of the warp's 16.
struct Softmax {
  float reference[2] = {-INFINITY, -INFINITY};  // scaled, log2 units
  float top[2] = {-INFINITY, -INFINITY};        // the true maximum, unscaled; NaN stays
  float sum[2] = {0.f, 0.f};                    // of this lane's columns
  uint32_t seen[2] = {0, 0};                    // not 0: a key counted, in lanes 0 (mod 4)
};

// The item's query rows into shared memory, all of them in flight at once: loads through registers
// would wait for the memory several times. A thread copies piece `piece` of every block of four
// rows.
template <typename Config>
__device__ __forceinline__ void load_query(const KernelParams& p, SharedStorage<Config>& shared,
                                           const Item& item) {
  const int thread = threadIdx.x & 127, first_row = thread >> 3, piece = thread & 7;
  const __nv_bfloat16* q = p.q + item.token * p.q_row_stride + piece * 8;
  const int64_t token_gap = p.q_row_stride - p.heads * p.q_head_stride;  // beyond the next head
  const uint32_t to = shared_address(shared.q) + first_row * 128 + ((piece ^ (first_row & 7)) << 4);

  named_sync(kScoreQuery, 128);
#pragma unroll
  for (int i = 0; i < Config::kRows; i += 16) {
    const int row = min(first_row + i, item.rows() - 1);
    const __nv_bfloat16* from = q + row * p.q_head_stride + token_of(p, item, row) * token_gap;
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      cp_async_16(to + block * Config::kBlockBytes + i * 128, from + block * 64, 16);
    }
  }
  cp_async_wait_all();
  fence_async_shared();
  named_sync(kScoreQuery, 128);
}

// Issues S = q k of one tile, in parts; `keys` is its operand. Issuing blocks the warp for about as
// long as the products take.
template <typename Config>
__device__ __forceinline__ void issue_scores(float (&sums)[Config::kSums][32], uint64_t query,
                                             uint64_t keys) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kBlocks * 4; ++i) {
    const uint64_t a = query + (((i >> 2) * Config::kBlockBytes + (i & 3) * 32) >> 4);
    const uint64_t b = keys + (((i >> 2) * 1024 + (i & 3) * 32) >> 4);
    Wgmma<64>::shared(sums[i / Config::kStepsPerSum], a, b, i % Config::kStepsPerSum != 0);
  }
  wgmma_commit();
}

// Sum 0 += the others.
template <int kSums>
__device__ __forceinline__ void add_sums(float (&sums)[kSums][32]) {
  wgmma_pin(sums[0]);
#pragma unroll
  for (int n = 1; n < kSums; ++n) {
    wgmma_pin(sums[n]);
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[0][i] += sums[n][i];
  }
}

// The validity words of the tile from `slot` on: lane i << group_log2 | token has that of slot i.
template <typename Config>
__device__ __forceinline__ uint32_t take_validity(const KernelParams& p,
                                                  SharedStorage<Config>& shared, int slot) {
  const int lane = threadIdx.x & 31;
  if (lane >= Config::kTileSlots << p.group_log2) return 0;
  const int from = slot + (lane >> p.group_log2), token = lane & ((1 << p.group_log2) - 1);
  const uint32_t word = shared.valid[from][token];
  barrier_arrive(&shared.kv_empty[from]);
  return word;
}

// Of take_validity's words those of one token, shifted to this lane's first column.
template <typename Config>
__device__ __forceinline__ void validity_of(const KernelParams& p, uint32_t words_of_tile,
                                            int token, uint32_t (&words)[Config::kTileSlots]) {
#pragma unroll
  for (int i = 0; i < Config::kTileSlots; ++i) {
    words[i] =
        __shfl_sync(kAllLanes, words_of_tile, i << p.group_log2 | token) >> (2 * (threadIdx.x & 3));
  }
}

// Row `half` of this lane (see Softmax) of one tile, whose validity words are `words`. Gives P as
// BF16 pairs and returns alpha.
__device__ __forceinline__ float softmax_row(Softmax& softmax, int half, float (&s)[32],
                                             const uint32_t (&words)[2], float scale_log2e,
                                             uint32_t (&pairs)[2][8]) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * i + 2 * half + e];
      if (((words[i >> 2] >> (8 * (i & 3) + e)) & 1) == 0) x = -INFINITY;
      top = max_keep_nan(top, x);
    }
  }
  top = max_keep_nan(top, __shfl_xor_sync(kAllLanes, top, 1));
  top = max_keep_nan(top, __shfl_xor_sync(kAllLanes, top, 2));
  softmax.top[half] = max_keep_nan(softmax.top[half], top);
  softmax.seen[half] |= words[0] | words[1];

  float alpha = 1.f;
  const float scaled = top * scale_log2e;
  if (scaled > softmax.reference[half] + kMaximumSlack) {
    alpha = exp2_fast(softmax.reference[half] - scaled);
    softmax.reference[half] = scaled;
    softmax.sum[half] *= alpha;
  }
  // While every logit is -inf, subtracting it would make NaN of a weight of zero.
  const float reference = softmax.reference[half] == -INFINITY ? 0.f : softmax.reference[half];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = exp2_fast(fmaf(s[4 * i + 2 * half], scale_log2e, -reference));
    const float b = exp2_fast(fmaf(s[4 * i + 2 * half + 1], scale_log2e, -reference));
    softmax.sum[half] += a + b;
    pairs[i >> 2][2 * (i & 3) + half] = pack_bf16(a, b);
  }
  return alpha;
}

// P and alpha into shared memory, each half as soon as the value warps have read the last one.
template <typename Config>
__device__ __forceinline__ void store_probabilities(SharedStorage<Config>& shared,
                                                    const uint32_t (&pairs)[2][8],
                                                    const float (&alpha)[2], uint32_t parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  const int row = warp * 16 + (lane & 15);  // whose 16 bytes this lane addresses
  const uint32_t to = shared_address(shared.p) + row * 128;
  const auto piece = [&](int index) { return to + ((index ^ (row & 7)) << 4); };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    barrier_wait(&shared.p_empty[half], parity);
    const int first = half * 4 + (lane >> 4);
    const uint32_t(&pair)[8] = pairs[half];
    stmatrix_x4(piece(first), pair[0], pair[1], pair[2], pair[3]);
    stmatrix_x4(piece(first + 2), pair[4], pair[5], pair[6], pair[7]);
  }
  fence_async_shared();
  __syncwarp();
  if ((lane & 3) == 0) {
    const int alpha_row = warp * 16 + (lane >> 2);
    shared.alpha[alpha_row] = alpha[0];
    shared.alpha[alpha_row + 8] = alpha[1];
    barrier_arrive(&shared.p_full);
  }
}

// lse and max_logits of the item, and the inverse for the value warps. A row without keys has a
// maximum of -inf and a sum of zero.
template <typename Config>
__device__ __forceinline__ void finish_rows(const KernelParams& p, SharedStorage<Config>& shared,
                                            const Item& item, Softmax& softmax, uint32_t parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    softmax.sum[half] += __shfl_xor_sync(kAllLanes, softmax.sum[half], 1);
    softmax.sum[half] += __shfl_xor_sync(kAllLanes, softmax.sum[half], 2);
  }
  barrier_wait(&shared.inverse_empty, parity);
  if ((lane & 3) == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + (lane >> 2) + 8 * half;
      const int head = row - token_of(p, item, row) * item.heads;
      const bool live = row < item.rows();
      const float sum = softmax.sum[half], reference = softmax.reference[half];
      const float sink =
          live && p.attn_sink != nullptr ? __ldg(p.attn_sink + head) * kLog2E : -INFINITY;
      shared.inverse[row] =
          softmax.seen[half] == 0 ? 0.f : inverse_denominator(sum, reference, sink);
      if (live) {
        const int64_t at = item.token * p.heads + row;
        p.lse[at] = (reference + log2f(sum)) * kLn2;
        if (p.max_logits != nullptr) p.max_logits[at] = softmax.top[half] * p.softmax_scale;
      }
    }
    barrier_arrive(&shared.inverse_full);
  }
}

template <typename Config>
__device__ __forceinline__ void score(const KernelParams& p, SharedStorage<Config>& shared) {
  const uint64_t query = wgmma_descriptor(shared_address(shared.q), 16, 1024);
  const uint64_t ring_keys = wgmma_descriptor(shared_address(shared.ring), 16, Config::kGroupBytes);
  float sums[Config::kSums][32] = {};
  RingPosition<Config> ring{0, 0};
  uint32_t p_parity = 1, inverse_parity = 1;

  Item item;
  for (Walk walk(p); walk.next(p, shared, item);) {
    const int tiles = tiles_of<Config>(item);
    const int row = (threadIdx.x & 127) / 32 * 16 + (threadIdx.x & 31) / 4;
    const int tokens[2] = {token_of(p, item, row), token_of(p, item, row + 8)};
    Softmax softmax;
    if (tiles > 0) load_query(p, shared, item);
    for (int tile = 0; tile < tiles; ++tile) {
      barrier_wait(&shared.kv_full[ring.slot], ring.parity);
      barrier_wait(&shared.kv_full[ring.slot + 1], ring.parity);
      fence_async_shared();
      const uint32_t words_of_tile = take_validity(p, shared, ring.slot);
      issue_scores<Config>(sums, query, ring_keys + ring.slot * (Config::kSlotBytes >> 4));
      ring.advance(Config::kTileSlots);
      wgmma_wait<0>();
      float(&s)[32] = sums[0];
      add_sums(sums);

      uint32_t pairs[2][8];
      float alpha[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[Config::kTileSlots];
        validity_of<Config>(p, words_of_tile, tokens[half], words);
        alpha[half] = softmax_row(softmax, half, s, words, p.softmax_scale_log2e, pairs);
      }
      store_probabilities(shared, pairs, alpha, p_parity);
      p_parity ^= 1;
    }
    finish_rows(p, shared, item, softmax, inverse_parity);
    inverse_parity ^= 1;
  }
}

// ------------------------------------------------------------------------------ value

// Channels 8i + 2 (lane % 4) + {0, 1} of rows lane / 4 + {0, 8} lie in [4i + {0, 1}], [4i + {2,
// 3}]. Two accumulators: with 512 threads the compiler refuses products of 256 columns.
struct Output {
  float low[64];   // channels 0..127 of the warpgroup's half
  float high[64];  // channels 128..255

  __device__ __forceinline__ float at(int index) const {
    return index < 64 ? low[index & 63] : high[index & 63];
  }
};

__device__ __forceinline__ void scale_rows(float (&d)[64], float alpha_0, float alpha_1) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    d[4 * i] *= alpha_0;
    d[4 * i + 1] *= alpha_0;
    d[4 * i + 2] *= alpha_1;
    d[4 * i + 3] *= alpha_1;
  }
}

// Multiplies O by the tile's alpha where a row of the warp needs it; `row` is this thread's first.
template <typename Config>
__device__ __forceinline__ void rescale(Output& o, const SharedStorage<Config>& shared, int row,
                                        int lane) {
  const volatile float* alpha = shared.alpha + row;
  float alpha_0 = 1.f, alpha_1 = 1.f;
  if ((lane & 3) == 0) alpha_0 = alpha[0], alpha_1 = alpha[8];
  alpha_0 = __shfl_sync(kAllLanes, alpha_0, lane & ~3);
  alpha_1 = __shfl_sync(kAllLanes, alpha_1, lane & ~3);
  if (__any_sync(kAllLanes, alpha_0 != 1.f || alpha_1 != 1.f)) {
    scale_rows(o.low, alpha_0, alpha_1);
    scale_rows(o.high, alpha_0, alpha_1);
  }
}

// O += P V of one slot's 32 keys.
template <typename Config>
__device__ __forceinline__ void issue_values(Output& o, uint64_t probabilities, uint64_t values) {
#pragma unroll
  for (int step = 0; step < Config::kSlotKeys / 16; ++step) {
    const uint64_t a = probabilities + (step * 32 >> 4);
    const uint64_t b = values + (step * 2 * Config::kGroupBytes >> 4);
    Wgmma<128>::template shared<0, 1>(o.low, a, b, 1);
    Wgmma<128>::template shared<0, 1>(o.high, a, b + (2 * 1024 >> 4), 1);
  }
  wgmma_commit();
}

// Whether an element is infinite or NaN: of a key that some token of the item did not select, too,
// because its P of 0 times that is NaN.
__device__ __forceinline__ bool is_not_finite(const Output& o) {
  float zeros[4] = {};
#pragma unroll
  for (int i = 0; i < 128; ++i) zeros[i % 4] = fmaf(o.at(i), 0.f, zeros[i % 4]);
  return zeros[0] + zeros[1] + zeros[2] + zeros[3] != 0.f;
}

// This warpgroup's 256 channels of the item's rows, each times its inverse denominator.
template <typename Config>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item,
                                             const Output& o, const float (&inverse)[2], int row,
                                             int first_channel) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = item.token * p.heads + row + 8 * half;
    __nv_bfloat16* to = p.out + at * Config::kValueDim + first_channel + 8 * (lane & 3);
    const bool live = row + 8 * half < item.rows();
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int index = 4 * (i + e) + 2 * half;
        words[e] = pack_bf16(o.at(index) * inverse[half], o.at(index + 1) * inverse[half]);
      }
      transpose_quad(words, lane);  // lane j of four holds channels 8 (i + j) .. + 7
      if (live) store_16_bytes(to + 8 * i, words, p.out_aligned);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void value(const KernelParams& p, SharedStorage<Config>& shared,
                                      int side) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int row = (thread >> 5) * 16 + (lane >> 2);
  const uint64_t probabilities = wgmma_descriptor(shared_address(shared.p), 16, 1024);
  const uint64_t ring_values =
      wgmma_descriptor(shared_address(shared.ring) + side * 4096, 1024, Config::kGroupBytes);
  constexpr int kSlotStep = Config::kSlotBytes >> 4, kHalfStep = Config::kSlotKeys * 2 >> 4;
  int slot = 0;

  uint32_t p_parity = 0, inverse_parity = 0;
  Item item;
  for (Walk walk(p); walk.next(p, shared, item);) {
    const int tiles = tiles_of<Config>(item);
    Output o = {};
    for (int tile = 0; tile < tiles; ++tile) {
      barrier_wait(&shared.p_full, p_parity);
      p_parity ^= 1;
      fence_async_shared();
      if (tile > 0) rescale(o, shared, row, lane);
      const uint64_t values = ring_values + slot * kSlotStep;
      wgmma_fence();
      issue_values<Config>(o, probabilities, values);
      issue_values<Config>(o, probabilities + kHalfStep, values + kSlotStep);
      wgmma_wait<1>();
      warp_arrive(&shared.kv_empty[slot], lane);
      if ((lane & 3) == 0) barrier_arrive(&shared.p_empty[0]);
      wgmma_wait<0>();
      wgmma_pin(o.low);
      wgmma_pin(o.high);
      warp_arrive(&shared.kv_empty[slot + 1], lane);
      if ((lane & 3) == 0) barrier_arrive(&shared.p_empty[1]);
      slot = slot + Config::kTileSlots == Config::kSlots ? 0 : slot + Config::kTileSlots;
    }
    barrier_wait(&shared.inverse_full, inverse_parity);
    inverse_parity ^= 1;
    const volatile float* inverses = shared.inverse + row;
    const float inverse[2] = {inverses[0], inverses[8]};
    barrier_arrive(&shared.inverse_empty);
    if (item.tokens > 1) {
      const bool flag = __any_sync(kAllLanes, is_not_finite(o));
      uint8_t* flags = p.not_finite + item.index * kValueWarps;
      if (lane == 0) flags[side * 4 + (thread >> 5)] = flag;
      if (lane == 0 && flag) atomicOr(&shared.repairs, 1u);
    }
    store_output<Config>(p, item, o, inverse, row, side * 256);
  }
}

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init(SharedStorage<Config>& shared, int group_log2) {
  for (int slot = 0; slot < Config::kSlots; ++slot) {
    barrier_init(&shared.kv_full[slot], 128 + (1 << group_log2));
    barrier_init(&shared.kv_empty[slot], kValueWarps + (4 << group_log2));
  }
  barrier_init(&shared.p_full, 32);
  for (int half = 0; half < Config::kTileSlots; ++half) barrier_init(&shared.p_empty[half], 64);
  barrier_init(&shared.inverse_full, 32);
  barrier_init(&shared.inverse_empty, 256);
  barrier_init(&shared.walk_end, Config::kThreads);
  shared.repairs = 0;
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_forward_groups_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) init(shared, p.group_log2);
  __syncthreads();

  const int warpgroup = threadIdx.x >> 7;
  if (warpgroup == 0) {
    shrink_registers<Config::kProducerRegisters>();
    produce(p, shared);
  } else if (warpgroup == 1) {
    grow_registers<Config::kScoreRegisters>();
    score(p, shared);
  } else {
    grow_registers<Config::kValueRegisters>();
    value(p, shared, warpgroup - 2);
  }
}

}  // namespace flashdsa::attention::sm90::forward_groups
