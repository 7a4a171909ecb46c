// Sparse MLA attention, forward, on Hopper, for at most 32 heads: one query row an item, with the
// operands swapped, so that keys fill the 64 rows of the products and heads are their columns.
//
//   S^T [keys, H] = softmax_scale k q^T,  P = softmax_j(S, and the sink),  out^T [512, H] = V^T P^T
//   lse = ln sum_j exp(S),  max_logits = max_j S
//
// Inputs and outputs: ForwardKernelParams. Items: the kSlots items of a plan, or every row. Slots
// without a key are zero rows with P = 0. Columns past the last head repeat it and are not stored.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ...    Tile: 64 keys x 8, 16 or 32 heads.
// Warpgroups                                                                       registers
//   0     producer: cp.async gather of the tile's three slots, validity words            40
//   1, 2  score, every second tile each: S, masks, online softmax, P; lse, max_logits    128
//   3     value: O^T = sum V^T P^T; out                                                  216
// A product reads 64 keys x 16 channels whatever its columns, so a tile is read twice from shared
// memory at any head count, and the gather is the limit at 8 heads. One scorer alone would be: S of
// a tile and its softmax come one after the other, so two of them take turns.
//
// The softmax is taken against a reference maximum that moves only when the true one outgrows it
// by 2^8; P and its sum share it, so the result is exact. A column's maximum lies in 32 threads of
// four warps: as long as no thread has a logit that far up, which one vote says, none of them is
// exchanged, and O is not rescaled. Both scorers of an item follow one reference, which goes from
// tile to tile with the turn; sums and true maxima are each scorer's own until the item ends.
//
// Shared memory, bytes at D = 576 and 8 / 16 / 32 heads: q 9216 / 18432 / 36864, ring 8 / 8 / 7
// slots of 24576, P 2 x 1024 / 2048 / 4096, the rest below 4096. A slot is three blocks of 64
// channels x 64 keys: one copy is the row operand of S and, transposed, of O. The last slot of a
// tile ends with the rope channels (D = 576) or stays a third empty (D = 512).
//
// Barriers; side is a scorer's number, 0 or 1, and that of its tiles
//   kv_full[slot]    128 cp.async + 1 of 0  side waits, parity 0  keys and validity word are there
//   kv_empty[slot]   4 warps of 3, 4 of     0 waits, parity 1     O has read them, S before; the
//                    a scorer                                     validity word has been read
//   p_full[side]     16 lanes of side       3 waits, parity 0     P, alpha and moved are there
//   p_empty[side]    16 lanes of 3          side waits, parity 1  O has read P (and alpha, before)
//   turn[side]       16 lanes of the other  side waits, parity 0  the reference after the other's
//                                                                 tile is there, its last was read
//   partial_full[side]   16 lanes of side   side waits, parity 0  every warp's part of a maximum
//   partial_empty[side]  128 threads        side waits, parity 1  the parts have been read
//   totals_full      16 lanes of 1, of 2    1 waits, parity 0     both scorers' sums and maxima
//   totals_empty     kColumns / 2 of 1      1, 2 wait, parity 1   they have been read
//   inverse_full     kColumns / 2 of 1      3 waits, parity 0     the item's inverses are there
//   inverse_empty    128 threads of 3       1 waits, parity 1     they have been read
// Named barriers: kScoreQuery, of both scorers (q may be overwritten, it is there); kScoreVote +
// side. Every lane that writes or reads words in shared memory arrives itself: racecheck follows
// neither one lane's arrival for its warp nor named barriers of a part of the block.
//
// Rounded to BF16: P, as operand of the second product (its sum is not), and out. All else is FP32.
// S is made of one sum a slot, which FP32 registers add: the tensor core truncates partial sums.
// The order of every sum depends on the row's slots alone.
#pragma once

#include <cmath>

#include "attention/sm90/forward_common.cuh"
#include "attention/sm90/forward_few_heads/config.h"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::forward_few_heads {

using namespace core::cuda;

inline constexpr int kScoreQuery = 1, kScoreVote = 2;  // named barriers; the vote has two

// ------------------------------------------------------------------------------ small things

struct Item {
  int row;     // of the query
  int extent;  // slots to look at, 0: a row without keys
};

// The items of this CTA in order, the same for every warp. A lane holds one of the next 32, so that
// items of other kinds cost little.
class ItemWalk {
 public:
  __device__ __forceinline__ explicit ItemWalk(const KernelParams& p)
      : first_(blockIdx.x), count_(p.plan.items == nullptr ? p.t_q : __ldg(p.plan.item_count)) {}

  // False after the last.
  __device__ __forceinline__ bool next(const KernelParams& p, Item& item) {
    while (pending_ == 0) {
      if (first_ >= count_) return false;
      read(p);
    }
    const int lane = __ffs(static_cast<int>(pending_)) - 1;
    pending_ &= pending_ - 1;
    item.row = __shfl_sync(kAllLanes, mine_.row, lane);
    item.extent = __shfl_sync(kAllLanes, mine_.extent, lane);
    return true;
  }

 private:
  __device__ __forceinline__ void read(const KernelParams& p) {
    const int64_t index = first_ + static_cast<int64_t>(threadIdx.x & 31) * gridDim.x;
    bool taken = index < count_;
    if (taken && p.plan.items == nullptr) {
      mine_ = {static_cast<int>(index), __ldg(p.extents + index)};
    } else if (taken) {
      const int4 words = __ldg(reinterpret_cast<const int4*>(p.plan.items + index));
      mine_ = {words.x, words.w};
      taken = words.z == static_cast<int>(selection::ItemKind::kSlots);
    }
    pending_ = __ballot_sync(kAllLanes, taken);
    first_ += 32 * static_cast<int64_t>(gridDim.x);
  }

  int64_t first_;  // of the 32 that come next
  int64_t count_;
  uint32_t pending_ = 0;  // lanes whose item is still to come
  Item mine_{};
};

template <typename Config>
__device__ __forceinline__ int tiles_of(const Item& item) {
  return (item.extent + Config::kTileKeys - 1) / Config::kTileKeys;
}

// Place in the ring, and the parity that the next wait for it uses.
template <typename Config>
struct RingPosition {
  int slot;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++slot == Config::kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void skip_tile() {
    slot += Config::kTileSlots;
    if (slot >= Config::kSlots) {
      slot -= Config::kSlots;
      parity ^= 1;
    }
  }
};

// ------------------------------------------------------------------------------ producer

// This thread's share of a slot of `kBlocks` blocks: piece `piece` of each block of keys `row`, +
// 16, + 32, + 48, whose kv rows are `keys`; -1 gives zeros. `to` is piece `piece` of key `row`,
// `kv` that of row 0 in the slot's first block.
template <typename Config, int kBlocks>
__device__ __forceinline__ void gather(uint32_t to, const char* kv, int64_t row_bytes,
                                       const int (&keys)[4], uint64_t policy) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const char* from = kv + max(keys[i], 0) * row_bytes;
    const int bytes = keys[i] >= 0 ? 16 : 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      cp_async_16(to + i * 2048 + block * Config::kBlockBytes, from + block * 128, bytes, policy);
    }
  }
}

// The words of topk_indices are read two tiles ahead: less costs a global load's latency a tile.
template <typename Config>
__device__ __forceinline__ void produce(const KernelParams& p, SharedStorage<Config>& shared) {
  const int thread = threadIdx.x & 127, lane = thread & 31, row = thread >> 3, piece = thread & 7;
  const uint64_t policy = l2_keep_policy();
  const char* kv = reinterpret_cast<const char*>(p.kv) + piece * 16;
  const uint32_t to = shared_address(shared.ring) + row * 128 + ((piece ^ (row & 7)) << 4);
  RingPosition<Config> ring{0, 1};

  ItemWalk walk(p);
  for (Item item; walk.next(p, item);) {
    const int32_t* entries = p.topk_indices + item.row * p.topk_indices_row_stride;
    const int tiles = tiles_of<Config>(item);
    const auto entry_of = [&](int word) {
      const int position = word * 32 + lane;
      return position < item.extent ? __ldg(entries + position) : -1;
    };
    int now[2] = {entry_of(0), entry_of(1)}, next[2] = {entry_of(2), entry_of(3)};
    for (int tile = 0; tile < tiles; ++tile) {
      uint32_t valid[2];
      int keys[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool counts = static_cast<unsigned>(now[i]) < static_cast<unsigned>(p.t_k);
        valid[i] = __ballot_sync(kAllLanes, counts);
        const int key = counts ? now[i] : -1;
        keys[2 * i] = __shfl_sync(kAllLanes, key, row);
        keys[2 * i + 1] = __shfl_sync(kAllLanes, key, row + 16);
        now[i] = next[i];
        next[i] = entry_of(2 * (tile + 2) + i);
      }
      const auto fill = [&]<int kSlot>() {
        barrier_wait(&shared.kv_empty[ring.slot], ring.parity);
        gather<Config, Config::template kKeyBlocks<kSlot>>(to + ring.slot * Config::kSlotBytes,
                                                           kv + kSlot * Config::kSlotBlocks * 128,
                                                           p.kv_row_bytes, keys, policy);
        barrier_arrive_cp_async(&shared.kv_full[ring.slot]);
        if (thread == 0) {
          shared.valid[ring.slot] = valid[kSlot == 0 ? 0 : 1];
          barrier_arrive(&shared.kv_full[ring.slot]);
        }
        ring.advance();
      };
      fill.template operator()<0>();
      fill.template operator()<1>();
      fill.template operator()<2>();
    }
  }
}

// ------------------------------------------------------------------------------ score

// What a score thread keeps of its columns 8i + 2 (lane % 4) + {0, 1}, in [2i + {0, 1}]. The
// reference is the same in all threads of a column, the rest is of this thread's keys, 16 warp +
// lane / 4 + {0, 8} of every tile.
template <int kCount>
struct Softmax {
  float reference[kCount];  // scaled, log2 units
  float top[kCount];        // the true maximum, unscaled; NaN stays
  float sum[kCount];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int c = 0; c < kCount; ++c) reference[c] = top[c] = -INFINITY, sum[c] = 0.f;
  }
};

// The item's query row into shared memory.
template <typename Config>
__device__ __forceinline__ void load_query(const KernelParams& p, SharedStorage<Config>& shared,
                                           int row) {
  constexpr int kPieces = Config::kBlocks * 8;  // of 16 bytes, of a head
  const int thread = threadIdx.x - 128;
  const __nv_bfloat16* q = p.q + row * p.q_row_stride;

  named_sync(kScoreQuery, 256);
#pragma unroll 3
  for (int i = thread; i < Config::kColumns * kPieces; i += 256) {
    const int head = i / kPieces, piece = i % kPieces;
    const uint4* from =
        reinterpret_cast<const uint4*>(q + min(head, p.heads - 1) * p.q_head_stride);
    uint8_t* to = shared.q + (piece >> 3) * Config::kQueryBlockBytes + head * 128;
    *reinterpret_cast<uint4*>(to + (((piece & 7) ^ (head & 7)) << 4)) = __ldg(from + piece);
  }
  fence_async_shared();
  named_sync(kScoreQuery, 256);
}

// Combines the values of a column over the warp.
template <int kCount, typename Combine>
__device__ __forceinline__ void combine_warp(float (&values)[kCount], const Combine& combine) {
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      values[c] = combine(values[c], __shfl_xor_sync(kAllLanes, values[c], step));
    }
  }
}

// Columns of this lane to or from a row of all columns.
template <int kCount>
__device__ __forceinline__ void put_columns(float* to, const float (&values)[kCount], int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    reinterpret_cast<float2*>(to)[4 * i + lane] = make_float2(values[2 * i], values[2 * i + 1]);
  }
}

// The largest of a column over the warpgroup's threads: all of them get it.
template <typename Config, int kCount>
__device__ __forceinline__ void exchange_top(SharedStorage<Config>& shared, int side,
                                             float (&top)[kCount], uint32_t& parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  combine_warp(top, max_keep_nan);
  barrier_wait(&shared.partial_empty[side], parity ^ 1);
  if (lane < 4) {
    put_columns(shared.partial[side][thread >> 5], top, lane);
    barrier_arrive(&shared.partial_full[side]);
  }
  barrier_wait(&shared.partial_full[side], parity);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      const float2 part =
          reinterpret_cast<const float2*>(shared.partial[side][warp])[4 * i + (lane & 3)];
      top[2 * i] = max_keep_nan(top[2 * i], part.x);
      top[2 * i + 1] = max_keep_nan(top[2 * i + 1], part.y);
    }
  }
  barrier_arrive(&shared.partial_empty[side]);
  parity ^= 1;
}

// Issues the products of one slot of the tile; `keys` and `query` are the operands' first blocks.
template <typename Config, int kBlocks, int kCount>
__device__ __forceinline__ void issue_scores(float (&sum)[kCount], uint64_t keys, uint64_t query) {
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) {
    const uint64_t a = keys + (((i >> 2) * Config::kBlockBytes + (i & 3) * 32) >> 4);
    const uint64_t b = query + (((i >> 2) * Config::kQueryBlockBytes + (i & 3) * 32) >> 4);
    Wgmma<Config::kColumns>::shared(sum, a, b, i != 0);
  }
}

// The validity bits of the tile whose first slot is `slot`: bit 0 of this thread's first key, bit 8
// of its second.
template <typename Config>
__device__ __forceinline__ uint32_t take_validity(SharedStorage<Config>& shared, int slot) {
  const int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  uint32_t word = 0;
  if (lane < Config::kTileSlots) {
    const int mine = slot + lane < Config::kSlots ? slot + lane : slot + lane - Config::kSlots;
    word = shared.valid[mine];
    barrier_arrive(&shared.kv_empty[mine]);
  }
  return __shfl_sync(kAllLanes, word, warp >> 1) >> (16 * (warp & 1) + (lane >> 2));
}

// Moves the references of columns whose maximum has outgrown them; gives what O has to be
// multiplied with.
template <typename Config, int kCount>
__device__ __forceinline__ void move_references(SharedStorage<Config>& shared, int side,
                                                Softmax<kCount>& softmax, float scale_log2e,
                                                uint32_t& partial_parity, float (&alpha)[kCount]) {
  float top[kCount];
#pragma unroll
  for (int c = 0; c < kCount; ++c) top[c] = softmax.top[c];
  exchange_top(shared, side, top, partial_parity);
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const float scaled = top[c] * scale_log2e;
    if (scaled > softmax.reference[c] + kMaximumSlack) {
      alpha[c] = exp2_fast(softmax.reference[c] - scaled);
      softmax.reference[c] = scaled;
      softmax.sum[c] *= alpha[c];
    }
  }
}

// The references after this tile, for the other warpgroup.
template <typename Config, int kCount>
__device__ __forceinline__ void give_turn(SharedStorage<Config>& shared, int side,
                                          const Softmax<kCount>& softmax, bool moved) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  if (lane >= 4) return;
  if (thread < 4) {
    if (moved) put_columns(shared.reference[side], softmax.reference, lane);
    if (lane == 0) shared.reference_moved[side] = moved;
  }
  barrier_arrive(&shared.turn[side ^ 1]);
}

// Takes the references after the tile before, which the other warpgroup had.
template <typename Config, int kCount>
__device__ __forceinline__ void take_turn(SharedStorage<Config>& shared, int side,
                                          Softmax<kCount>& softmax, uint32_t& parity) {
  const int lane = threadIdx.x & 31;
  barrier_wait(&shared.turn[side], parity);
  parity ^= 1;
  uint32_t moved = 0;
  if (lane == 0) moved = shared.reference_moved[side ^ 1];
  if (__shfl_sync(kAllLanes, moved, 0) == 0) return;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float2 pair = make_float2(0.f, 0.f);
    if (lane < 4) pair = reinterpret_cast<const float2*>(shared.reference[side ^ 1])[4 * i + lane];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = 2 * i + e;
      const float reference = __shfl_sync(kAllLanes, e == 0 ? pair.x : pair.y, lane & 3);
      // Equal infinite references would make NaN of their difference.
      if (reference != softmax.reference[c]) {
        softmax.sum[c] *= exp2_fast(softmax.reference[c] - reference);
        softmax.reference[c] = reference;
      }
    }
  }
}

// One tile: S becomes P, as BF16 pairs of columns: [i][0] of this thread's first key, [i][1] of its
// second. Says whether an alpha may differ from 1.
template <typename Config, int kCount>
__device__ __forceinline__ bool softmax_tile(SharedStorage<Config>& shared, int side,
                                             Softmax<kCount>& softmax, float (&s)[2 * kCount],
                                             uint32_t valid, float scale_log2e,
                                             uint32_t& partial_parity, float (&alpha)[kCount],
                                             uint32_t (&pairs)[kCount / 2][2]) {
  const bool first_counts = valid & 1, second_counts = valid & 0x100;
  bool outgrown = false;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    float& x = s[4 * (c / 2) + c % 2];
    float& y = s[4 * (c / 2) + c % 2 + 2];
    if (!first_counts) x = -INFINITY;
    if (!second_counts) y = -INFINITY;
    softmax.top[c] = max_keep_nan(softmax.top[c], max_keep_nan(x, y));
    outgrown |= softmax.top[c] * scale_log2e > softmax.reference[c] + kMaximumSlack;
    alpha[c] = 1.f;
  }
  const bool moved = named_any(kScoreVote + side, 128, outgrown);
  if (moved) move_references(shared, side, softmax, scale_log2e, partial_parity, alpha);
  give_turn(shared, side, softmax, moved);
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    // While every logit is -inf, subtracting it would make NaN of a weight of zero.
    const float reference = softmax.reference[c] == -INFINITY ? 0.f : softmax.reference[c];
    float& x = s[4 * (c / 2) + c % 2];
    float& y = s[4 * (c / 2) + c % 2 + 2];
    x = exp2_fast(fmaf(x, scale_log2e, -reference));
    y = exp2_fast(fmaf(y, scale_log2e, -reference));
    softmax.sum[c] += x + y;
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    pairs[i][0] = pack_bf16(s[4 * i], s[4 * i + 1]);
    pairs[i][1] = pack_bf16(s[4 * i + 2], s[4 * i + 3]);
  }
  return moved;
}

// P and alpha into shared memory, when the value warps have read the last of this stage.
template <typename Config, int kCount>
__device__ __forceinline__ void store_probabilities(SharedStorage<Config>& shared, int side,
                                                    uint32_t parity,
                                                    const uint32_t (&pairs)[kCount / 2][2],
                                                    const float (&alpha)[kCount], bool moved) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  barrier_wait(&shared.p_empty[side], parity);
  // Lanes 8m .. 8m + 7 address the eight heads of matrix m: eight keys, of two lots, each.
  const uint32_t to = shared_address(shared.p[side]) + (lane & 7) * 128 +
                      (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  if constexpr (kCount == 2) {
    stmatrix_x2_transposed(to, pairs[0][0], pairs[0][1]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; i += 2) {
      stmatrix_x4_transposed(to + (i + (lane >> 4)) * 1024, pairs[i][0], pairs[i][1],
                             pairs[i + 1][0], pairs[i + 1][1]);
    }
  }
  fence_async_shared();
  __syncwarp();
  if (lane < 4) {
    if (warp == 0) {
      if (moved) put_columns(shared.alpha[side], alpha, lane);
      if (lane == 0) shared.moved[side] = moved;
    }
    barrier_arrive(&shared.p_full[side]);
  }
}

// This warpgroup's part of the item's sums and maxima.
template <typename Config, int kCount>
__device__ __forceinline__ void put_totals(SharedStorage<Config>& shared, int side,
                                           Softmax<kCount>& softmax, bool wants_top,
                                           uint32_t parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = 4 * side + (thread >> 5);
  combine_warp(softmax.sum, [](float x, float y) { return x + y; });
  if (wants_top) combine_warp(softmax.top, max_keep_nan);
  barrier_wait(&shared.totals_empty, parity);
  if (lane < 4) {
    put_columns(shared.sum[warp], softmax.sum, lane);
    if (wants_top) put_columns(shared.top[warp], softmax.top, lane);
    barrier_arrive(&shared.totals_full);
  }
}

// lse and max_logits of the item, and the inverses for the value warps. All of it is right for a
// row without keys, too: a maximum of -inf and a sum of zero. Warp i has columns 8i .. 8i + 7.
template <typename Config, int kCount>
__device__ __forceinline__ void finish_row(const KernelParams& p, SharedStorage<Config>& shared,
                                           const Item& item, const Softmax<kCount>& softmax,
                                           uint32_t parity) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
  barrier_wait(&shared.totals_full, parity ^ 1);
  barrier_wait(&shared.inverse_empty, parity);
  if (lane >= 4 || warp >= kCount / 2) return;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    if (c / 2 != warp) continue;
    const int head = 8 * (c / 2) + 2 * lane + c % 2;
    const bool live = head < p.heads;
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      sum += shared.sum[part][head] + shared.sum[part + 4][head];
    }
    const float reference = softmax.reference[c];
    const float sink =
        live && p.attn_sink != nullptr ? __ldg(p.attn_sink + head) * kLog2E : -INFINITY;
    shared.inverse[head] = item.extent == 0 ? 0.f : inverse_denominator(sum, reference, sink);
    if (live) {
      const int64_t at = static_cast<int64_t>(item.row) * p.heads + head;
      p.lse[at] = (reference + log2f(sum)) * kLn2;
      if (p.max_logits != nullptr) {
        float top = -INFINITY;
#pragma unroll
        for (int part = 0; part < 8; ++part) top = max_keep_nan(top, shared.top[part][head]);
        p.max_logits[at] = top * p.softmax_scale;
      }
    }
  }
  barrier_arrive(&shared.totals_empty);
  barrier_arrive(&shared.inverse_full);
}

template <typename Config>
__device__ __forceinline__ void score(const KernelParams& p, SharedStorage<Config>& shared,
                                      int side) {
  constexpr int kCount = Config::kColumns / 4;  // columns of a thread
  constexpr int kQuerySlot = Config::kSlotBlocks * Config::kQueryBlockBytes >> 4;
  const uint64_t query = wgmma_descriptor(shared_address(shared.q), 16, 1024);
  const uint64_t ring_keys = wgmma_descriptor(shared_address(shared.ring), 16, 1024);
  float sums[Config::kTileSlots][2 * kCount] = {};
  RingPosition<Config> ring{0, 0};
  uint32_t partial_parity = 0, turn_parity = 0, p_parity = 1, totals_parity = 1;

  ItemWalk walk(p);
  for (Item item; walk.next(p, item);) {
    const int tiles = tiles_of<Config>(item);
    Softmax<kCount> softmax;
    if (tiles > 0) load_query(p, shared, item.row);
    for (int tile = 0; tile < tiles; ++tile) {
      if ((tile & 1) != side) {
        ring.skip_tile();
        continue;
      }
      const int first_slot = ring.slot;
      const auto issue = [&]<int kSlot>() {
        barrier_wait(&shared.kv_full[ring.slot], ring.parity);
        fence_async_shared();
        wgmma_fence();  // for every slot: its sum is first touched here
        issue_scores<Config, Config::template kKeyBlocks<kSlot>>(
            sums[kSlot], ring_keys + ring.slot * (Config::kSlotBytes >> 4),
            query + kSlot * kQuerySlot);
        ring.advance();
      };
      issue.template operator()<0>();
      issue.template operator()<1>();
      issue.template operator()<2>();
      wgmma_commit();
      const uint32_t valid = take_validity(shared, first_slot);
      wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < Config::kTileSlots; ++n) wgmma_pin(sums[n]);
      float(&s)[2 * kCount] = sums[0];
#pragma unroll
      for (int i = 0; i < 2 * kCount; ++i) s[i] += sums[1][i] + sums[2][i];

      float alpha[kCount];
      uint32_t pairs[kCount / 2][2];
      if (tile > 0) take_turn(shared, side, softmax, turn_parity);
      const bool moved = softmax_tile(shared, side, softmax, s, valid, p.softmax_scale_log2e,
                                      partial_parity, alpha, pairs);
      store_probabilities(shared, side, p_parity, pairs, alpha, moved);
      p_parity ^= 1;
    }
    if (tiles > 0 && ((tiles - 1) & 1) != side) take_turn(shared, side, softmax, turn_parity);
    put_totals(shared, side, softmax, p.max_logits != nullptr, totals_parity);
    if (side == 0) finish_row(p, shared, item, softmax, totals_parity);
    totals_parity ^= 1;
  }
}

// ------------------------------------------------------------------------------ value

// O^T: channels 64 block + 16 warp + lane / 4 + {0, 8} of columns 8i + 2 (lane % 4) + {0, 1} lie in
// [block][4i + {0, 1}], [block][4i + {2, 3}].
template <typename Config>
using Output = float[Config::kValueBlocks][Config::kColumns / 2];

template <typename Config>
__device__ __forceinline__ void rescale(Output<Config>& o, const SharedStorage<Config>& shared,
                                        int stage) {
  const int lane = threadIdx.x & 31;
  const float2* alphas = reinterpret_cast<const float2*>(shared.alpha[stage]) + (lane & 3);
#pragma unroll
  for (int i = 0; i < Config::kColumns / 8; ++i) {
    float2 alpha = make_float2(1.f, 1.f);
    if (lane < 4) alpha = alphas[4 * i];
    alpha.x = __shfl_sync(kAllLanes, alpha.x, lane & 3);
    alpha.y = __shfl_sync(kAllLanes, alpha.y, lane & 3);
#pragma unroll
    for (int block = 0; block < Config::kValueBlocks; ++block) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[block][4 * i + e] *= e % 2 == 0 ? alpha.x : alpha.y;
    }
  }
}

// O^T += V^T P^T of the blocks of one slot.
template <typename Config, int kSlot>
__device__ __forceinline__ void issue_values(Output<Config>& o, uint64_t values,
                                             uint64_t probabilities) {
  constexpr int kBlocks = Config::template kSlotValueBlocks<kSlot>;
#pragma unroll
  for (int step = 0; step < Config::kTileKeys / 16; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint64_t a = values + ((block * Config::kBlockBytes + step * 2048) >> 4);
      Wgmma<Config::kColumns>::template shared<1, 0>(o[kSlot * Config::kSlotBlocks + block], a,
                                                     probabilities + (step * 32 >> 4), 1);
    }
  }
  wgmma_commit();
}

// The item's channels, each times its column's inverse denominator.
template <typename Config>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item,
                                             const Output<Config>& o,
                                             const SharedStorage<Config>& shared) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int i = 0; i < Config::kColumns / 8; ++i) {
    const float2 inverse = reinterpret_cast<const float2*>(shared.inverse)[4 * i + (lane & 3)];
    const int head = 8 * i + (lane >> 2);
    const int64_t at = static_cast<int64_t>(item.row) * p.heads + head;
    __nv_bfloat16* to = p.out + at * Config::kValueDim + 16 * warp + 8 * (lane & 1);
    const bool live = head < p.heads;
#pragma unroll
    for (int block = 0; block < Config::kValueBlocks; block += 2) {
      uint32_t words[4];  // each: eight channels of eight heads, a head to four lanes
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* pair = &o[block + e / 2][4 * i + 2 * (e % 2)];
        words[e] = transpose_8x8(pack_bf16(pair[0] * inverse.x, pair[1] * inverse.y));
      }
      transpose_quad(words, lane);  // lane j of four has all eight channels of word j
      if (live) store_16_bytes(to + 64 * (block + ((lane >> 1) & 1)), words, p.out_aligned);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void value(const KernelParams& p, SharedStorage<Config>& shared) {
  const int lane = threadIdx.x & 31;
  const uint64_t probabilities = wgmma_descriptor(shared_address(shared.p), 16, 1024);
  const uint64_t ring_values =
      wgmma_descriptor(shared_address(shared.ring), Config::kBlockBytes, 1024);
  RingPosition<Config> ring{0, 0};
  uint32_t p_parities = 0, inverse_parity = 0;  // p_parities: a bit for each scorer

  ItemWalk walk(p);
  for (Item item; walk.next(p, item);) {
    const int tiles = tiles_of<Config>(item);
    Output<Config> o = {};
    for (int tile = 0; tile < tiles; ++tile) {
      const int side = tile & 1;
      barrier_wait(&shared.p_full[side], (p_parities >> side) & 1);
      p_parities ^= 1u << side;
      fence_async_shared();
      uint32_t moved = 0;
      if (lane == 0) moved = shared.moved[side];
      if (__shfl_sync(kAllLanes, moved, 0) != 0) rescale<Config>(o, shared, side);

      int slots[Config::kTileSlots];
      const uint64_t b = probabilities + side * (Config::kQueryBlockBytes >> 4);
      const auto issue = [&]<int kSlot>() {
        slots[kSlot] = ring.slot;
        issue_values<Config, kSlot>(o, ring_values + ring.slot * (Config::kSlotBytes >> 4), b);
        ring.advance();
      };
      wgmma_fence();
      issue.template operator()<0>();
      issue.template operator()<1>();
      issue.template operator()<2>();
      wgmma_wait<2>();
      warp_arrive(&shared.kv_empty[slots[0]], lane);
      wgmma_wait<1>();
      warp_arrive(&shared.kv_empty[slots[1]], lane);
      wgmma_wait<0>();
#pragma unroll
      for (int block = 0; block < Config::kValueBlocks; ++block) wgmma_pin(o[block]);
      warp_arrive(&shared.kv_empty[slots[2]], lane);
      if (lane < 4) barrier_arrive(&shared.p_empty[side]);
    }
    barrier_wait(&shared.inverse_full, inverse_parity);
    inverse_parity ^= 1;
    store_output<Config>(p, item, o, shared);
    barrier_arrive(&shared.inverse_empty);
  }
}

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (int slot = 0; slot < Config::kSlots; ++slot) {
    barrier_init(&shared.kv_full[slot], 128 + 1);
    barrier_init(&shared.kv_empty[slot], 4 + 4);
  }
  for (int side = 0; side < Config::kScorers; ++side) {
    barrier_init(&shared.p_full[side], 16);
    barrier_init(&shared.p_empty[side], 16);
    barrier_init(&shared.turn[side], 16);
    barrier_init(&shared.partial_full[side], 16);
    barrier_init(&shared.partial_empty[side], 128);
  }
  barrier_init(&shared.totals_full, 32);
  barrier_init(&shared.totals_empty, Config::kColumns / 2);
  barrier_init(&shared.inverse_full, Config::kColumns / 2);
  barrier_init(&shared.inverse_empty, 128);
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_forward_few_heads_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();

  const int warpgroup = threadIdx.x >> 7;
  if (warpgroup == 0) {
    shrink_registers<Config::kProducerRegisters>();
    produce(p, shared);
  } else if (warpgroup < 1 + Config::kScorers) {
    grow_registers<Config::kScoreRegisters>();
    score(p, shared, warpgroup - 1);
  } else {
    grow_registers<Config::kValueRegisters>();
    value(p, shared);
  }
}

}  // namespace flashdsa::attention::sm90::forward_few_heads
