// Sparse MLA attention, forward, on Hopper, for more than 32 heads: one query row and up to 64 of
// its heads an item.
//
//   S = softmax_scale q k,  P = softmax_j(S, and the sink),  out = sum_j P kv[i_j, :512]
//   lse = ln sum_j exp(S),  max_logits = max_j S
//
// Inputs and outputs: ForwardKernelParams. Slots without a key are zero rows with P = 0. Tile rows
// past the item's last head repeat it and are not stored.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ...    Tile: 64 heads x 64 keys.
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
// Shared memory, bytes (D = 576 / 512): q 73728 / 65536, ring 2 x 73728 / 65536, P 8192, the rest
// 3072: 232448, the limit of an SM, / 207872. Channels of q and of a tile come in three parts: the
// tail (above 511; may be empty), and the halves of the sides. A part consists of blocks of 64 rows
// x 64 channels in the 128-byte swizzle: a block of keys is the K operand of S and, transposed, the
// V operand.
//
// Barriers
//   q_full[part]           128 cp.async       consumers, parity 0   a part of the item's q is there
//   q_empty                8 warps            producer, parity 1    the item's last S is made
//   kv_full[stage][part]   128 cp.async,      owner, parity 0       a part of the tile is there,
//                          tail: 1 more                             tail: and its validity words
//   kv_empty[stage][tail]  8 lanes of owner   producer, parity 1    S is made, words are read
//   kv_empty[stage][half]  4 warps of half's  producer, parity 1    O has read it (S before)
//   p_full[side]           32 lanes of side   other side, parity 0  P, reference of side's tile
//   sums_full[side]        32 lanes of side   other side, parity 0  side's sums of the item
//   sums_empty[side]       32 lanes of other  side, parity 1        they are read
// P has one buffer and no barrier to say that it is empty: who writes P(n) has read P(n-1).
//
// Rounded to BF16: P, as operand of the second product (its sum is not), and out. All else is FP32.
// S is made of two sums: tail and half 0, and half 1. The order of every sum depends on the row's
// slots alone, whichever side owns its first tile.
#pragma once

#include <cmath>

#include "attention/sm90/forward_common.cuh"
#include "attention/sm90/forward_many_heads/config.h"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::forward_many_heads {

using namespace core::cuda;

// ------------------------------------------------------------------------------ small things

struct Item {
  int64_t token;
  int first_head;
  int heads;  // of the tile's 64 rows
};

__device__ __forceinline__ Item item_at(const KernelParams& p, int index) {
  Item item;
  item.token = index >> p.head_blocks_log2;
  item.first_head = (index & ((1 << p.head_blocks_log2) - 1)) * 64;
  item.heads = min(p.heads - item.first_head, 64);
  return item;
}

__device__ __forceinline__ int extent_at(const KernelParams& p, int index) {
  return index < p.items ? __ldg(p.extents + (index >> p.head_blocks_log2)) : 0;
}

// The items of this CTA. The extent of the next one is read an item ahead.
class Walk {
 public:
  __device__ __forceinline__ explicit Walk(const KernelParams& p)
      : index_(blockIdx.x), extent_(extent_at(p, index_)) {}

  __device__ __forceinline__ bool next(const KernelParams& p, int& index, int& extent) {
    if (index_ >= p.items) return false;
    index = index_;
    extent = extent_;
    index_ += gridDim.x;
    extent_ = extent_at(p, index_);
    return true;
  }

 private:
  int index_;
  int extent_;
};

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
__device__ __forceinline__ Rows query_rows(const KernelParams& p, int index) {
  const int thread = threadIdx.x & 127;
  const Item item = item_at(p, index);
  const char* q = reinterpret_cast<const char*>(p.q + item.token * p.q_row_stride +
                                                item.first_head * p.q_head_stride) +
                  (thread & 7) * 16;
  Rows rows;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rows.from[i] = q + min((thread >> 3) + 16 * i, item.heads - 1) * p.q_head_stride * 2;
  }
  return rows;
}

// The slots of tiles, in the order in which they are used, two tiles ahead.
class Slots {
 public:
  __device__ __forceinline__ explicit Slots(const KernelParams& p) : walk_(p) {
    take_item(p);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      load(p, ahead_[i], ahead_[i + 1]);
    }
  }

  // Keys of slots lane and lane + 32 of the next tile; out of bounds where the slot does not count.
  __device__ __forceinline__ void next(const KernelParams& p, int& low, int& high) {
    low = ahead_[0], high = ahead_[1];
    ahead_[0] = ahead_[2], ahead_[1] = ahead_[3];
    load(p, ahead_[2], ahead_[3]);
  }

 private:
  __device__ __forceinline__ void take_item(const KernelParams& p) {
    int index;
    left_ = 0;
    while (left_ <= 0 && walk_.next(p, index, left_)) {
      entries_ =
          p.topk_indices + item_at(p, index).token * p.topk_indices_row_stride + (threadIdx.x & 31);
    }
  }

  __device__ __forceinline__ void load(const KernelParams& p, int& low, int& high) {
    const int lane = threadIdx.x & 31;
    low = lane < left_ ? __ldg(entries_) : -1;
    high = lane + 32 < left_ ? __ldg(entries_ + 32) : -1;
    left_ -= 64, entries_ += 64;
    if (left_ <= 0) take_item(p);
  }

  Walk walk_;
  int left_ = 0;  // slots of the item from the next tile on
  const int32_t* entries_ = nullptr;
  int ahead_[4];
};

template <typename Config>
class Producer {
 public:
  __device__ __forceinline__ Producer(const KernelParams& p, SharedStorage<Config>& shared)
      : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run() {
    Slots slots(p_);
    int stage = 0, index, extent;
    for (Walk walk(p_); walk.next(p_, index, extent);) {
      const int tiles = (extent + 63) / 64;
      for (int tile = 0; tile < tiles; ++tile) {
        int low, high;
        slots.next(p_, low, high);
        if (stage == 0) {
          load<0>(low, high, tile == 0, index);
        } else {
          load<1>(low, high, tile == 0, index);
          parity_ ^= 1;
        }
        stage ^= 1;
      }
    }
  }

 private:
  // The tile of slots `low` and `high`; behind an item's first tile, whose stage is empty earlier,
  // the item's q.
  template <int kStage>
  __device__ __forceinline__ void load(int low, int high, bool is_first, int index) {
    const bool low_counts = static_cast<unsigned>(low) < static_cast<unsigned>(p_.t_k);
    const bool high_counts = static_cast<unsigned>(high) < static_cast<unsigned>(p_.t_k);
    const uint32_t low_valid = __ballot_sync(kAllLanes, low_counts);
    const uint32_t high_valid = __ballot_sync(kAllLanes, high_counts);
    const char* kv = reinterpret_cast<const char*>(p_.kv) + piece_ * 16;
    Rows rows;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = row_ + 16 * (i & 1);
      const int key = __shfl_sync(kAllLanes, i < 2 ? low : high, slot);
      const bool counts = ((i < 2 ? low_valid : high_valid) >> slot & 1) != 0;
      rows.from[i] = kv + (counts ? key : 0) * p_.kv_row_bytes;
      if (!counts) rows.count ^= 1u << i;
    }

    const uint32_t to = shared_address(shared_.ring[kStage]) + place_;
    uint64_t* full = shared_.kv_full[kStage];
    uint64_t* empty = shared_.kv_empty[kStage];
    barrier_wait(&empty[kTail], parity_);
    gather_part<8, Config::kTailBlocks>(to, rows, &full[kTail]);
    if (threadIdx.x % 128 == 0) {
      shared_.valid[kStage][0] = low_valid;
      shared_.valid[kStage][1] = high_valid;
      barrier_arrive(&full[kTail]);
    }
    barrier_wait(&empty[kHalf0 + kStage], parity_);  // the owner's half
    gather_part<kStage * 4, 4>(to, rows, &full[kHalf0 + kStage]);
    barrier_wait(&empty[kHalf1 - kStage], parity_);
    gather_part<4 - kStage * 4, 4>(to, rows, &full[kHalf1 - kStage]);

    if (is_first) {
      const uint32_t query = shared_address(shared_.q) + place_;
      rows = query_rows(p_, index);
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

// Logits without a key become -inf; `column` is this lane's first.
__device__ __forceinline__ void mask_scores(float (&s)[32], const uint32_t (&words)[2],
                                            int column) {
  const uint32_t shifted[2] = {words[0] >> column, words[1] >> column};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int bit = 8 * (i >> 2 & 3) + (i & 1);
    if ((shifted[i >> 4] >> bit & 1) == 0) s[i] = -INFINITY;
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

// This side's 256 channels of the item's rows, each times its inverse denominator.
template <typename Config>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item,
                                             const float (&o)[128], const float (&inverse)[2],
                                             int row, int first_channel) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t at = item.token * p.heads + item.first_head + row + 8 * half;
    __nv_bfloat16* to = p.out + at * Config::kValueDim + first_channel + 8 * (lane & 3);
    const bool live = row + 8 * half < item.heads;
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
    const int items = static_cast<int>(p_.items);
    int owner = 0;  // of the item's first tile
    int extent = extent_at(p_, blockIdx.x);
    for (int index = blockIdx.x; index < items; index += gridDim.x) {
      const int next_extent = extent_at(p_, index + gridDim.x);
      const int tiles = (extent + 63) / 64;
      run_item(index, tiles, kSide ^ owner);
      owner ^= tiles & 1;
      extent = next_extent;
    }
  }

 private:
  static constexpr int kOther = kSide ^ 1;

  // Of the own kv_full, the other side's p_full, q_full, sums_full.
  static constexpr int kKeysBit = 0, kProbabilitiesBit = 1, kQueryBit = 2, kItemBit = 3;

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
  __device__ __forceinline__ void run_item(int index, int tiles, int first) {
    Softmax softmax;
    float o[128] = {};
    if (first >= tiles && tiles > 0) warp_arrive(&shared_.q_empty, lane_);
    for (int tile = first; tile < tiles; tile += 2) {
      float s[2][32];
      uint32_t words[2];
      make_scores(s, words, softmax, o, tile > 0, tile == first);
      if (tile + 2 >= tiles) warp_arrive(&shared_.q_empty, lane_);
      take_own(s[0], s[1], words, softmax, o);
    }
    if (((tiles - first) & 1) == 0 && tiles > 0) take_last(softmax, o);
    if (tiles > 0) flip(kQueryBit);
    finish(item_at(p_, index), tiles > 0, softmax, o);
  }

  // S of an own tile and, between its blocks, O += P V of the tile before; of zeros if there is
  // none, as products in a branch would be serialised.
  __device__ __forceinline__ void make_scores(float (&s)[2][32], uint32_t (&words)[2],
                                              Softmax& softmax, float (&o)[128], bool has_before,
                                              bool is_first) {
    uint64_t* full = shared_.kv_full[kSide];
    uint32_t word = 0;
    barrier_wait(&full[kTail], parity(kKeysBit));
    if (lane_ < 2) word = shared_.valid[kSide][lane_];
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
    __syncwarp();
    if (lane_ < 2) barrier_arrive(&shared_.kv_empty[kSide][kTail]);
    flip(kKeysBit);
#pragma unroll
    for (int i = 0; i < 2; ++i) words[i] = __shfl_sync(kAllLanes, word, i);
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
    const volatile float* reference = shared_.reference[kOther] + row_;
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
  __device__ __forceinline__ void take_own(float (&s)[32], float (&more)[32], uint32_t (&words)[2],
                                           Softmax& softmax, float (&o)[128]) {
    uint32_t pairs[4][4];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] += more[i];
    }
    if ((words[0] & words[1]) != ~0u) mask_scores(s, words, 2 * (lane_ & 3));
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

  // P and the reference to the other side.
  __device__ __forceinline__ void hand_over(const uint32_t (&pairs)[4][4], const Softmax& softmax) {
    const int row = warp_ * 16 + (lane_ & 15);  // whose 16 bytes this lane addresses
    const uint32_t to = shared_address(shared_.p) + row * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int piece = 2 * step + (lane_ >> 4);
      stmatrix_x4(to + ((piece ^ (row & 7)) << 4), pairs[step][0], pairs[step][1], pairs[step][2],
                  pairs[step][3]);
    }
    fence_async_shared();
    __syncwarp();
    if ((lane_ & 3) == 0) {
      shared_.reference[kSide][row_] = softmax.reference[0];
      shared_.reference[kSide][row_ + 8] = softmax.reference[1];
      barrier_arrive(&shared_.p_full[kSide]);
    }
  }

  // Adds the sides' sums; out, lse and max_logits of the item. All of it is right for a row without
  // keys, too: a maximum of -inf and a sum of zero.
  __device__ __forceinline__ void finish(const Item& item, bool has_keys, Softmax& softmax,
                                         float (&o)[128]) {
    float2(&sums)[2][Config::kHeads] = shared_.sums;
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
        sums[kSide][row_ + 8 * half] = make_float2(softmax.sum[half], softmax.top[half]);
      }
      barrier_arrive(&shared_.sums_full[kSide]);
      barrier_wait(&shared_.sums_full[kOther], parity(kItemBit));
      const float other_sums[2] = {sums[kOther][row_].x, sums[kOther][row_ + 8].x};
      const float other_tops[2] = {sums[kOther][row_].y, sums[kOther][row_ + 8].y};
      barrier_arrive(&shared_.sums_empty[kOther]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_ + 8 * half, head = item.first_head + row;
        const bool live = row < item.heads;
        const float sum = softmax.sum[half] + other_sums[half], reference = softmax.reference[half];
        const float sink =
            live && p_.attn_sink != nullptr ? __ldg(p_.attn_sink + head) * kLog2E : -INFINITY;
        inverse[half] = !has_keys ? 0.f : inverse_denominator(sum, reference, sink);
        if (kSide == 0 && live) {
          const int64_t at = item.token * p_.heads + head;
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
    store_output<Config>(p_, item, o, inverse, row_, kSide * 256);
  }

  const KernelParams& p_;
  SharedStorage<Config>& shared_;
  const int lane_ = threadIdx.x & 31;
  const int warp_ = threadIdx.x >> 5 & 3;
  const int row_ = warp_ * 16 + (lane_ >> 2);  // this thread's first
  uint32_t parities_ = 0;                      // of the next wait, by bit
};

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (int part = 0; part < kParts; ++part) {
    barrier_init(&shared.q_full[part], 128);
    for (int stage = 0; stage < Config::kStages; ++stage) {
      barrier_init(&shared.kv_full[stage][part], part == kTail ? 128 + 1 : 128);
      barrier_init(&shared.kv_empty[stage][part], part == kTail ? 8 : 4);
    }
  }
  barrier_init(&shared.q_empty, 8);
  for (int side = 0; side < 2; ++side) {
    barrier_init(&shared.p_full[side], 32);
    barrier_init(&shared.sums_full[side], 32);
    barrier_init(&shared.sums_empty[side], 32);
  }
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_forward_many_heads_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared);
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

}  // namespace flashdsa::attention::sm90::forward_many_heads
