// Sparse MLA attention, forward, on Hopper, in tiles of 64 query rows, each a token and a head.
//
//   S = softmax_scale q k,  P = softmax_j(S, and the sink),  out = sum_j P kv[i_j, :512]
//   lse = ln sum_j exp(S),  max_logits = max_j S
//
// Inputs and outputs: ForwardKernelParams. An item is, above 32 heads, one token and up to 64 of
// its heads, over the token's slots. Of groups it is a kUnion or kRange item of the plan
// (selection/plan_format.h): neighbouring tokens that select nearly the same keys, with all of
// their heads, over the list of a union or consecutive keys; kSlots items are passed over. Slots
// without a key are zero rows. A validity word per token and 32 keys says which keys are the
// token's; the others have P = 0. Tile rows past the item's last repeat it and are not stored.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ...    Tile: 64 rows x 64 keys.
// Warpgroups                                                                          registers
//   0     consumer, side 0: tiles of ring stage 0; value channels 0..255                224
//   1     consumer, side 1: tiles of ring stage 1; value channels 256..511              224
//   2     producer: cp.async gather of q and of tiles, validity words                   56
//
// The tiles of all items, counted through, belong to the sides in turn. The owner of a tile makes S
// and P. Its own half of O += P V takes P from registers, the other side's takes P from shared
// memory. A side in the softmax leaves the tensor cores to the other one: in tile n (own; n - 1 and
// n + 1 are the other's) a side does
//
//   S(n) of tail and own half | O += P(n-1) V(n-1) | S(n) of the other half | softmax(n) |
//   O += P(n) V(n)
//
// so that S(n) is half made when P(n-1) arrives, and V(n-1) is free soon afterwards.
//
// The softmax is taken against a reference maximum, one for both sides, that moves in tile order
// and only when the true maximum outgrows it by 2^8; P, O and the sums share it.
//
// A NaN or infinity in a value reaches every row of its item, because 0 * NaN is NaN. Where O of an
// item of several tokens is not finite, the consumers flag it. When the CTA has walked its items
// and one is flagged, it does the tokens of flagged items again, each alone over its own slots: the
// repair.
//
// Shared memory, bytes (D = 576 / 512): q 73728 / 65536, ring 2 x 73728 / 65536, P 8192, the rest
// 3072: 232448, the limit of an SM, / 207872. Channels of q and of a tile come in three parts: the
// tail (above 511; may be empty), and the halves of the sides. A part consists of blocks of 64 rows
// x 64 channels in the 128-byte swizzle: a block of keys is the K operand of S and, transposed, the
// V operand.
//
// Barriers; W = 2 of rows alone, twice the most tokens of an item of groups
//   q_full[part]           128 cp.async       consumers, parity 0   a part of the item's q is there
//   q_empty                8 warps            producer, parity 1    the item's last S is made
//   kv_full[stage][part]   128 cp.async,      owner, parity 0       a part of the tile is there,
//                          tail: W more                             tail: and its validity words
//   kv_empty[stage][tail]  4 W lanes of owner producer, parity 1    S is made, words are read
//   kv_empty[stage][half]  4 warps of half's  producer, parity 1    O has read it (S before)
//   p_full[side]           32 lanes of side   other side, parity 0  P, reference of side's tile
//   sums_full[side]        32 lanes of side   other side, parity 0  side's sums of the item
//   sums_empty[side]       32 lanes of other  side, parity 1        they are read
//   walk_end               all threads        all, parity 0         the flags are there
// P has one buffer and no barrier to say that it is empty: who writes P(n) has read P(n-1).
//
// Rounded to BF16: P, as operand of the second product (its sum is not), and out. All else is FP32.
// S is made of two sums: tail and half 0, and half 1. The order of every sum depends on the item's
// keys alone, whichever side owns its first tile.
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/sm90/forward_common.cuh"
#include "attention/sm90/forward_many_rows/config.h"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::forward_many_rows {

using namespace core::cuda;

// ------------------------------------------------------------------------------ small things

// The same number, of which the compiler knows nothing: what is computed from it is computed again
// instead of held in registers.
__device__ __forceinline__ int opaque(int number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Where the rows of an item lie: consecutive vectors (token, head), from head `first_head` of
// `token` on.
struct Place {
  int64_t token;
  int first_head;
  int rows;  // of the tile's 64
};

// One token's block of up to 64 heads.
struct RowItem {
  int index;  // token << head_blocks_log2 | block
  int keys;   // slots to look at, 0: the row has no key

  __device__ __forceinline__ Place place(const KernelParams& p) const {
    Place place;
    place.token = index >> p.head_blocks_log2;
    place.first_head = (index & ((1 << p.head_blocks_log2) - 1)) * 64;
    place.rows = min(p.heads - place.first_head, 64);
    return place;
  }
};

// The items of this CTA. The extent of the next one is read an item ahead.
class RowWalk {
 public:
  __device__ __forceinline__ RowWalk(const KernelParams& p, bool /*is_repair*/)
      : next_{static_cast<int>(blockIdx.x), extent_at(p, blockIdx.x)} {}

  __device__ __forceinline__ bool next(const KernelParams& p) {
    if (next_.index >= p.items) return false;
    item_ = next_;
    next_.index += gridDim.x;
    next_.keys = extent_at(p, next_.index);
    return true;
  }

  __device__ __forceinline__ RowItem item(const KernelParams& /*p*/) const { return item_; }

 private:
  static __device__ __forceinline__ int extent_at(const KernelParams& p, int index) {
    return index < p.items ? __ldg(p.extents + (index >> p.head_blocks_log2)) : 0;
  }

  RowItem item_{}, next_;
};

// All heads of neighbouring tokens; a repair's of one.
struct GroupItem {
  int index;  // in the plan
  int token;  // the first
  int tokens;
  selection::ItemKind kind;  // kSlots: of a repair
  int keys;                  // to look at
  int first_key;             // of a range

  __device__ __forceinline__ Place place(const KernelParams& p) const {
    return {token, 0, tokens * p.heads};
  }
};

// The unions and ranges of the plan that are this CTA's; of a repair the tokens of the flagged
// ones. Items are read again where they are needed, because registers are few.
class GroupWalk {
 public:
  __device__ __forceinline__ GroupWalk(const KernelParams& p, bool is_repair)
      : index_(static_cast<int>(blockIdx.x) - p.ctas), repaired_(is_repair ? kNoToken : kAll) {}

  __device__ __forceinline__ bool next(const KernelParams& p) {
    if (repaired_ >= 0 && ++repaired_ < item_at(p, index_).y) return true;
    const int count = __ldg(p.plan.item_count);
    while ((index_ += p.ctas) < count) {
      const int4 planned = item_at(p, index_);
      if (kind_of(planned) == selection::ItemKind::kSlots) {
        pass_over(p, count);
        continue;
      }
      if (repaired_ == kAll) return true;
      if (planned.y == 1 || !is_flagged(p, index_)) continue;
      repaired_ = 0;
      return true;
    }
    return false;
  }

  __device__ __forceinline__ GroupItem item(const KernelParams& p) const {
    const int index = opaque(index_);
    const int4 planned = item_at(p, index);
    GroupItem item;
    item.index = index;
    if (repaired_ >= 0) {
      item.token = planned.x + repaired_;
      item.tokens = 1;
      item.kind = selection::ItemKind::kSlots;
      item.keys = __ldg(p.extents + item.token);
    } else {
      item.token = planned.x;
      item.tokens = planned.y;
      item.kind = kind_of(planned);
      item.keys = planned.w;
      item.first_key = __ldg(&p.plan.items[index].first_key);
    }
    return item;
  }

 private:
  static constexpr int kAll = -1, kNoToken = -2;

  // First row, rows, kind and keys of an item.
  static __device__ __forceinline__ int4 item_at(const KernelParams& p, int index) {
    return __ldg(reinterpret_cast<const int4*>(p.plan.items + index));
  }
  static __device__ __forceinline__ selection::ItemKind kind_of(const int4& item) {
    return static_cast<selection::ItemKind>(item.z);
  }

  // To the last of the kSlots items from index_ on; a warp looks at 32 at a time.
  __device__ __forceinline__ void pass_over(const KernelParams& p, int count) {
    for (;; index_ += 32 * p.ctas) {
      const int index = index_ + static_cast<int>(threadIdx.x % 32 + 1) * p.ctas;
      const bool stops =
          index >= count || kind_of(item_at(p, index)) != selection::ItemKind::kSlots;
      const uint32_t lanes = __ballot_sync(kAllLanes, stops);
      if (lanes == 0) continue;
      index_ += (__ffs(static_cast<int>(lanes)) - 1) * p.ctas;
      return;
    }
  }

  // Written by the consumers of this CTA.
  static __device__ __forceinline__ bool is_flagged(const KernelParams& p, int index) {
    const auto* flags = reinterpret_cast<const volatile uint64_t*>(p.not_finite);
    return __any_sync(kAllLanes, flags[index] != 0);
  }

  int index_;
  int repaired_;  // token of the item, of a repair; kAll: no repair
};

template <typename Config>
using ItemOf = std::conditional_t<Config::kGroups, GroupItem, RowItem>;
template <typename Config>
using WalkOf = std::conditional_t<Config::kGroups, GroupWalk, RowWalk>;

// log2 of the most tokens of an item.
template <typename Config>
__device__ __forceinline__ int group_log2(const KernelParams& p) {
  return Config::kGroups ? p.group_log2 : 0;
}

// The token of tile row `row` within its item; rows past the last repeat it.
__device__ __forceinline__ int token_of(const KernelParams& p, int row, int rows) {
  return min(row, rows - 1) * p.inverse_heads >> 16;
}

// Whether an item of this CTA is flagged. All threads ask once, behind their last item.
template <typename Config>
__device__ __forceinline__ bool needs_repair(SharedStorage<Config>& shared) {
  if (!Config::kGroups) return false;
  barrier_arrive(&shared.walk_end);
  barrier_wait(&shared.walk_end, 0);
  return __any_sync(kAllLanes, shared.repairs != 0);
}

// ------------------------------------------------------------------------------ producer

// This thread's share of 64 rows: piece `thread % 8` of every block of rows thread / 8 + 16 i. Rows
// that do not count give zeros.
struct Rows {
  const char* from[4];
  uint32_t count = 15;  // bit i: row i counts
};

// Blocks kFirst .. kFirst + kCount - 1 of 64 rows; `to` is this thread's place in block 0. Offsets
// are constants because ptxas 13.0 makes an illegal instruction of a copy whose shared-memory
// address has a uniform part.
template <int kFirst, int kCount>
__device__ __forceinline__ void gather(uint32_t to, const Rows& rows, uint64_t policy) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int bytes = rows.count >> i & 1 ? 16 : 0;
#pragma unroll
    for (int block = kFirst; block < kFirst + kCount; ++block) {
      cp_async_16(to + block * 8192 + i * 2048, rows.from[i] + block * 128, bytes, policy);
    }
  }
}

// This thread's share of an item's query rows.
template <typename Config>
__device__ __forceinline__ Rows query_rows(const KernelParams& p, const ItemOf<Config>& item) {
  const int thread = threadIdx.x & 127;
  const Place place = item.place(p);
  const char* q = reinterpret_cast<const char*>(p.q + place.token * p.q_row_stride +
                                                place.first_head * p.q_head_stride) +
                  (thread & 7) * 16;
  const int64_t token_gap = p.q_row_stride - p.heads * p.q_head_stride;  // beyond the next head
  Rows rows;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = min((thread >> 3) + 16 * i, place.rows - 1);
    rows.from[i] = q + row * p.q_head_stride * 2;
    if constexpr (Config::kGroups) rows.from[i] += token_of(p, row, place.rows) * token_gap * 2;
  }
  return rows;
}

// Bits 0..n-1, for any n.
__device__ __forceinline__ uint32_t bits_below(int n) {
  return n >= 32 ? ~0u : (1u << max(n, 0)) - 1;
}

// The keys of a tile: `low` and `high` are those of slots lane and lane + 32, out of bounds where
// there is none. `word`, of groups: lane i << group_log2 | r has the bits of the keys 32 i .. that
// are keys of the item's token r.
struct TileKeys {
  int low, high;
  uint32_t word;
};

// The tiles of all items, in the order in which they are used, read ahead.
template <typename Config>
class Slots {
 public:
  __device__ __forceinline__ Slots(const KernelParams& p, bool is_repair) : walk_(p, is_repair) {
    take_item(p);
#pragma unroll
    for (TileKeys& keys : ahead_) keys = load(p);
  }

  __device__ __forceinline__ TileKeys next(const KernelParams& p) {
    const TileKeys keys = ahead_[0];
#pragma unroll
    for (int i = 1; i < kAhead; ++i) ahead_[i - 1] = ahead_[i];
    ahead_[kAhead - 1] = load(p);
    return keys;
  }

 private:
  static constexpr int kAhead = Config::kGroups ? 1 : 2;  // as registers allow

  __device__ __forceinline__ void take_item(const KernelParams& p) {
    left_ = 0;
    while (left_ <= 0 && walk_.next(p)) {
      const ItemOf<Config> item = walk_.item(p);
      left_ = item.keys;
      const int64_t token = item.place(p).token;
      entries_ = p.topk_indices + token * p.topk_indices_row_stride + (threadIdx.x & 31);
      if constexpr (Config::kGroups) take_group(p, item);
    }
  }

  // Of unions the list and the masks, of ranges the first key and the part of this lane's token.
  __device__ __forceinline__ void take_group(const KernelParams& p, const GroupItem& item) {
    const int lane = threadIdx.x & 31, chunk = lane >> p.group_log2;
    const int row = min(lane & ((1 << p.group_log2) - 1), item.tokens - 1);
    step_ = 0;
    key_ = -1;
    if (item.kind == selection::ItemKind::kUnion) {
      entries_ = p.plan.lists + int64_t{item.token} * p.plan.topk + lane;
      words_ = p.plan.masks + (int64_t{item.token} << p.group_log2) * ((p.plan.topk + 31) / 32) +
               chunk * item.tokens + row;
      step_ = 2 * item.tokens;
    } else if (item.kind == selection::ItemKind::kRange) {
      const int keys = __ldg(p.plan.row_keys + item.token + row);
      const int first = keys > 0 ? __ldg(p.plan.row_first + item.token + row) - item.first_key : 0;
      key_ = item.first_key + lane;
      part_ = {first - 32 * chunk, first - 32 * chunk + keys};
    }
  }

  __device__ __forceinline__ TileKeys load(const KernelParams& p) {
    const int lane = threadIdx.x & 31;
    TileKeys keys{-1, -1, ~0u};
    if (Config::kGroups && key_ >= 0) {
      if (lane < left_) keys.low = key_;
      if (lane + 32 < left_) keys.high = key_ + 32;
      keys.word = bits_below(part_.end) & ~bits_below(part_.first);
      key_ += 64, part_.first -= 64, part_.end -= 64;
    } else {
      if (lane < left_) keys.low = __ldg(entries_);
      if (lane + 32 < left_) keys.high = __ldg(entries_ + 32);
      entries_ += 64;
      if (Config::kGroups && step_ > 0) {
        const int chunk = lane >> p.group_log2;
        keys.word = chunk < 2 && 32 * chunk < left_ ? __ldg(words_) : 0;
        words_ += step_;
      }
    }
    left_ -= 64;
    if (left_ <= 0) take_item(p);
    return keys;
  }

  WalkOf<Config> walk_;
  int left_ = 0;  // slots of the item from the next tile on
  const int32_t* entries_ = nullptr;
  TileKeys ahead_[kAhead];

  // Of groups. Of a range, `part` is that of this lane's token, counted from this lane's 32 keys.
  struct Part {
    int first, end;
  };
  int step_ = 0;  // of words_, 0: no union
  int key_ = -1;  // of a range, this lane's next; -1: no range
  union {
    const uint32_t* words_ = nullptr;  // of a union, this lane's next
    Part part_;                        // of a range
  };
};

template <typename Config>
class Producer {
 public:
  __device__ __forceinline__ Producer(const KernelParams& p, SharedStorage<Config>& shared)
      : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    int stage = 0;
    bool is_repair = false;
    do {
      Slots<Config> slots(p_, is_repair);
      for (WalkOf<Config> walk(p_, is_repair); walk.next(p_);) {
        const int tiles = (walk.item(p_).keys + 63) / 64;
        for (int tile = 0; tile < tiles; ++tile) {
          const TileKeys keys = slots.next(p_);
          if (stage == 0) {
            load<0>(keys, tile == 0, walk);
          } else {
            load<1>(keys, tile == 0, walk);
            parity_ ^= 1;
          }
          stage ^= 1;
        }
      }
      is_repair = !is_repair;
    } while (is_repair && needs_repair(shared_));
  }

 private:
  // A tile; behind an item's first tile, whose stage is empty earlier, the item's q.
  template <int kStage>
  __device__ __forceinline__ void load(const TileKeys& keys, bool is_first,
                                       const WalkOf<Config>& walk) {
    const bool low_counts = static_cast<unsigned>(keys.low) < static_cast<unsigned>(p_.t_k);
    const bool high_counts = static_cast<unsigned>(keys.high) < static_cast<unsigned>(p_.t_k);
    const uint32_t low_valid = __ballot_sync(kAllLanes, low_counts);
    const uint32_t high_valid = __ballot_sync(kAllLanes, high_counts);
    const char* kv = reinterpret_cast<const char*>(p_.kv) + piece_ * 16;
    Rows rows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = row_ + 16 * (i & 1);
      const int key = __shfl_sync(kAllLanes, i < 2 ? keys.low : keys.high, slot);
      const bool counts = ((i < 2 ? low_valid : high_valid) >> slot & 1) != 0;
      rows.from[i] = kv + (counts ? key : 0) * p_.kv_row_bytes;
      if (!counts) rows.count ^= 1u << i;
    }

    const uint32_t to = shared_address(shared_.ring[kStage]) + place_;
    uint64_t* full = shared_.kv_full[kStage];
    uint64_t* empty = shared_.kv_empty[kStage];
    barrier_wait(&empty[kTail], parity_);
    gather_part<8, Config::kTailBlocks>(to, rows, &full[kTail]);
    const int thread = threadIdx.x & 127, group = group_log2<Config>(p_);
    if (thread < 2 << group) {
      const int chunk = thread >> group;
      const uint32_t valid = chunk == 0 ? low_valid : high_valid;
      shared_.valid[kStage][chunk][thread & ((1 << group) - 1)] = valid & keys.word;
      barrier_arrive(&full[kTail]);
    }
    barrier_wait(&empty[kHalf0 + kStage], parity_);  // the owner's half
    gather_part<kStage * 4, 4>(to, rows, &full[kHalf0 + kStage]);
    barrier_wait(&empty[kHalf1 - kStage], parity_);
    gather_part<4 - kStage * 4, 4>(to, rows, &full[kHalf1 - kStage]);

    if (is_first) {
      const uint32_t query = shared_address(shared_.q) + place_;
      rows = query_rows<Config>(p_, walk.item(p_));
      barrier_wait(&shared_.q_empty, query_parity_);
      query_parity_ ^= 1;
      gather_part<8, Config::kTailBlocks>(query, rows, &shared_.q_full[kTail]);
      gather_part<kStage * 4, 4>(query, rows, &shared_.q_full[kHalf0 + kStage]);
      gather_part<4 - kStage * 4, 4>(query, rows, &shared_.q_full[kHalf1 - kStage]);
    }
  }

  template <int kFirst, int kCount>
  __device__ __forceinline__ void gather_part(uint32_t to, const Rows& rows, uint64_t* full) {
    gather<kFirst, kCount>(to, rows, policy_);
    barrier_arrive_cp_async(full);
  }

  const KernelParams& p_;
  SharedStorage<Config>& shared_;
  const int row_ = threadIdx.x >> 3 & 15;  // of 16
  const int piece_ = threadIdx.x & 7;
  const uint32_t place_ = row_ * 128 + ((piece_ ^ (row_ & 7)) << 4);
  const uint64_t policy_ = l2_keep_policy();
  uint32_t parity_ = 1;  // of kv_empty
  uint32_t query_parity_ = 1;
};

// ------------------------------------------------------------------------------ softmax

// What a consumer thread keeps of its two rows, lane / 4 and lane / 4 + 8 of the warp's 16.
struct Softmax {
  float reference[2] = {-INFINITY, -INFINITY};  // scaled, log2 units
  float top[2] = {-INFINITY, -INFINITY};  // maximum of this lane's columns, unscaled; NaN stays
  float sum[2] = {0.f, 0.f};              // of this lane's columns
};

// Channels 8i + 2 (lane % 4) + {0, 1} of rows lane / 4 + {0, 8} lie in [4i + {0, 1}], [4i + {2,
// 3}].
__device__ __forceinline__ void scale_rows(float (&o)[128], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= alpha[i >> 1 & 1];
}

// Moves the references of this lane's rows to `to`; O and the sums follow.
__device__ __forceinline__ void move_reference(Softmax& softmax, float (&o)[128],
                                               const float (&to)[2]) {
  float alpha[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float from = softmax.reference[half];
    alpha[half] = to[half] == from ? 1.f : exp2_fast(from - to[half]);
    softmax.reference[half] = to[half];
    softmax.sum[half] *= alpha[half];
  }
  scale_rows(o, alpha);
}

__device__ __forceinline__ float quad_max(float x) {
  x = max_keep_nan(x, __shfl_xor_sync(kAllLanes, x, 1));
  return max_keep_nan(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Logits of keys that do not count become -inf; `column` is this lane's first.
template <int kRows>
__device__ __forceinline__ void mask_scores(float (&s)[32], const uint32_t (&words)[kRows][2],
                                            int column) {
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const uint32_t word = words[kRows == 1 ? 0 : i >> 1 & 1][i >> 4] >> column;
    const int bit = 8 * (i >> 2 & 3) + (i & 1);
    if ((word >> bit & 1) == 0) s[i] = -INFINITY;
  }
}

// The reference moves if a row's maximum outgrows it: then some lane's does, and only then are
// lanes compared.
__device__ __forceinline__ void update_reference(Softmax& softmax, float (&o)[128],
                                                 const float (&s)[32], float scale_log2e) {
  float tops[2][2] = {{s[0], s[1]}, {s[2], s[3]}};
#pragma unroll
  for (int i = 2; i < 16; ++i) {
    const int at = 4 * (i >> 1) + (i & 1);
    tops[0][i & 1] = max_keep_nan(tops[0][i & 1], s[at]);
    tops[1][i & 1] = max_keep_nan(tops[1][i & 1], s[at + 2]);
  }
  const float top[2] = {max_keep_nan(tops[0][0], tops[0][1]), max_keep_nan(tops[1][0], tops[1][1])};
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    softmax.top[half] = max_keep_nan(softmax.top[half], top[half]);
    grows |= top[half] * scale_log2e > softmax.reference[half] + kMaximumSlack;
  }
  if (!__any_sync(kAllLanes, grows)) return;
  float to[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float scaled = quad_max(top[half]) * scale_log2e, from = softmax.reference[half];
    to[half] = scaled > from + kMaximumSlack ? scaled : from;
  }
  move_reference(softmax, o, to);
}

// P as BF16 pairs, those of 16 keys in the order of a product's A operand.
__device__ __forceinline__ void make_probabilities(Softmax& softmax, const float (&s)[32],
                                                   float scale_log2e, uint32_t (&pairs)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // While every logit is -inf, subtracting it would make NaN of a weight of zero.
    const float reference = softmax.reference[half] == -INFINITY ? 0.f : softmax.reference[half];
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = exp2_fast(fmaf(s[4 * i + 2 * half], scale_log2e, -reference));
      const float b = exp2_fast(fmaf(s[4 * i + 2 * half + 1], scale_log2e, -reference));
      sums[i & 1] += a + b;
      pairs[i >> 1][2 * (i & 1) + half] = pack_bf16(a, b);
    }
    softmax.sum[half] += sums[0] + sums[1];
  }
}

// ------------------------------------------------------------------------------ out

// Whether an element is infinite or NaN: of a key that some token of the item did not select, too,
// because its P of 0 times that is NaN.
__device__ __forceinline__ bool is_not_finite(const float (&o)[128]) {
  float zeros[4] = {};
#pragma unroll
  for (int i = 0; i < 128; ++i) zeros[i % 4] = fmaf(o[i], 0.f, zeros[i % 4]);
  return zeros[0] + zeros[1] + zeros[2] + zeros[3] != 0.f;
}

// This side's 256 channels of the item's rows, each times its inverse denominator.
template <typename Config>
__device__ __forceinline__ void store_output(const KernelParams& p, const Place& place,
                                             const float (&o)[128], const float (&inverse)[2],
                                             int row, int first_channel) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = place.token * p.heads + place.first_head + row + 8 * half;
    __nv_bfloat16* to = p.out + at * Config::kValueDim + first_channel + 8 * (lane & 3);
    const bool live = row + 8 * half < place.rows;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int index = 4 * (i + e) + 2 * half;
        words[e] = pack_bf16(o[index] * inverse[half], o[index + 1] * inverse[half]);
      }
      transpose_quad(words, lane);  // lane j of four holds channels 8 (i + j) .. + 7
      if (live) store_16_bytes(to + 8 * i, words, p.out_aligned);
    }
  }
}

// ------------------------------------------------------------------------------ consumer

template <typename Config, int kSide>
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const KernelParams& p, SharedStorage<Config>& shared)
      : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    do {
      for (WalkOf<Config> walk(p_, parity(kRepairBit)); walk.next(p_);) {
        const int tiles = (walk.item(p_).keys + 63) / 64;
        run_item(walk, tiles, kSide ^ parity(kOwnerBit));
        if (tiles & 1) flip(kOwnerBit);
      }
      flip(kRepairBit);
    } while (parity(kRepairBit) && needs_repair(shared_));
  }

 private:
  // This thread's first row of the tile. Computed where it is needed: registers are few.
  __device__ __forceinline__ int row() const {
    return (opaque(static_cast<int>(threadIdx.x)) >> 5 & 3) * 16 + (opaque(lane_) >> 2);
  }

  static constexpr int kOther = kSide ^ 1;

  // Of the own kv_full, the other side's p_full, q_full, sums_full.
  static constexpr int kKeysBit = 0, kProbabilitiesBit = 1, kQueryBit = 2, kItemBit = 3;

  // The side of the next item's first tile; whether this is the repair.
  static constexpr int kOwnerBit = 4, kRepairBit = 5;

  __device__ __forceinline__ uint32_t parity(int bit) const { return parities_ >> bit & 1; }
  __device__ __forceinline__ void flip(int bit) { parities_ ^= 1u << bit; }

  static constexpr int kOwnEnd = Config::kTailBlocks + 4;  // blocks of tail and own half

  // Block i of S in the order of issue: tail, own half, the other half.
  static __device__ constexpr int block_at(int i) {
    if (i < Config::kTailBlocks) return 8;
    if (i < kOwnEnd) return kSide * 4 + i - Config::kTailBlocks;
    return kOther * 4 + i - kOwnEnd;
  }

  // Own tiles are first, first + 2, ...
  __device__ __forceinline__ void run_item(const WalkOf<Config>& walk, int tiles, int first) {
    Softmax softmax;
    float o[128] = {};
    if (first >= tiles && tiles > 0) warp_arrive(&shared_.q_empty, lane_);
    for (int tile = first; tile < tiles; tile += 2) {
      float s[2][32];
      uint32_t word;
      make_scores(s, word, softmax, o, tile > 0, tile == first);
      if (tile + 2 >= tiles) warp_arrive(&shared_.q_empty, lane_);
      take_own(s[0], s[1], word, softmax, o);
    }
    if (((tiles - first) & 1) == 0 && tiles > 0) take_last(softmax, o);
    if (tiles > 0) flip(kQueryBit);
    finish(walk.item(p_), softmax, o);
  }

  // S of an own tile and, between its blocks, O += P V of the tile before; of zeros if there is
  // none, as products in a branch would be serialised.
  __device__ __forceinline__ void make_scores(float (&s)[2][32], uint32_t& word, Softmax& softmax,
                                              float (&o)[128], bool has_before, bool is_first) {
    uint64_t* full = shared_.kv_full[kSide];
    barrier_wait(&full[kTail], parity(kKeysBit));
#pragma unroll
    for (int i = 0; i < Config::kBlocks; ++i) {
      if (i == kOwnEnd) {
        wgmma_commit();
        if (has_before) take_reference(softmax, o);
        issue_other(o, has_before);
        wgmma_commit();
      }
      if (i == 0 && Config::kTailBlocks > 0) wait_part(kTail, is_first);
      if (i == Config::kTailBlocks) wait_part(kHalf0 + kSide, is_first);
      if (i == kOwnEnd) wait_part(kHalf0 + kOther, is_first);
      issue_block(s, block_at(i));
      if (i == kOwnEnd) {
        wgmma_commit();
        wgmma_wait<1>();  // this block keeps the tensor cores busy
        if (has_before) warp_arrive(&shared_.kv_empty[kOther][kHalf0 + kSide], lane_);
        wgmma_fence();
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s[0]);
    wgmma_pin(s[1]);
    wgmma_pin(o);
    const int group = group_log2<Config>(p_);
    word = 0;  // of lane chunk << group | token
    if (lane_ < 2 << group) {
      word = shared_.valid[kSide][lane_ >> group][lane_ & ((1 << group) - 1)];
      barrier_arrive(&shared_.kv_empty[kSide][kTail]);
    }
    flip(kKeysBit);
  }

  // Until a part of the own tile and, for the item's first, of q is there.
  __device__ __forceinline__ void wait_part(int part, bool is_first) {
    barrier_wait(&shared_.kv_full[kSide][part], parity(kKeysBit));
    if (is_first) barrier_wait(&shared_.q_full[part], parity(kQueryBit));
    fence_async_shared();
    wgmma_fence();
  }

  // Sum 0 is over tail and half 0, sum 1 over half 1.
  __device__ __forceinline__ void issue_block(float (&s)[2][32], int block) {
    const uint64_t query = wgmma_descriptor(shared_address(shared_.q), 16, 1024);
    const uint64_t keys = wgmma_descriptor(shared_address(shared_.ring[kSide]), 16, 1024);
    const bool starts = block == 4 || block == (Config::kTailBlocks > 0 ? 8 : 0);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int offset = (block * Config::kBlockBytes + step * 32) >> 4;
      Wgmma<64>::shared(s[block >= 4 && block < 8], query + offset, keys + offset,
                        !(starts && step == 0));
    }
  }

  // Waits for P of the other side's tile and brings O to its reference.
  __device__ __forceinline__ void take_reference(Softmax& softmax, float (&o)[128]) {
    barrier_wait(&shared_.p_full[kOther], parity(kProbabilitiesBit));
    flip(kProbabilitiesBit);
    fence_async_shared();
    const volatile float* reference = shared_.reference[kOther] + row();
    float to[2] = {softmax.reference[0], softmax.reference[1]};
    if ((lane_ & 3) == 0) to[0] = reference[0], to[1] = reference[8];
    const bool moved = to[0] != softmax.reference[0] || to[1] != softmax.reference[1];
    if (__any_sync(kAllLanes, moved)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) to[half] = __shfl_sync(kAllLanes, to[half], lane_ & ~3);
      move_reference(softmax, o, to);
    }
  }

  // This side's value channels of a stage.
  __device__ __forceinline__ uint64_t values_of(int stage) {
    return wgmma_descriptor(shared_address(shared_.ring[stage] + kSide * 4 * Config::kBlockBytes),
                            Config::kBlockBytes, 1024);
  }

  // O += P V of the other side's tile, or of zeros.
  __device__ __forceinline__ void issue_other(float (&o)[128], bool is_real) {
    const uint64_t zeros = wgmma_descriptor(shared_address(shared_.zeros), 16, 16);
    const uint64_t p = wgmma_descriptor(shared_address(shared_.p), 16, 1024);
    const uint64_t probabilities = is_real ? p : zeros;
    const uint64_t values = is_real ? values_of(kOther) : zeros;
    const int step_p = is_real ? 32 >> 4 : 0, step_v = is_real ? 2048 >> 4 : 0;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kTileKeys / 16; ++step) {
      Wgmma<256>::template shared<0, 1>(o, probabilities + step * step_p, values + step * step_v,
                                        1);
    }
  }

  // The other side owns the item's last tile.
  __device__ __forceinline__ void take_last(Softmax& softmax, float (&o)[128]) {
    take_reference(softmax, o);
    issue_other(o, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
    warp_arrive(&shared_.kv_empty[kOther][kHalf0 + kSide], lane_);
  }

  // Softmax of an own tile, P to the other side, O += P V.
  __device__ __forceinline__ void take_own(float (&s)[32], float (&more)[32], uint32_t word,
                                           Softmax& softmax, float (&o)[128]) {
    uint32_t pairs[4][4];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] += more[i];
    }
    mask(s, word);
    update_reference(softmax, o, s, p_.softmax_scale_log2e);
    make_probabilities(softmax, s, p_.softmax_scale_log2e, pairs);
    hand_over(pairs, softmax);

    const uint64_t values = values_of(kSide);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Config::kTileKeys / 16; ++step) {
      Wgmma<256>::template registers<1>(o, pairs[step], values + (step * 2048 >> 4), 1);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(o);
    warp_arrive(&shared_.kv_empty[kSide][kHalf0 + kSide], lane_);
  }

  // Logits of keys that do not count for their row become -inf. Behind the words of the item's last
  // token stand copies of them.
  __device__ __forceinline__ void mask(float (&s)[32], uint32_t word) const {
    const int group = group_log2<Config>(p_);
    constexpr int kWordRows = Config::kGroups ? 2 : 1;  // or a lane's rows have the same words
    uint32_t words[kWordRows][2], all = ~0u;
#pragma unroll
    for (int half = 0; half < kWordRows; ++half) {
      const int last = (1 << group) - 1;
      const int token =
          Config::kGroups ? min((row() + 8 * half) * p_.inverse_heads >> 16, last) : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[half][i] = __shfl_sync(kAllLanes, word, i << group | token);
        all &= words[half][i];
      }
    }
    if (all != ~0u) mask_scores(s, words, 2 * (opaque(lane_) & 3));
  }

  // P and the reference to the other side.
  __device__ __forceinline__ void hand_over(const uint32_t (&pairs)[4][4], const Softmax& softmax) {
    const int lane = opaque(lane_);
    const int addressed = warp_ * 16 + (lane & 15);  // row of this lane's 16 bytes
    const uint32_t to = shared_address(shared_.p) + addressed * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int piece = 2 * step + (lane >> 4);
      stmatrix_x4(to + ((piece ^ (addressed & 7)) << 4), pairs[step][0], pairs[step][1],
                  pairs[step][2], pairs[step][3]);
    }
    fence_async_shared();
    __syncwarp();
    if ((lane_ & 3) == 0) {
      float* reference = shared_.reference[kSide] + row();
      reference[0] = softmax.reference[0], reference[8] = softmax.reference[1];
      barrier_arrive(&shared_.p_full[kSide]);
    }
  }

  // Adds the sides' sums; out, lse and max_logits of the item. All of it is right for a row without
  // keys, too: a maximum of -inf and a sum of zero.
  __device__ __forceinline__ void finish(const ItemOf<Config>& item, Softmax& softmax,
                                         float (&o)[128]) {
    const Place place = item.place(p_);
    const int first_row = row();
    float2(&sums)[2][Config::kRows] = shared_.sums;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.sum[half] += __shfl_xor_sync(kAllLanes, softmax.sum[half], 1);
      softmax.sum[half] += __shfl_xor_sync(kAllLanes, softmax.sum[half], 2);
      softmax.top[half] = quad_max(softmax.top[half]);
    }
    float inverse[2] = {};
    if ((lane_ & 3) == 0) {
      barrier_wait(&shared_.sums_empty[kSide], parity(kItemBit) ^ 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[kSide][first_row + 8 * half] = make_float2(softmax.sum[half], softmax.top[half]);
      }
      barrier_arrive(&shared_.sums_full[kSide]);
      barrier_wait(&shared_.sums_full[kOther], parity(kItemBit));
      const float other_sums[2] = {sums[kOther][first_row].x, sums[kOther][first_row + 8].x};
      const float other_tops[2] = {sums[kOther][first_row].y, sums[kOther][first_row + 8].y};
      barrier_arrive(&shared_.sums_empty[kOther]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        const bool live = row < place.rows;
        int head = place.first_head + row;
        bool has_keys = item.keys > 0;
        if constexpr (Config::kGroups) {
          const int token = token_of(p_, row, place.rows);
          head = row - token * p_.heads;
          has_keys = __ldg(p_.extents + place.token + token) > 0;
        }
        const float sum = softmax.sum[half] + other_sums[half], reference = softmax.reference[half];
        const float sink =
            live && p_.attn_sink != nullptr ? __ldg(p_.attn_sink + head) * kLog2E : -INFINITY;
        inverse[half] = !has_keys ? 0.f : inverse_denominator(sum, reference, sink);
        if (kSide == 0 && live) {
          const int64_t at = place.token * p_.heads + place.first_head + row;
          p_.lse[at] = (reference + log2f(sum)) * kLn2;
          if (p_.max_logits != nullptr) {
            p_.max_logits[at] =
                max_keep_nan(softmax.top[half], other_tops[half]) * p_.softmax_scale;
          }
        }
      }
    }
    __syncwarp();
    flip(kItemBit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      inverse[half] = __shfl_sync(kAllLanes, inverse[half], lane_ & ~3);
    }
    if constexpr (Config::kGroups) flag(item, is_not_finite(o));
    store_output<Config>(p_, place, o, inverse, first_row, kSide * 256);
  }

  // An item of several tokens that is not finite is repaired.
  __device__ __forceinline__ void flag(const GroupItem& item, bool is_not_finite) {
    if (item.tokens == 1) return;
    const bool flag = __any_sync(kAllLanes, is_not_finite);
    uint8_t* flags = p_.not_finite + int64_t{item.index} * kValueWarps;
    if (lane_ == 0) flags[kSide * 4 + warp_] = flag;
    if (lane_ == 0 && flag) atomicOr(&shared_.repairs, 1u);
  }

  const KernelParams& p_;
  SharedStorage<Config>& shared_;
  const int lane_ = threadIdx.x & 31;
  const int warp_ = threadIdx.x >> 5 & 3;
  uint32_t parities_ = 0;  // of the next wait, by bit
};

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(const KernelParams& p,
                                              SharedStorage<Config>& shared) {
  const int words = 2 << group_log2<Config>(p);  // of a tile
  for (int part = 0; part < kParts; ++part) {
    barrier_init(&shared.q_full[part], 128);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      barrier_init(&shared.kv_full[stage][part], part == kTail ? 128 + words : 128);
      barrier_init(&shared.kv_empty[stage][part], part == kTail ? 4 * words : 4);
    }
  }
  barrier_init(&shared.q_empty, 8);
  for (int side = 0; side < 2; ++side) {
    barrier_init(&shared.p_full[side], 32);
    barrier_init(&shared.sums_full[side], 32);
    barrier_init(&shared.sums_empty[side], 32);
  }
  barrier_init(&shared.walk_end, Config::kThreads);
  shared.repairs = 0;
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_forward_many_rows_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(p, shared);
  if (threadIdx.x < sizeof(shared.zeros) / 4) {
    reinterpret_cast<uint32_t*>(shared.zeros)[threadIdx.x] = 0;
  }
  fence_async_shared();
  __syncthreads();

  const int warpgroup = threadIdx.x >> 7;
  if (warpgroup == 2) {
    shrink_registers<Config::kProducerRegisters>();
    Producer<Config>(p, shared).run();
  } else if (warpgroup == 0) {
    grow_registers<Config::kConsumerRegisters>();
    Consumer<Config, 0>(p, shared).run();
  } else {
    grow_registers<Config::kConsumerRegisters>();
    Consumer<Config, 1>(p, shared).run();
  }
}

}  // namespace flashdsa::attention::sm90::forward_many_rows
