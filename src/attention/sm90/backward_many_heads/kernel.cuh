// Sparse MLA attention, backward, on Hopper, for items of up to 64 vectors: the heads of a query
// row, or several rows of up to 32 heads that select nearly the same keys. Two CTAs of a cluster,
// the partners, share an item and have half of the channels each. Keys fill the 64 rows of the
// products, as in the kernel for few heads.
//
//   S^T = scale k q^T,  P = exp(S - ln(e^lse + e^sink)),  dP^T = value grad_out^T
//   D = sum_j P dP,  dS = P (dP - D) scale
//   grad_kv[i_j] += dS^T q (+ P^T grad_out in the first 512 channels),  grad_q^T = sum_j k^T dS
//
// Inputs and outputs: KernelParams of backward/config.h. Slots that hold no key are zero rows with
// P = 0 and are never added; vectors past the item's are zeros with P = dS = 0. D begins as that of
// the BF16 out and is settled at the end of an item, grad_q is shifted and grad_kv flagged for the
// repair, as the head of backward/kernel.cuh tells, and so are Config::kGroups; the repair is that
// kernel's.
//
// Two numbers of a tile of 64 keys, of a CTA: 73728 bytes are added to grad_kv, which takes an SM
// 4608 cycles at 16 bytes a cycle; the products take 2816. So the adds must never pause. One CTA
// has no room for a second key tile beside q and grad_out of 64 heads and their grad_q; half of
// the channels leave room for both, at the price of sums of S and dP over the partners.
//
// Channels: CTA r has the value channels 256 r .. 256 r + 255, four blocks of 64. Both have the
// block of the rope channels: r's part of S is 32 of them, grad_q is made by 0, sum P k by 1, and a
// scorer's turns at their grad_kv alternate between the partners.
//
// Grid: pairs of CTAs, one CTA per SM; pair n has items n, + ctas, ...    Tile: 64 keys x 64
// vectors. Warpgroups registers
//   0     producer: cp.async gather of the key tiles, q, grad_out                          40
//   1, 2  scorers, every second tile each: S, dP, P, dS; grad_kv, which leaves by adds    128
//   3     grad_q of all tiles, sum P k of the rope channels; D, the end of an item        216
// P^T and dS^T are accumulators of the first products and, packed, register operands of grad_kv. 64
// channels of it are made at a time and leave as vector adds. Both partners make all P and dS: a
// thread sends its partial sums to the thread of the same number, so they hold the same bits.
//
// Shared memory, bytes at D = 576: q 40960, grad_out 32768, two key tiles 81920, P and dS 8192
// each, partner's partial sums 2 x 16384, its sum P k 16384, sums, lse, D and barriers 8192:
// 229376.
//
// Barriers; lse and D of an item have a place
//   key_full[scorer]      128 cp.async of 0   it waits, parity 0         its next key tile is there
//   key_empty[stage]      4 warps of 3        0 waits, parity 1          grad_q has read it, S and
//                                                                        dP before
//   query_full            128 cp.async of 0   scorers wait, parity 0     q and grad_out are there
//   query_empty           8 warps of the      0 waits, parity 1          nobody reads them any more
//                         scorers
//   partner_full[scorer]  16384 bytes of the  it waits, parity 0 for S,  partial sums are there
//                         partner's           1 for dP
//   partner_empty[scorer] 4 warps of the      it waits, parity 1 for S,  the partner has read those
//                         partner's           0 for dP                   sent before
//   weights_full          128 of a scorer     3 waits, parity 0          P and dS of the next tile
//                                                                        are there
//   weights_empty         4 warps of 3        a scorer waits, parity 1   grad_q has read those of
//                                                                        the tile before
//   heads_full[place]     128 of 3            scorers, 3 wait, parity 0  lse and D are there; no
//                                                                        scorer reads those of the
//                                                                        item before the last
//   sums_full             256 of the scorers  3 waits, parity 0          the item's sums are there
//   sums_empty            128 of 3            scorers, 3 wait, parity 1  they and D have been read
//   p_k_full              16384 bytes of CTA  3 of CTA 0 waits,          sum P k is there
//                         1                   parity 0
//   p_k_empty             4 warps of CTA 0    3 of CTA 1 waits,          it has been read
//                                             parity 1
// A scorer takes one phase in two of weights_empty. It cannot mistake an older one for it: its key
// tile came into the place of the last but one, whose weights had been read by then.
//
// Rounded to BF16: P and dS (operands of the second products; P also where it makes dS), grad_q.
// All else is FP32. The order of grad_q's sums depends on the item alone.
#pragma once

#include <cmath>

#include "attention/sm90/backward/kernel.cuh"
#include "attention/sm90/backward_few_heads/kernel.cuh"
#include "attention/sm90/backward_many_heads/config.h"
#include "attention/sm90/forward_common.cuh"
#include "core/cuda/pace.cuh"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::backward_many_heads {

using namespace core::cuda;
using backward_few_heads::Pairs, backward_few_heads::make_ds, backward_few_heads::place_of;
using backward_few_heads::stage_of, backward_few_heads::store_weights;
using backward_pass::grad_out_of, backward_pass::head_of, backward_pass::high_bf16;
using backward_pass::Item, backward_pass::add_chunk, backward_pass::chunk_offset;
using backward_pass::item_at, backward_pass::item_count, backward_pass::kAllLanes;
using backward_pass::key_or_none, backward_pass::kLog2E, backward_pass::kNoPair;
using backward_pass::load_vectors, backward_pass::low_bf16, backward_pass::lse_of;
using backward_pass::opaque, backward_pass::out_of, backward_pass::partial_d;
using backward_pass::read_entries, backward_pass::rows_operand, backward_pass::tiles_of;
using backward_pass::token_of, backward_pass::whole_lse, backward_pass::words_of_tile;

// ------------------------------------------------------------------------------ items

__device__ __forceinline__ int first_index() { return static_cast<int>(blockIdx.x >> 1); }

// The next item of this pair that has keys, from `index` on; false after the last. `skip` is called
// with every row without keys before it.
template <typename Config, typename Skip>
__device__ __forceinline__ bool find_item(const KernelParams& p, int& index, Item& item,
                                          const Skip& skip) {
  for (const int count = item_count<Config>(p); index < count; index += p.ctas) {
    item = item_at<Config>(p, index);
    if (item.extent > 0) return true;
    skip(item);
  }
  return false;
}

template <typename Config>
__device__ __forceinline__ bool find_item(const KernelParams& p, int& index, Item& item) {
  return find_item<Config>(p, index, item, [](const Item&) {});
}

// First channel of block `block` of CTA `rank`.
template <typename Config>
__device__ __forceinline__ int channel_of(uint32_t rank, int block) {
  return block == Config::kRope ? Config::kValueDim
                                : static_cast<int>(rank) * Config::kValueDim / 2 + block * 64;
}

// ------------------------------------------------------------------------------ producer

template <typename Config>
__device__ __forceinline__ void load_query(const KernelParams& p, SharedStorage<Config>& shared,
                                           const Item& item, uint32_t rank, int thread) {
  const int row = thread >> 3, piece = thread & 7, channel = channel_of<Config>(rank, 0);
  const uint32_t offset = chunk_offset(row, piece);  // rows row + 16 i have the same swizzle
  const __nv_bfloat16* q =
      p.q + item.token * p.q_row_stride + item.first_head * p.q_head_stride + piece * 8;
  const __nv_bfloat16* grad_out = p.grad_out + item.token * p.grad_out_row_stride +
                                  item.first_head * p.grad_out_head_stride + piece * 8;
  load_vectors<Config, Config::kValueBlocks>(p, shared_address(shared.q) + offset, q + channel,
                                             p.q_row_stride, p.q_head_stride, item.rows, row);
  if constexpr (Config::kHasRope) {
    load_vectors<Config, 1>(p,
                            shared_address(shared.q) + Config::kRope * Config::kChunkBytes + offset,
                            q + Config::kValueDim, p.q_row_stride, p.q_head_stride, item.rows, row);
  }
  load_vectors<Config, Config::kValueBlocks>(p, shared_address(shared.grad_out) + offset,
                                             grad_out + channel, p.grad_out_row_stride,
                                             p.grad_out_head_stride, item.rows, row);
  barrier_arrive_cp_async(&shared.query_full);
}

template <typename Config>
__device__ __forceinline__ void produce(const KernelParams& p, SharedStorage<Config>& shared,
                                        uint32_t rank) {
  const int thread = threadIdx.x & 127, row = thread >> 3, piece = thread & 7;
  const uint32_t keys = shared_address(shared.keys) + chunk_offset(row, piece);
  const uint8_t* kv =
      reinterpret_cast<const uint8_t*>(p.kv) + channel_of<Config>(rank, 0) * 2 + piece * 16;
  const int to_rope = (Config::kValueDim - channel_of<Config>(rank, 0)) * 2;  // bytes
  uint32_t n = 0, items = 0, passed = 0;
  Item item;
  for (int index = first_index(); find_item<Config>(p, index, item); index += p.ctas, ++items) {
    const uint32_t place = index - first_index();
    keep_pace(p.places, threadIdx.x < 32, place, place - passed);
    passed = place;
    const int tiles = tiles_of(item);
    int next[4];  // entries of the coming tile
    read_entries<Config, 16>(p, item, index, row, next);
    for (int tile = 0; tile < tiles; ++tile, ++n) {
      int current[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) current[i] = key_or_none(p, next[i]);
      read_entries<Config, 16>(p, item, index, (tile + 1) * 64 + row, next);
      const int stage = stage_of<Config>(n);
      const uint32_t to = opaque(keys + stage * Config::kBlocks * Config::kChunkBytes);
      barrier_wait(&shared.key_empty[stage], (n / Config::kStages & 1) ^ 1);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = opaque(current[i]);
        const uint8_t* from = kv + uint64_t{static_cast<uint32_t>(max(key, 0))} * p.kv_row_bytes;
        const int bytes = key >= 0 ? 16 : 0;
#pragma unroll
        for (int block = 0; block < Config::kBlocks; ++block) {
          cp_async_16(to + block * Config::kChunkBytes + i * 2048,
                      from + (block == Config::kRope ? to_rope : block * 128), bytes);
        }
      }
      barrier_arrive_cp_async(&shared.key_full[n % Config::kScorers]);
      // Behind all the key tiles that find room while the item before still reads its q.
      if (tile == min(Config::kStages, tiles) - 1) {
        barrier_wait(&shared.query_empty, (items & 1) ^ 1);
        load_query(p, shared, item_at<Config>(p, opaque(index)), rank, opaque(thread));
      }
    }
  }
  keep_pace(p.places, threadIdx.x < 32, 0, item_count<Config>(p) - passed);
}

// ------------------------------------------------------------------------------ scores, grad_kv

// Issues the CTA's part of S^T of a tile.
template <typename Config>
__device__ __forceinline__ void issue_s(SharedStorage<Config>& shared, int stage, uint32_t rank,
                                        float (&s)[32]) {
  const uint32_t keys = shared_address(shared.keys[stage]), q = shared_address(shared.q);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kValueBlocks * 4; ++i) {
    const uint32_t at = (i >> 2) * Config::kChunkBytes + (i & 3) * 32;
    Wgmma<64>::shared(s, rows_operand(keys + at), rows_operand(q + at), i != 0);
  }
  if constexpr (Config::kHasRope) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t at = Config::kRope * Config::kChunkBytes + rank * 64 + i * 32;
      Wgmma<64>::shared(s, rows_operand(keys + at), rows_operand(q + at), 1);
    }
  }
  wgmma_commit();
}

// The same of dP^T.
template <typename Config>
__device__ __forceinline__ void issue_dp(SharedStorage<Config>& shared, int stage,
                                         float (&dp)[32]) {
  const uint32_t keys = shared_address(shared.keys[stage]);
  const uint32_t grad_out = shared_address(shared.grad_out);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < Config::kValueBlocks * 4; ++i) {
    const uint32_t at = (i >> 2) * Config::kChunkBytes + (i & 3) * 32;
    Wgmma<64>::shared(dp, rows_operand(keys + at), rows_operand(grad_out + at), i != 0);
  }
  wgmma_commit();
}

// Sends this thread's `d` to the partner's thread of the same number.
__device__ __forceinline__ void send(const uint8_t* place, uint64_t* full, uint32_t partner,
                                     const float (&d)[32]) {
  const int thread = opaque(static_cast<int>(threadIdx.x & 127));
  const uint32_t to = address_in_cluster(shared_address(place), partner) + thread * 16;
  const uint32_t barrier = address_in_cluster(shared_address(full), partner);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    send_v4(to + i * 2048, barrier, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
  }
}

// Calls `use` with numbers 4i .. 4i + 3 of what the partner has sent to this thread, and lets it
// send again.
template <typename Use>
__device__ __forceinline__ void receive(const uint8_t* place, uint64_t* empty, uint32_t partner,
                                        const Use& use) {
  const int thread = opaque(static_cast<int>(threadIdx.x & 127));
  const auto* from = reinterpret_cast<const float4*>(place) + thread;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    use(i, from[128 * i]);
    asm volatile("" ::: "memory");
  }
  __syncwarp();
  if ((thread & 31) == 0) {
    barrier_arrive_remote(address_in_cluster(shared_address(empty), partner));
  }
}

// d = the sum of the partners' parts, which has the same bits in both. `parity`: 0 for S, 1 for dP.
template <typename Config>
__device__ __forceinline__ void sum_over_partners(SharedStorage<Config>& shared, int scorer,
                                                  uint32_t partner, uint32_t parity,
                                                  float (&d)[32]) {
  barrier_wait(&shared.partner_empty[scorer], parity ^ 1);
  send(shared.partner[scorer], &shared.partner_full[scorer], partner, d);
  if ((threadIdx.x & 127) == 0) {
    barrier_arrive_expect(&shared.partner_full[scorer], Config::kExchangeBytes);
  }
  barrier_wait(&shared.partner_full[scorer], parity);
  receive(shared.partner[scorer], &shared.partner_empty[scorer], partner,
          [&](int i, const float4& v) {
            d[4 * i] += v.x;
            d[4 * i + 1] += v.y;
            d[4 * i + 2] += v.z;
            d[4 * i + 3] += v.w;
          });
}

// d = (dS^T q + P^T grad_out) of the tile's 64 slots x the 64 channels of block `block`.
template <typename Config>
__device__ __forceinline__ void grad_kv_products(SharedStorage<Config>& shared, float (&d)[32],
                                                 const Pairs<Config>& p, const Pairs<Config>& ds,
                                                 int block) {
  const uint32_t offset = block * Config::kChunkBytes;
  const uint32_t q = shared_address(shared.q) + offset;
  const uint32_t grad_out = shared_address(shared.grad_out) + offset;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t a[4] = {ds[2 * k][0], ds[2 * k][1], ds[2 * k + 1][0], ds[2 * k + 1][1]};
    Wgmma<64>::registers<1>(d, a, wgmma_descriptor(q + k * 2048, Config::kChunkBytes, 1024),
                            k != 0);
  }
  if (block < Config::kValueBlocks) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
      Wgmma<64>::registers<1>(d, a,
                              wgmma_descriptor(grad_out + k * 2048, Config::kChunkBytes, 1024), 1);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
}

// Which tokens selected this thread's two keys: bit t of `first` and `second` for token t, made of
// words_of_tile. Of rows alone bit 0 says whether there is a key.
struct Selected {
  uint32_t first, second;
};

template <typename Config>
__device__ __forceinline__ Selected selected_keys(uint32_t words, int key, int warp, int lane) {
  Selected result = {};
  if constexpr (Config::kGroups) {
#pragma unroll
    for (int token = 0; token < 8; ++token) {
      const uint32_t word =
          __shfl_sync(kAllLanes, words, (warp >> 1) * 8 + token) >> ((warp & 1) * 16 + (lane >> 2));
      result.first |= (word & 1) << token;
      result.second |= (word >> 8 & 1) << token;
    }
  } else {
    result.first = __shfl_sync(kAllLanes, key, lane >> 2) >= 0;
    result.second = __shfl_sync(kAllLanes, key, 8 + (lane >> 2)) >= 0;
  }
  return result;
}

// S -> P, as it is multiplied. A pair that is none has P = 0 whatever the key holds, in a group
// kNoPair: of a key that a token did not select, of a vector whose lse is +inf, as of those that do
// not exist.
template <typename Config>
__device__ __forceinline__ void softmax(const KernelParams& p, const float (&s)[32],
                                        const float* lse, const Selected& selected,
                                        Pairs<Config>& weights, int lane) {
  const float scale_log2 = p.softmax_scale * kLog2E;
#pragma unroll
  for (int i = 0; i < Config::kColumns / 8; ++i) {
    const int column = 8 * i + 2 * (lane & 3);
    const float2 l = *reinterpret_cast<const float2*>(lse + column);
    // Of the bit at the token: 0 where no key counts.
    const uint32_t one0 = l.x == INFINITY ? 0 : 1, one1 = l.y == INFINITY ? 0 : 1;
    const int token0 = token_of<Config>(p, column), token1 = token_of<Config>(p, column + 1);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t tokens = e == 0 ? selected.first : selected.second;
      const float x = exp2_fast(fmaf(s[4 * i + 2 * e], scale_log2, -l.x));
      const float y = exp2_fast(fmaf(s[4 * i + 2 * e + 1], scale_log2, -l.y));
      constexpr float kNone = Config::kGroups ? kNoPair : 0.0f;
      weights[i][e] = pack_bf16((tokens >> token0 & one0) != 0 ? x : kNone,
                                (tokens >> token1 & one1) != 0 ? y : kNone);
    }
  }
}

// P and dS of a tile, `number` of the CTA, `tile` of the item: as operands of grad_kv, and in
// shared memory for grad_q. `key` is what lies in slot lane % 16 of the warp's.
template <typename Config>
__device__ __forceinline__ void make_weights(const KernelParams& p, SharedStorage<Config>& shared,
                                             uint32_t rank, uint32_t number, int index, int tile,
                                             uint32_t items, int key, Pairs<Config>& weights,
                                             Pairs<Config>& ds) {
  const int thread = opaque(static_cast<int>(threadIdx.x)), lane = thread & 31;
  const int warp = thread >> 5 & 3, scorer = static_cast<int>(number % Config::kScorers);
  float s[32], dp[32];
  barrier_wait(&shared.key_full[scorer], number / Config::kScorers & 1);
  fence_async_shared();
  issue_s(shared, stage_of<Config>(number), rank, s);
  issue_dp(shared, stage_of<Config>(number), dp);
  const uint32_t words = Config::kGroups ? words_of_tile<Config>(p, index, tile, lane) : 0;
  const Selected selected = selected_keys<Config>(words, key, warp, lane);
  wgmma_wait<1>();
  wgmma_pin(s);
  sum_over_partners(shared, scorer, rank ^ 1, 0, s);
  softmax<Config>(p, s, shared.lse_log2[place_of(items)], selected, weights, lane);
  wgmma_wait<0>();
  wgmma_pin(dp);
  sum_over_partners(shared, scorer, rank ^ 1, 1, dp);
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
__device__ __forceinline__ void leave_query(SharedStorage<Config>& shared) {
  if ((threadIdx.x & 31) == 0) barrier_arrive(&shared.query_empty);
}

// The scorers. Each takes every second tile of the pair, wherever an item begins.
template <typename Config>
__device__ __forceinline__ void score(const KernelParams& p, SharedStorage<Config>& shared,
                                      uint32_t rank) {
  uint32_t number = opaque(static_cast<int>(threadIdx.x)) / 128 - 1;  // of this scorer's next tile
  uint32_t first = 0, items = 0;  // tiles, items before this one
  Item item;
  for (int index = first_index(); find_item<Config>(p, index, item); index += p.ctas, ++items) {
    const uint32_t end = first + tiles_of(item);
    barrier_wait(&shared.heads_full[place_of(items)], items >> 1 & 1);
    barrier_wait(&shared.query_full, items & 1);
    if (number >= end) {
      barrier_wait(&shared.sums_empty, (items & 1) ^ 1);  // not to arrive for the item before
      barrier_arrive(&shared.sums_full);
      leave_query(shared);
    }
    for (; number < end; number += Config::kScorers) {
      const int thread = opaque(static_cast<int>(threadIdx.x & 127)), lane = thread & 31;
      const int tile = static_cast<int>(number - first);
      const int slot = tile * Config::kTileKeys + (thread >> 5) * 16 + (lane & 15);
      int entry[1];
      read_entries<Config, 64>(p, item, opaque(index), slot, entry);
      const int key = key_or_none(p, entry[0]);
      const bool last = number + Config::kScorers >= end;
      Pairs<Config> weights, ds;
      make_weights(p, shared, rank, number, index, tile, items, key, weights, ds);
      if (last) barrier_arrive(&shared.sums_full);
      int rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[i] = __shfl_sync(kAllLanes, key, ((lane >> 2) & 3) + 4 * i);
      }
      int blocks = Config::kValueBlocks;
      if (Config::kHasRope) blocks += (number / Config::kScorers ^ rank) & 1;
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
        float d[32];
        grad_kv_products(shared, d, weights, ds, block);
        if (last && block == blocks - 1) leave_query(shared);
        add_chunk<Config>(d, rows, p.grad_kv_rows + channel_of<Config>(rank, block), lane);
      }
    }
    first = end;
  }
}

// ------------------------------------------------------------------------------ grad_q

// grad_q^T, in CTA 1 sum P k in the place of the rope block's: channels 16 warp + lane / 4 + {0, 8}
// of a block, of vectors 8i + 2 (lane % 4) + {0, 1}, lie in [block][4i + {0, 1}], [4i + {2, 3}].
template <typename Config>
using GradQ = float[Config::kBlocks][32];

// lse and D of the BF16 out of an item.
template <typename Config>
__device__ __forceinline__ void prepare_heads(const KernelParams& p, SharedStorage<Config>& shared,
                                              const Item& item, int place) {
  constexpr int kWarpRows = Config::kColumns / 4;
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int first = (thread >> 5) * kWarpRows, row = first + lane;
  float d = 0.0f, lse = INFINITY;
#pragma unroll 2
  for (int i = 0; i < kWarpRows; ++i) {
    if (first + i >= item.rows) break;
    float sum = partial_d<Config>(out_of<Config>(p, item, first + i),
                                  grad_out_of<Config>(p, item, first + i), lane);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (lane == i) d = sum;
  }
  if (lane < kWarpRows) {
    if (row < item.rows) {
      lse = __ldg(lse_of<Config>(p, item, row));
      if (p.attn_sink != nullptr) {
        lse = whole_lse(lse, __ldg(p.attn_sink + head_of<Config>(p, item, row)));
      }
    }
    shared.lse_log2[place][row] = lse * kLog2E;
    shared.d[place][row] = d;
  }
  barrier_arrive(&shared.heads_full[place]);
}

// grad_q^T += k^T dS of a tile; in CTA 1 the rope block is k^T P.
template <typename Config>
__device__ __forceinline__ void grad_q_products(SharedStorage<Config>& shared, int stage,
                                                uint32_t rank, GradQ<Config>& grad_q) {
  const uint64_t keys =
      wgmma_descriptor(shared_address(shared.keys[stage]), Config::kChunkBytes, 1024);
  const uint64_t ds = rows_operand(shared_address(shared.ds));
  const uint64_t of_rope = rank == 0 ? ds : rows_operand(shared_address(shared.p));
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < Config::kTileKeys / 16; ++step) {
#pragma unroll
    for (int block = 0; block < Config::kBlocks; ++block) {
      Wgmma<64>::shared<1, 0>(grad_q[block],
                              keys + ((block * Config::kChunkBytes + step * 2048) >> 4),
                              (block == Config::kRope ? of_rope : ds) + (step * 32 >> 4), 1);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int block = 0; block < Config::kBlocks; ++block) wgmma_pin(grad_q[block]);
}

// Settles D, as settle_d of backward/kernel.cuh; every warp does the same, lane l for vectors l
// and l + 32, and the first of CTA 0 stores. `shift` is that of dS / P that grad_q lacks.
template <typename Config>
__device__ __forceinline__ void settle(const KernelParams& p, SharedStorage<Config>& shared,
                                       const Item& item, int index, uint32_t rank, int place,
                                       float (&shift)[2]) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int parts = 4 * min(tiles_of(item), Config::kScorers);  // others had no tile
  const bool stores = rank == 0 && thread < 32;
  float3 sums[2] = {};
  float d[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 32 * half + lane;
    for (int part = 0; part < parts; ++part) {
      sums[half].x += shared.sums[part][0][row];
      sums[half].y += shared.sums[part][1][row];
      sums[half].z += shared.sums[part][2][row];
    }
    d[half] = shared.d[place][row];
  }
  barrier_arrive(&shared.sums_empty);
  uint32_t flags = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 32 * half + lane;
    const bool live = row < item.rows;
    const int vector = min(row, item.rows - 1);
    float p_sink = 0.0f, mass = 1.0f;  // of the softmax
    if (p.attn_sink != nullptr) {
      const float sink = __ldg(p.attn_sink + head_of<Config>(p, item, vector));
      const float lse = __ldg(lse_of<Config>(p, item, vector));
      p_sink = 1.0f / (1.0f + expf(lse - sink));
      mass = 1.0f / (1.0f + expf(sink - lse));
    }
    const bool has_mass = !(sums[half].x == 0.0f);  // NaN counts
    const float mean = has_mass ? sums[half].y / sums[half].x : 0.0f;
    const float error = has_mass ? mass * mean - p_sink * d[half] : 0.0f;
    const float variance = fmaxf(sums[half].z / sums[half].x - mean * mean, 0.0f);
    const uint32_t spoilt = __ballot_sync(kAllLanes, live && error * error > 0x1p-12f * variance);
    flags |= ((spoilt & 0xFFFF) != 0 ? 1u : 0u) << (16 * half);
    flags |= (spoilt >> 16 != 0 ? 0x100u : 0u) << (16 * half);
    if (stores && live) {
      const int64_t at = item.token * p.heads + item.first_head + row;
      p.d_errors[at] = error;
      if (p.sink_terms != nullptr) p.sink_terms[at] = has_mass ? p_sink * (d[half] + error) : 0.0f;
    }
    shift[half] = live ? -p.softmax_scale * error : 0.0f;
  }
  if (stores && lane == 0) {  // a byte for 16 vectors
    reinterpret_cast<uint32_t*>(p.needs_repair)[p.first_item + index] = flags;
  }
}

// The shifts of vectors 8i + 2 (lane % 4) + {0, 1}; lane l has those of l and l + 32.
__device__ __forceinline__ float2 shifts_of(const float (&shift)[2], int i, int lane) {
  const int from = (8 * i + 2 * (lane & 3)) & 31;
  return make_float2(__shfl_sync(kAllLanes, shift[i / 4], from),
                     __shfl_sync(kAllLanes, shift[i / 4], from + 1));
}

// grad_q += shift * sum P k of the rope channels, which CTA 1 sends to CTA 0.
template <typename Config>
__device__ __forceinline__ void shift_rope(SharedStorage<Config>& shared, uint32_t rank,
                                           uint32_t items, const float (&shift)[2],
                                           float (&rope)[32]) {
  if (rank == 1) {
    barrier_wait(&shared.p_k_empty, (items & 1) ^ 1);
    send(shared.partner_p_k, &shared.p_k_full, 0, rope);
    return;
  }
  const int lane = threadIdx.x & 31;
  if ((threadIdx.x & 127) == 0) barrier_arrive_expect(&shared.p_k_full, Config::kExchangeBytes);
  barrier_wait(&shared.p_k_full, items & 1);
  receive(shared.partner_p_k, &shared.p_k_empty, 1, [&](int i, const float4& p_k) {
    const float2 by = shifts_of(shift, i, lane);
    rope[4 * i] = fmaf(by.x, p_k.x, rope[4 * i]);
    rope[4 * i + 1] = fmaf(by.y, p_k.y, rope[4 * i + 1]);
    rope[4 * i + 2] = fmaf(by.x, p_k.z, rope[4 * i + 2]);
    rope[4 * i + 3] = fmaf(by.y, p_k.w, rope[4 * i + 3]);
  });
}

// grad_q += shift * sum P k of the value channels, which is out, and all of it into global memory.
// In a group a row without keys, whose out may hold anything, has no shift.
template <typename Config>
__device__ __forceinline__ void store_grad_q(const KernelParams& p, const Item& item, uint32_t rank,
                                             const GradQ<Config>& grad_q, const float (&shift)[2]) {
  const int first_channel = channel_of<Config>(rank, 0);
#pragma unroll
  for (int i = 0; i < Config::kColumns / 8; ++i) {
    const int thread = opaque(static_cast<int>(threadIdx.x & 127));  // nothing of the next i before
    const int lane = thread & 31, warp = thread >> 5;
    const float2 by = shifts_of(shift, i, lane);
    const int row = 8 * i + (lane >> 2), vector = min(row, item.rows - 1);
    const bool live = row < item.rows;
    const bool reads = !Config::kGroups || __shfl_sync(kAllLanes, shift[i / 4], row & 31) != 0.0f;
    const __nv_bfloat16* out =
        out_of<Config>(p, item, vector) + first_channel + 16 * warp + 2 * (lane & 3);
    __nv_bfloat16* to = p.grad_q +
                        (item.token * p.heads + item.first_head + vector) * Config::kHeadDim +
                        16 * warp + 8 * (lane & 1) + 64 * ((lane >> 1) & 1);
    // Channels 8e .. 8e + 7 of the warp's 16 of a block, a vector to four lanes.
    const auto word = [&](int block, int e) {
      const float* pair = &grad_q[block][4 * i + 2 * e];
      if (block == Config::kRope) return transpose_8x8(pack_bf16(pair[0], pair[1]));
      const auto* pair_of_out = reinterpret_cast<const uint32_t*>(out + 64 * block + 8 * e);
      const uint32_t p_k = transpose_8x8(reads ? __ldg(pair_of_out) : 0);
      return transpose_8x8(
          pack_bf16(fmaf(by.x, low_bf16(p_k), pair[0]), fmaf(by.y, high_bf16(p_k), pair[1])));
    };
#pragma unroll
    for (int block = 0; block < Config::kValueBlocks; block += 2) {
      uint32_t words[4] = {word(block, 0), word(block, 1), word(block + 1, 0), word(block + 1, 1)};
      transpose_quad(words, lane);  // lane j of four has all of word j
      if (live) {
        *reinterpret_cast<uint4*>(to + first_channel + 64 * block) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if constexpr (Config::kHasRope) {
      uint32_t words[4] = {word(Config::kRope, 0), word(Config::kRope, 1), 0, 0};
      transpose_quad(words, lane);
      if (rank == 0 && live && (lane & 2) == 0) {
        *reinterpret_cast<uint4*>(to + Config::kValueDim) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// A row without keys: grad_q and the sink's part are zero. CTA 0 writes them.
template <typename Config>
__device__ __forceinline__ void write_empty_item(const KernelParams& p, const Item& item,
                                                 uint32_t rank) {
  if (rank != 0) return;
  const int thread = threadIdx.x & 127;
  const int64_t first = item.token * p.heads + item.first_head;
  auto* to = reinterpret_cast<uint4*>(p.grad_q + first * Config::kHeadDim);
  for (int i = thread; i < item.rows * Config::kHeadDim / 8; i += 128) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
  if (p.sink_terms != nullptr && thread < item.rows) p.sink_terms[first + thread] = 0.0f;
}

// Warpgroup 3. An item is read again where it is needed, since grad_q leaves no room for it.
template <typename Config>
__device__ __forceinline__ void run_grad_q(const KernelParams& p, SharedStorage<Config>& shared,
                                           uint32_t rank) {
  const int lane = threadIdx.x & 31;
  uint32_t n = 0;
  int next = first_index();
  const auto prepare_next = [&](uint32_t number) {
    Item item;
    const bool found = find_item<Config>(
        p, next, item, [&](const Item& empty) { write_empty_item<Config>(p, empty, rank); });
    if (found) prepare_heads(p, shared, item, place_of(number));
    return found;
  };
  bool more = prepare_next(0);
  for (uint32_t items = 0; more; ++items) {
    const int index = next;
    barrier_wait(&shared.heads_full[place_of(items)], items >> 1 & 1);
    barrier_wait(&shared.sums_empty, (items & 1) ^ 1);
    next += p.ctas;
    more = prepare_next(items + 1);

    GradQ<Config> grad_q = {};
    const int tiles = tiles_of(item_at<Config>(p, index));
    for (int tile = 0; tile < tiles; ++tile, ++n) {
      barrier_wait(&shared.weights_full, n & 1);
      fence_async_shared();
      grad_q_products(shared, stage_of<Config>(n), rank, grad_q);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(&shared.weights_empty);
        barrier_arrive(&shared.key_empty[stage_of<Config>(n)]);
      }
    }
    barrier_wait(&shared.sums_full, items & 1);
    float shift[2];
    settle(p, shared, item_at<Config>(p, opaque(index)), index, rank, place_of(items), shift);
    if constexpr (Config::kHasRope) {
      shift_rope(shared, rank, items, shift, grad_q[Config::kRope]);
    }
    store_grad_q<Config>(p, item_at<Config>(p, opaque(index)), rank, grad_q, shift);
  }
}

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (auto& barrier : shared.key_full) barrier_init(&barrier, 128);
  for (auto& barrier : shared.key_empty) barrier_init(&barrier, 4);
  barrier_init(&shared.query_full, 128);
  barrier_init(&shared.query_empty, Config::kScorers * 4);
  for (auto& barrier : shared.partner_full) barrier_init(&barrier, 1);
  for (auto& barrier : shared.partner_empty) barrier_init(&barrier, 4);
  barrier_init(&shared.weights_full, 128);
  barrier_init(&shared.weights_empty, 4);
  for (auto& barrier : shared.heads_full) barrier_init(&barrier, 128);
  barrier_init(&shared.sums_full, Config::kScorers * 128);
  barrier_init(&shared.sums_empty, 128);
  barrier_init(&shared.p_k_full, 1);
  barrier_init(&shared.p_k_empty, 4);
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_backward_many_heads_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) init_barriers(shared);
  cluster_sync();

  const int warpgroup = threadIdx.x >> 7;
  if (warpgroup == 0) {
    shrink_registers<Config::kProducerRegisters>();
    produce(p, shared, rank);
  } else if (warpgroup < 1 + Config::kScorers) {
    grow_registers<Config::kScoreRegisters>();
    score(p, shared, rank);
  } else {
    grow_registers<Config::kGradQRegisters>();
    run_grad_q(p, shared, rank);
  }
  cluster_sync();  // neither leaves while the other may still send
}

}  // namespace flashdsa::attention::sm90::backward_many_heads
