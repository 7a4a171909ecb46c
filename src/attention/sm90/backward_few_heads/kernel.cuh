// Sparse MLA attention, backward, on Hopper, for at most 32 heads: one query row an item, with the
// operands swapped, so that keys fill the 64 rows of the products and heads are their columns.
//
//   S^T = scale k q^T,  P = exp(S - ln(e^lse + e^sink)),  dP^T = value grad_out^T
//   D = sum_j P dP,  dS = P (dP - D) scale
//   grad_kv[i_j] += dS^T q (+ P^T grad_out in the first 512 channels),  grad_q^T = sum_j k^T dS
//
// Inputs and outputs: KernelParams of backward/config.h, item = row. Slots that hold no key are
// zero rows with P = 0 and are never added; heads past H are zero rows with P = dS = 0. D begins as
// that of the BF16 out and is settled at the end of an item, grad_q is shifted and grad_kv flagged
// for the repair, as the head of backward/kernel.cuh tells; the repair is that kernel's.
//
// Two numbers of a tile: 64 keys x 2304 bytes are added to grad_kv, which takes an SM 9216 cycles
// at 16 bytes a cycle; all reads of keys from shared memory take 1152. So the adds must never
// pause, and everything else has to stay out of their way.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ..., in step (core/cuda/pace.cuh) where the
// accumulators outgrow second-level cache.    Tile: 64 keys x 8, 16 or 32 heads.
// Warpgroups                                                                          registers
//   0        producer: cp.async gather of the key tiles, q, grad_out                       32
//   1, 2, 3  scorers, every third tile each: S, dP, P, dS; grad_kv, which leaves by adds   80
//   4        grad_q of all tiles, sum P k of the rope channels; D, the end of an item     208
// q and grad_out lie side by side, block by block, so that one product makes S^T and dP^T. P^T and
// dS^T are its accumulators and, packed, register operands of grad_kv. 64 channels of it are made
// at a time and leave as vector adds, so two scorers add while the third scores. D of an item is
// made while the item before it is walked.
//
// Shared memory, bytes at D = 576 and 8 / 16 / 32 heads: q 2 x 9216 / 2 x 18432 / 36864, grad_out
// 2 x 9216 / 2 x 16384 / 32768, two key tiles 147456, P and dS 1024 / 2048 / 4096 each, sums,
// lse, D and barriers 2048 / 3072 / 6144: 188416 / 224256 / 231424.
//
// Barriers; q and grad_out of an item have a place, and so have its lse and D
//   key_full[scorer]    128 cp.async of 0   it waits, parity 0         its next key tile is there
//   key_empty[stage]    4 warps of 4        0 waits, parity 1          grad_q has read it, S and dP
//                                                                      before
//   query_full[place]   128 cp.async of 0   scorers wait, parity 0     q and grad_out are there
//   query_empty[place]  12 warps of the     0 waits, parity 1          nobody reads them any more
//                       scorers
//   weights_full        128 of a scorer     4 waits, parity 0          P and dS of the next tile
//                                                                      are there
//   weights_empty       4 warps of 4        a scorer waits, parity 1   grad_q has read those of the
//                                                                      tile before
//   heads_full[place]   128 of 4            all but 0 wait, parity 0   lse and D are there; no
//                                                                      scorer reads those of the
//                                                                      item before the last
//   sums_full           384 of the scorers  4 waits, parity 0          the item's sums are there
//   sums_empty          128 of 4            scorers, 4 wait, parity 1  they and D have been read
// A scorer takes one phase in three of weights_empty. It cannot mistake an older one for it: its
// key tile came into the place of the last but one, whose weights had been read by then.
//
// Rounded to BF16: P and dS (operands of the second products; P also where it makes dS), grad_q.
// All else is FP32. The order of grad_q's sums depends on the item alone.
#pragma once

#include <cmath>

#include "attention/sm90/backward/kernel.cuh"
#include "attention/sm90/backward_few_heads/config.h"
#include "attention/sm90/forward_common.cuh"
#include "core/cuda/pace.cuh"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::backward_few_heads {

using namespace core::cuda;
using backward_pass::add_chunk, backward_pass::chunk_offset;
using backward_pass::high_bf16, backward_pass::low_bf16, backward_pass::opaque;
using backward_pass::kAllLanes, backward_pass::kLog2E, backward_pass::key_or_none;
using backward_pass::partial_d, backward_pass::rows_operand, backward_pass::whole_lse;

// ------------------------------------------------------------------------------ items

struct Item {
  int place;   // of the query row, counted from first_item
  int extent;  // slots to look at, 0: a row without keys
};

// How many items there are; index < item_count.
__device__ __forceinline__ int item_count(const KernelParams& p) {
  return p.single_rows != nullptr ? __ldg(&p.group_counts->rows) : p.items;
}

__device__ __forceinline__ Item item_at(const KernelParams& p, int index) {
  const int place = p.single_rows != nullptr ? __ldg(p.single_rows + index) : index;
  return {place, __ldg(p.extents + p.first_item + place)};
}

__device__ __forceinline__ int64_t row_of(const KernelParams& p, const Item& item) {
  return p.first_item + item.place;
}

// The next item of this CTA that has keys, from `index` on; false after the last. `skip` is called
// with every row without keys before it.
template <typename Skip>
__device__ __forceinline__ bool find_item(const KernelParams& p, int& index, Item& item,
                                          const Skip& skip) {
  for (const int count = item_count(p); index < count; index += p.ctas) {
    item = item_at(p, index);
    if (item.extent > 0) return true;
    skip(item);
  }
  return false;
}

__device__ __forceinline__ bool find_item(const KernelParams& p, int& index, Item& item) {
  return find_item(p, index, item, [](const Item&) {});
}

template <typename Config>
__device__ __forceinline__ int tiles_of(const Item& item) {
  return (item.extent + Config::kTileKeys - 1) / Config::kTileKeys;
}

__device__ __forceinline__ const int32_t* slots_of(const KernelParams& p, const Item& item) {
  return p.topk_indices + row_of(p, item) * p.topk_indices_row_stride;
}

// The key in a slot, or -1.
__device__ __forceinline__ int key_in(const KernelParams& p, const int32_t* slots, int extent,
                                      int slot) {
  return slot < extent ? key_or_none(p, __ldg(slots + slot)) : -1;
}

// Where the key tile number `n` of the CTA lies.
template <typename Config>
__device__ __forceinline__ int stage_of(uint32_t n) {
  return static_cast<int>(n % Config::kStages);
}

// Where q and grad_out of the CTA's item number `n` are, and the parity with which a scorer waits.
template <typename Config>
__device__ __forceinline__ int query_place(uint32_t n) {
  return static_cast<int>(n % Config::kQueries);
}
template <typename Config>
__device__ __forceinline__ uint32_t query_parity(uint32_t n) {
  return n / Config::kQueries & 1;
}

// Where lse and D of the CTA's item number `n` are.
__device__ __forceinline__ int place_of(uint32_t n) { return static_cast<int>(n & 1); }

// ------------------------------------------------------------------------------ producer

// This thread's piece of `kBlocks` blocks of the heads' rows, into every second of the shared
// blocks; rows past `heads` are zeros.
template <typename Config, int kBlocks>
__device__ __forceinline__ void load_heads(uint32_t to, const __nv_bfloat16* from,
                                           int64_t head_stride, int heads, int row) {
#pragma unroll 1
  for (int head = row; head < Config::kColumns; head += 16) {
    const bool exists = head < heads;
    const __nv_bfloat16* source = exists ? from + head * head_stride : from;
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      cp_async_16(to + opaque((head - row) * 128 + block * 2 * Config::kQueryBlockBytes),
                  source + block * 64, exists ? 16 : 0);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void load_query(const KernelParams& p, SharedStorage<Config>& shared,
                                           const Item& item, int place, int thread) {
  const int row = thread >> 3, piece = thread & 7;
  // Rows row + 16 i have the same swizzle.
  const uint32_t q = shared_address(shared.vectors[place]) + chunk_offset(row, piece);
  load_heads<Config, Config::kBlocks>(q, p.q + row_of(p, item) * p.q_row_stride + piece * 8,
                                      p.q_head_stride, p.heads, row);
  load_heads<Config, Config::kValueBlocks>(
      q + Config::kQueryBlockBytes,
      p.grad_out + row_of(p, item) * p.grad_out_row_stride + piece * 8, p.grad_out_head_stride,
      p.heads, row);
  barrier_arrive_cp_async(&shared.query_full[place]);
}

template <typename Config>
__device__ __forceinline__ void produce(const KernelParams& p, SharedStorage<Config>& shared) {
  const int thread = threadIdx.x & 127, row = thread >> 3, piece = thread & 7;
  const uint32_t keys = shared_address(shared.keys) + chunk_offset(row, piece);
  const uint8_t* kv = reinterpret_cast<const uint8_t*>(p.kv) + piece * 16;
  uint32_t n = 0, items = 0;
  for (int index = blockIdx.x; index < item_count(p); index += p.ctas) {
    keep_pace(p.places, index, threadIdx.x < 32);
    const Item item = item_at(p, index);
    if (item.extent == 0) continue;
    const int32_t* slots = slots_of(p, item);
    const int tiles = tiles_of<Config>(item);
    int next[4];  // keys of the coming tile, -1 for none
#pragma unroll
    for (int i = 0; i < 4; ++i) next[i] = key_in(p, slots, item.extent, row + 16 * i);
    for (int tile = 0; tile < tiles; ++tile, ++n) {
      int current[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        current[i] = next[i];
        next[i] = key_in(p, slots, item.extent, (tile + 1) * 64 + row + 16 * i);
      }
      const int stage = stage_of<Config>(n);
      const uint32_t to = opaque(keys + stage * Config::kBlocks * Config::kBlockBytes);
      barrier_wait(&shared.key_empty[stage], (n / Config::kStages & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint8_t* from =
            kv + uint64_t{static_cast<uint32_t>(max(current[i], 0))} * p.kv_row_bytes;
        const int bytes = current[i] >= 0 ? 16 : 0;
#pragma unroll
        for (int block = 0; block < Config::kBlocks; ++block) {
          cp_async_16(to + block * Config::kBlockBytes + i * 2048, from + block * 128, bytes);
        }
      }
      barrier_arrive_cp_async(&shared.key_full[n % Config::kScorers]);
      // Behind all the key tiles that find room while the item before still reads its q.
      if (tile == min(Config::kStages, tiles) - 1) {
        const int place = query_place<Config>(items);
        barrier_wait(&shared.query_empty[place], query_parity<Config>(items) ^ 1);
        load_query(p, shared, item, place, opaque(thread));
      }
    }
    ++items;
  }
  leave_pace(p.places, threadIdx.x < 32);
}

// ------------------------------------------------------------------------------ scores, grad_kv

// BF16 pairs of columns 8i + 2 (lane % 4) + {0, 1}: [i][0] of this thread's first key, row lane / 4
// of its warp's 16, [i][1] of its second, 8 rows further.
template <typename Config>
using Pairs = uint32_t[Config::kColumns / 8][2];

// S^T and dP^T of a tile, side by side in one product: so every key is read once for both.
template <typename Config>
__device__ __forceinline__ void make_scores(SharedStorage<Config>& shared, int stage, int place,
                                            float (&s)[Config::kColumns / 2],
                                            float (&dp)[Config::kColumns / 2]) {
  constexpr int kHalf = Config::kColumns / 2;
  // Blocks that grad_out has, or zeros in its place. What is left is the rope block of S, which is
  // summed apart: products of two sizes cannot share accumulators.
  constexpr int kBoth = Config::kVectorBlocks / 2;
  const uint32_t keys = shared_address(shared.keys[stage]);
  const uint32_t vectors = shared_address(shared.vectors[place]);
  float both[2 * kHalf], rest[kHalf];
  wgmma_fence();
#pragma unroll
  for (int i = kBoth * 4; i < Config::kBlocks * 4; ++i) {
    const int block = i >> 2, step = (i & 3) * 32;
    Wgmma<Config::kColumns>::shared(
        rest, rows_operand(keys + block * Config::kBlockBytes + step),
        rows_operand(vectors + block * 2 * Config::kQueryBlockBytes + step), i != kBoth * 4);
  }
#pragma unroll
  for (int i = 0; i < kBoth * 4; ++i) {
    const int block = i >> 2, step = (i & 3) * 32;
    Wgmma<2 * Config::kColumns>::shared(
        both, rows_operand(keys + block * Config::kBlockBytes + step),
        rows_operand(vectors + block * 2 * Config::kQueryBlockBytes + step), i != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(both);
  if constexpr (kBoth < Config::kBlocks) wgmma_pin(rest);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    s[i] = kBoth < Config::kBlocks ? both[i] + rest[i] : both[i];
    dp[i] = both[kHalf + i];
  }
}

// S -> P, as it is multiplied. Heads that do not exist, whose lse is +inf, have P = 0 whatever keys
// hold.
template <typename Config>
__device__ __forceinline__ void softmax(const float (&s)[Config::kColumns / 2], const float* lse,
                                        float scale_log2, bool first, bool second, Pairs<Config>& p,
                                        int lane) {
#pragma unroll
  for (int i = 0; i < Config::kColumns / 8; ++i) {
    const float2 l = reinterpret_cast<const float2*>(lse)[4 * i + (lane & 3)];
    const uint32_t mask = (l.x == INFINITY ? 0 : 0x0000FFFFu) | (l.y == INFINITY ? 0 : 0xFFFF0000u);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float x = exp2_fast(fmaf(s[4 * i + 2 * e], scale_log2, -l.x));
      const float y = exp2_fast(fmaf(s[4 * i + 2 * e + 1], scale_log2, -l.y));
      p[i][e] = (e == 0 ? first : second) ? pack_bf16(x, y) & mask : 0;
    }
  }
}

// Sums x[i] over the eight lanes that hold the same columns, those that differ in bits 2 to 4. Lane
// l is left with the sum of x[l / 4 * N / 8] alone: at each step lanes exchange the half that the
// other keeps, so eight numbers take 7 exchanges and not 24. With N < 8 several have the same.
template <int N>
__device__ __forceinline__ float spread_sum(float (&x)[N], int lane) {
  int bit = 16;
#pragma unroll
  for (int n = N / 2; n > 0; n /= 2, bit /= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float kept = upper ? x[n + i] : x[i], given = upper ? x[i] : x[n + i];
      x[i] = kept + __shfl_xor_sync(kAllLanes, given, bit);
    }
  }
#pragma unroll
  for (; bit >= 4; bit /= 2) x[0] += __shfl_xor_sync(kAllLanes, x[0], bit);
  return x[0];
}

// dS = P (dP - D) scale, and the sums of P, P u and P u^2, where u = dP - D of the BF16 out, which
// are added to the warp's of the item or begin them. In registers through the adds of grad_kv, the
// sums would be too many.
template <typename Config>
__device__ __forceinline__ void make_ds(const float (&dp)[Config::kColumns / 2], const float* d,
                                        float scale, const Pairs<Config>& p, Pairs<Config>& ds,
                                        float (&sums)[3][Config::kColumns], bool begins, int lane) {
  constexpr int kLot = Config::kColumns < 32 ? Config::kColumns : 32;  // columns summed together
  constexpr int kOwn = kLot / 4;                                       // of them, of a lane
  const int kept = lane / 4 * kOwn / 8;  // which of its own it is left with
  const int column = kept / 2 * 8 + 2 * (lane & 3) + kept % 2;
  const bool adds = (lane & (32 / kOwn - 1) & ~3) == 0;  // others have the same sum
#pragma unroll
  for (int lot = 0; lot < Config::kColumns; lot += kLot) {
    float sum[3][kOwn] = {};
#pragma unroll
    for (int i = 0; i < kLot / 8; ++i) {
      const int at = lot / 8 + i;
      const float2 mean = reinterpret_cast<const float2*>(d)[4 * at + (lane & 3)];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float p0 = low_bf16(p[at][e]), p1 = high_bf16(p[at][e]);
        const float u0 = dp[4 * at + 2 * e] - mean.x, u1 = dp[4 * at + 2 * e + 1] - mean.y;
        const float pu0 = p0 * u0, pu1 = p1 * u1;
        sum[0][2 * i] += p0;
        sum[0][2 * i + 1] += p1;
        sum[1][2 * i] += pu0;
        sum[1][2 * i + 1] += pu1;
        sum[2][2 * i] = fmaf(pu0, u0, sum[2][2 * i]);
        sum[2][2 * i + 1] = fmaf(pu1, u1, sum[2][2 * i + 1]);
        ds[at][e] = pack_bf16(pu0 * scale, pu1 * scale);
      }
    }
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
      const float of_tile = spread_sum(sum[kind], lane);
      float& to = sums[kind][lot + column];
      if (adds) to = begins ? of_tile : to + of_tile;
    }
  }
}

// A warp's 16 keys of P or dS into rows of heads.
template <typename Config>
__device__ __forceinline__ void store_weights(uint32_t to, const Pairs<Config>& pairs, int warp,
                                              int lane) {
  // Lanes 8m .. 8m + 7 address the eight heads of matrix m: eight keys, of two lots, each.
  to += chunk_offset(lane & 7, 2 * warp + ((lane >> 3) & 1));
  if constexpr (Config::kColumns == 8) {
    stmatrix_x2_transposed(to, pairs[0][0], pairs[0][1]);
  } else {
#pragma unroll
    for (int i = 0; i < Config::kColumns / 8; i += 2) {
      stmatrix_x4_transposed(to + (i + (lane >> 4)) * 1024, pairs[i][0], pairs[i][1],
                             pairs[i + 1][0], pairs[i + 1][1]);
    }
  }
}

// d = (dS^T q + P^T grad_out) of the tile's 64 slots x the 64 channels of block `block`.
template <typename Config>
__device__ __forceinline__ void grad_kv_products(SharedStorage<Config>& shared, float (&d)[32],
                                                 const Pairs<Config>& p, const Pairs<Config>& ds,
                                                 int place, int block) {
  const uint32_t q = shared_address(shared.vectors[place]) + block * 2 * Config::kQueryBlockBytes;
  const uint32_t grad_out = q + Config::kQueryBlockBytes;
  wgmma_fence();
  if constexpr (Config::kPairs) {
    const uint32_t a[4] = {ds[0][0], ds[0][1], p[0][0], p[0][1]};
    Wgmma<64>::registers<1>(d, a, wgmma_descriptor(q, Config::kQueryBlockBytes, grad_out - q), 0);
  } else {
#pragma unroll
    for (int k = 0; k < Config::kColumns / 16; ++k) {
      const uint32_t a[4] = {ds[2 * k][0], ds[2 * k][1], ds[2 * k + 1][0], ds[2 * k + 1][1]};
      Wgmma<64>::registers<1>(d, a, wgmma_descriptor(q + k * 2048, Config::kQueryBlockBytes, 1024),
                              k != 0);
    }
    if (block < Config::kValueBlocks) {
#pragma unroll
      for (int k = 0; k < Config::kColumns / 16; ++k) {
        const uint32_t a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
        Wgmma<64>::registers<1>(
            d, a, wgmma_descriptor(grad_out + k * 2048, Config::kQueryBlockBytes, 1024), 1);
      }
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
}

// P and dS of a tile, `number` of the CTA, `tile` of the item: as operands of grad_kv, and in
// shared memory for grad_q. `key` is what lies in slot lane % 16 of the warp's.
template <typename Config>
__device__ __forceinline__ void make_weights(const KernelParams& p, SharedStorage<Config>& shared,
                                             uint32_t number, int tile, uint32_t items, int key,
                                             Pairs<Config>& weights, Pairs<Config>& ds) {
  const int thread = opaque(static_cast<int>(threadIdx.x)), lane = thread & 31;
  const int warp = thread >> 5 & 3;
  float s[Config::kColumns / 2], dp[Config::kColumns / 2];
  barrier_wait(&shared.key_full[number % Config::kScorers], number / Config::kScorers & 1);
  fence_async_shared();
  make_scores(shared, stage_of<Config>(number), query_place<Config>(items), s, dp);
  const bool first = __shfl_sync(kAllLanes, key, lane >> 2) >= 0;
  const bool second = __shfl_sync(kAllLanes, key, 8 + (lane >> 2)) >= 0;
  softmax<Config>(s, shared.lse_log2[place_of(items)], p.softmax_scale * kLog2E, first, second,
                  weights, lane);
  const bool begins = tile < Config::kScorers;
  if (begins) barrier_wait(&shared.sums_empty, (items & 1) ^ 1);
  make_ds<Config>(dp, shared.d[place_of(items)], p.softmax_scale, weights, ds,
                  shared.sums[tile % Config::kScorers * 4 + warp], begins, lane);
  barrier_wait(&shared.weights_empty, (number & 1) ^ 1);
  store_weights<Config>(shared_address(shared.p), weights, warp, lane);
  store_weights<Config>(shared_address(shared.ds), ds, warp, lane);
  fence_async_shared();
  barrier_arrive(&shared.weights_full);
}

// Nothing of q and grad_out will be read any more.
template <typename Config>
__device__ __forceinline__ void leave_query(SharedStorage<Config>& shared, int place) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.query_empty[place]);
}

// The scorers. Each takes every third tile of the CTA, wherever an item begins.
template <typename Config>
__device__ __forceinline__ void score(const KernelParams& p, SharedStorage<Config>& shared) {
  uint32_t number = opaque(static_cast<int>(threadIdx.x)) / 128 - 1;  // of this scorer's next tile
  uint32_t first = 0, items = 0;  // tiles, items before this one
  Item item;
  for (int index = blockIdx.x; find_item(p, index, item); index += p.ctas, ++items) {
    const int place = query_place<Config>(items);
    const uint32_t end = first + tiles_of<Config>(item);
    barrier_wait(&shared.heads_full[place_of(items)], items >> 1 & 1);
    barrier_wait(&shared.query_full[place], query_parity<Config>(items));
    if (number >= end) {
      barrier_wait(&shared.sums_empty, (items & 1) ^ 1);  // not to arrive for the item before
      barrier_arrive(&shared.sums_full);
      leave_query(shared, place);
    }
    for (; number < end; number += Config::kScorers) {
      const int thread = opaque(static_cast<int>(threadIdx.x & 127)), lane = thread & 31;
      const int tile = static_cast<int>(number - first);
      const int slot = tile * Config::kTileKeys + (thread >> 5) * 16 + (lane & 15);
      const Item again = item_at(p, opaque(index));  // holding it would take a register too many
      const int key = key_in(p, slots_of(p, again), again.extent, slot);
      const bool last = number + Config::kScorers >= end;
      Pairs<Config> weights, ds;
      make_weights(p, shared, number, tile, items, key, weights, ds);
      if (last) barrier_arrive(&shared.sums_full);
      int rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[i] = __shfl_sync(kAllLanes, key, ((lane >> 2) & 3) + 4 * i);
      }
#pragma unroll 1
      for (int block = 0; block < Config::kBlocks; ++block) {
        float d[32];
        grad_kv_products(shared, d, weights, ds, place, block);
        if (last && block == Config::kBlocks - 1) leave_query(shared, place);
        add_chunk<Config>(d, rows, p.grad_kv_rows + block * 64, lane);
      }
    }
    first = end;
  }
}

// ------------------------------------------------------------------------------ grad_q

// grad_q^T: channels 64 block + 16 warp + lane / 4 + {0, 8} of columns 8i + 2 (lane % 4) + {0, 1}
// lie in [block][4i + {0, 1}], [block][4i + {2, 3}].
template <typename Config>
using GradQ = float[Config::kBlocks][Config::kColumns / 2];

// lse and D of the BF16 out of an item.
template <typename Config>
__device__ __forceinline__ void prepare_heads(const KernelParams& p, SharedStorage<Config>& shared,
                                              const Item& item, int place) {
  constexpr int kWarpHeads = Config::kColumns / 4;
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int first = (thread >> 5) * kWarpHeads;
  const __nv_bfloat16* out = p.out + row_of(p, item) * p.out_row_stride;
  const __nv_bfloat16* grad_out = p.grad_out + row_of(p, item) * p.grad_out_row_stride;
  float d = 0.0f, lse = INFINITY;
#pragma unroll 2
  for (int i = 0; i < kWarpHeads; ++i) {
    const int64_t head = first + i;
    if (head >= p.heads) break;
    float sum = partial_d<Config>(out + head * p.out_head_stride,
                                  grad_out + head * p.grad_out_head_stride, lane);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (lane == i) d = sum;
  }
  if (lane < kWarpHeads) {
    const int head = first + lane;
    if (head < p.heads) {
      lse = __ldg(p.lse + row_of(p, item) * p.lse_row_stride + head);
      if (p.attn_sink != nullptr) lse = whole_lse(lse, __ldg(p.attn_sink + head));
    }
    shared.lse_log2[place][head] = lse * kLog2E;
    shared.d[place][head] = d;
  }
  barrier_arrive(&shared.heads_full[place]);
}

// grad_q^T += k^T dS and, of the rope channels, p_k += k^T P of a tile.
template <typename Config>
__device__ __forceinline__ void grad_q_products(SharedStorage<Config>& shared, int stage,
                                                GradQ<Config>& grad_q,
                                                float (&p_k)[Config::kColumns / 2]) {
  const uint64_t keys =
      wgmma_descriptor(shared_address(shared.keys[stage]), Config::kBlockBytes, 1024);
  const uint64_t ds = wgmma_descriptor(shared_address(shared.ds), 16, 1024);
  const uint64_t weights = wgmma_descriptor(shared_address(shared.p), 16, 1024);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kTileKeys / 16; ++step) {
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      Wgmma<Config::kColumns>::template shared<1, 0>(
          grad_q[block], keys + ((block * Config::kBlockBytes + step * 2048) >> 4),
          ds + (step * 32 >> 4), 1);
    }
    if constexpr (Config::kSumsRope) {
      Wgmma<Config::kColumns>::template shared<1, 0>(
          p_k, keys + ((Config::kRope * Config::kBlockBytes + step * 2048) >> 4),
          weights + (step * 32 >> 4), 1);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) wgmma_pin(grad_q[block]);
  wgmma_pin(p_k);
}

// Settles D, as settle_d of backward/kernel.cuh; every warp does the same, lane h for head h, and
// the first stores. Returns the shift of dS / P that grad_q lacks.
template <typename Config>
__device__ __forceinline__ float settle(const KernelParams& p, SharedStorage<Config>& shared,
                                        const Item& item, int place) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int parts = 4 * min(tiles_of<Config>(item), Config::kScorers);  // others had no tile
  const int column = min(lane, Config::kColumns - 1), head = min(lane, p.heads - 1);
  const bool live = lane < p.heads;
  float3 sums = {};
  for (int part = 0; part < parts; ++part) {
    sums.x += shared.sums[part][0][column];
    sums.y += shared.sums[part][1][column];
    sums.z += shared.sums[part][2][column];
  }
  const float d = shared.d[place][column];
  barrier_arrive(&shared.sums_empty);
  float p_sink = 0.0f, mass = 1.0f;  // of the softmax
  if (p.attn_sink != nullptr) {
    const float sink = __ldg(p.attn_sink + head);
    const float lse = __ldg(p.lse + row_of(p, item) * p.lse_row_stride + head);
    p_sink = 1.0f / (1.0f + expf(lse - sink));
    mass = 1.0f / (1.0f + expf(sink - lse));
  }
  const bool has_mass = !(sums.x == 0.0f);  // NaN counts
  const float mean = has_mass ? sums.y / sums.x : 0.0f;
  const float error = has_mass ? mass * mean - p_sink * d : 0.0f;
  const float variance = fmaxf(sums.z / sums.x - mean * mean, 0.0f);
  const uint32_t spoilt = __ballot_sync(kAllLanes, live && error * error > 0x1p-12f * variance);
  if (thread < 32 && live) {
    const int64_t at = row_of(p, item) * p.heads + head;
    p.d_errors[at] = error;
    if (p.sink_terms != nullptr) p.sink_terms[at] = has_mass ? p_sink * (d + error) : 0.0f;
  }
  if (thread == 0) {  // a byte for 16 heads
    reinterpret_cast<uint32_t*>(p.needs_repair)[row_of(p, item)] =
        ((spoilt & 0xFFFF) != 0 ? 1 : 0) | (spoilt >> 16 != 0 ? 0x100 : 0);
  }
  return live ? -p.softmax_scale * error : 0.0f;
}

// grad_q += shift * sum P k, whose first 512 channels are out, and into global memory. Lane h of
// every warp has the shift of head h.
template <typename Config>
__device__ __forceinline__ void store_grad_q(const KernelParams& p, const Item& item,
                                             const GradQ<Config>& grad_q,
                                             const float (&p_k)[Config::kColumns / 2],
                                             float shift) {
  const int thread = threadIdx.x & 127, lane = thread & 31, warp = thread >> 5;
#pragma unroll
  for (int i = 0; i < Config::kColumns / 8; ++i) {
    const float shift0 = __shfl_sync(kAllLanes, shift, 8 * i + 2 * (lane & 3));
    const float shift1 = __shfl_sync(kAllLanes, shift, 8 * i + 2 * (lane & 3) + 1);
    const int head = 8 * i + (lane >> 2);
    const bool live = head < p.heads;
    const __nv_bfloat16* out = p.out + row_of(p, item) * p.out_row_stride +
                               min(head, p.heads - 1) * p.out_head_stride + 16 * warp +
                               2 * (lane & 3);
    __nv_bfloat16* to = p.grad_q + (row_of(p, item) * p.heads + head) * Config::kHeadDim +
                        16 * warp + 8 * (lane & 1) + 64 * ((lane >> 1) & 1);
    // Channels 8e .. 8e + 7 of the warp's 16 of a block, a head to four lanes.
    const auto word = [&](int block, int e) {
      const float* pair = &grad_q[block][4 * i + 2 * e];
      float2 sum;  // of P k
      if (Config::kSumsRope && block == Config::kRope) {
        sum = make_float2(p_k[4 * i + 2 * e], p_k[4 * i + 2 * e + 1]);
      } else {
        const uint32_t heads =
            transpose_8x8(__ldg(reinterpret_cast<const uint32_t*>(out + 64 * block + 8 * e)));
        sum = make_float2(low_bf16(heads), high_bf16(heads));
      }
      return transpose_8x8(pack_bf16(fmaf(shift0, sum.x, pair[0]), fmaf(shift1, sum.y, pair[1])));
    };
#pragma unroll
    for (int block = 0; block < Config::kBlocks; block += 2) {
      const bool whole = block + 1 < Config::kBlocks;
      uint32_t words[4] = {word(block, 0), word(block, 1), 0, 0};
      if (whole) words[2] = word(block + 1, 0), words[3] = word(block + 1, 1);
      transpose_quad(words, lane);  // lane j of four has all of word j
      if (live && (whole || (lane & 2) == 0)) {
        *reinterpret_cast<uint4*>(to + 64 * block) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// A row without keys: grad_q and the sink's part are zero.
template <typename Config>
__device__ __forceinline__ void write_empty_item(const KernelParams& p, const Item& item) {
  const int thread = threadIdx.x & 127;
  const int64_t first = row_of(p, item) * p.heads;
  auto* to = reinterpret_cast<uint4*>(p.grad_q + first * Config::kHeadDim);
  for (int i = thread; i < p.heads * Config::kHeadDim / 8; i += 128) to[i] = make_uint4(0, 0, 0, 0);
  if (p.sink_terms != nullptr && thread < p.heads) p.sink_terms[first + thread] = 0.0f;
}

// Warpgroup 4.
template <typename Config>
__device__ __forceinline__ void run_grad_q(const KernelParams& p, SharedStorage<Config>& shared) {
  const int lane = threadIdx.x & 31;
  uint32_t n = 0;
  int index = blockIdx.x;
  Item item, next;
  const auto find = [&] {
    return find_item(p, index, next,
                     [&](const Item& empty) { write_empty_item<Config>(p, empty); });
  };
  bool more = find();
  if (more) prepare_heads(p, shared, next, 0);
  for (uint32_t items = 0; more; ++items) {
    item = next;
    barrier_wait(&shared.heads_full[place_of(items)], items >> 1 & 1);
    barrier_wait(&shared.sums_empty, (items & 1) ^ 1);
    index += p.ctas;
    more = find();
    if (more) prepare_heads(p, shared, next, place_of(items + 1));

    GradQ<Config> grad_q = {};
    float p_k[Config::kColumns / 2] = {};
    const int tiles = tiles_of<Config>(item);
    for (int tile = 0; tile < tiles; ++tile, ++n) {
      barrier_wait(&shared.weights_full, n & 1);
      fence_async_shared();
      grad_q_products(shared, stage_of<Config>(n), grad_q, p_k);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.weights_empty);
        barrier_arrive(&shared.key_empty[stage_of<Config>(n)]);
      }
    }
    barrier_wait(&shared.sums_full, items & 1);
    const float shift = settle(p, shared, item, place_of(items));
    store_grad_q<Config>(p, item, grad_q, p_k, shift);
  }
}

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (auto& barrier : shared.key_full) barrier_init(&barrier, 128);
  for (auto& barrier : shared.key_empty) barrier_init(&barrier, 4);
  for (int place = 0; place < Config::kQueries; ++place) {
    barrier_init(&shared.query_full[place], 128);
    barrier_init(&shared.query_empty[place], Config::kScorers * 4);
  }
  barrier_init(&shared.weights_full, 128);
  barrier_init(&shared.weights_empty, 4);
  for (auto& barrier : shared.heads_full) barrier_init(&barrier, 128);
  barrier_init(&shared.sums_full, Config::kScorers * 128);
  barrier_init(&shared.sums_empty, 128);
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_backward_few_heads_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if (threadIdx.x == 0) init_barriers(shared);
  if constexpr (Config::kPairs && Config::kSumsRope) {  // what grad_out lacks
    for (auto& vectors : shared.vectors) {
      auto* zeros =
          reinterpret_cast<uint32_t*>(vectors + (2 * Config::kRope + 1) * Config::kQueryBlockBytes);
      for (int i = threadIdx.x; i < Config::kQueryBlockBytes / 4; i += Config::kThreads) {
        zeros[i] = 0;
      }
    }
    fence_async_shared();
  }
  __syncthreads();

  const int warpgroup = threadIdx.x >> 7;
  if (warpgroup == 0) {
    shrink_registers<Config::kProducerRegisters>();
    produce(p, shared);
  } else if (warpgroup < 1 + Config::kScorers) {
    shrink_registers<Config::kScoreRegisters>();
    score(p, shared);
  } else {
    grow_registers<Config::kGradQRegisters>();
    run_grad_q(p, shared);
  }
}

}  // namespace flashdsa::attention::sm90::backward_few_heads
