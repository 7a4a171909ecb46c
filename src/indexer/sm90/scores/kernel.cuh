// Lightning indexer scores on Hopper.
//
//   score[t,s] = sum_h w[t,h] * max(0, q[t,h,:] . k[s,:])     max(0, NaN) is NaN
//
// Inputs: BF16 q [T_q, H_index, 128] and k [T_k, 128] through tensor maps, FP32 w. Output: the FP32
// scores of one chunk of rows; RowPlan says where a row's lie.
//
// Grid: one CTA per SM, which draws items (tables.h) from a counter.
// Item: kTokens query rows (8, or 4 of more than 32 heads) x a span of keys in tiles of 64.
// Products: keys are the rows, (token, head) pairs the columns. A batch is 64 keys x 128 columns x
// 128 channels; column 8*(h/2) + 2*token + h%2 holds head h of one of four tokens. So a lane's
// accumulators are all 32 heads of token lane%4 for two keys: the head sum needs no exchange, and
// its order is fixed. A tensor map {channel, h%2, token, h/2} of q makes that order in its copy.
// Every tile meets two batches: tokens 0..3 and 4..7 (up to 32 heads), or heads 0..31 and 32..63.
// The first is reduced while the second is in the tensor cores; while the second is reduced, the
// other warpgroup's batches are there.
//
// Warpgroups                                                                       registers
//   0     producer: one warp draws items and issues all copies                          24
//   1, 2  math: every second tile of the item                                          240
//
// Shared memory, bytes: q 2 stages x 65536, k 6 stages x 16384 (both in the 128-byte swizzle),
// weights, item and row targets 2 stages x 1264 (32 heads) or 1152 (64), barriers 128; with
// alignment 232448.
//
// Barriers
//   q_full[stage]   1 + bytes of q, w   1, 2 wait, parity 0     item, rows, q and w are there
//   q_empty[stage]  8 warps of 1, 2     0 waits, parity 1       the item is done
//   k_full[stage]   1 + bytes of k      1 or 2 waits, parity 0  the tile is there
//   k_empty[stage]  4 warps of 1 or 2   0 waits, parity 1       both batches have read it
//
// Nothing is rounded but each FP32 operation. A score is the same chain of operations in every tile
// and on every row of it: eight products of 16 channels, ascending; then even and odd heads in two
// ascending chains, which are added. Columns behind H_index stay out of the sum: 0 * inf is NaN.
#pragma once

#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"
#include "indexer/sm90/scores/config.h"

namespace flashdsa::indexer::sm90::score_pass {

using namespace core::cuda;

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// Place in the ring of key stages, and the parity that the next wait for it uses.
template <typename Config>
struct KeyRing {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance(int stages) {
    stage += stages;
    if (stage >= Config::kKeyStages) {
      stage -= Config::kKeyStages;
      parity ^= 1;
    }
  }
};

// ------------------------------------------------------------------------------ producer

// Lane i: where row i of the item stores, and the copy of its weights.
template <typename Config>
__device__ __forceinline__ void prepare_row(const KernelParams& p, SharedStorage<Config>& shared,
                                            int stage, const Item& item, int lane) {
  if (lane >= Config::kTokens) return;
  const int at = item.row + lane;
  RowTarget target{};
  if (at < p.block_rows) {
    const RowPlan row = p.rows[at];
    target = {static_cast<uint32_t>(row.offset - p.chunk->offset), row.first(), row.pitch()};
  }
  shared.target[stage][lane] = target;
  bulk_load(shared_address(&shared.weights[stage][lane * Config::kWeightStride]),
            p.weights + int64_t{at} * Config::kHeads, Config::kWeightBytes, &shared.q_full[stage]);
}

template <typename Config>
__device__ __forceinline__ void load_queries(SharedStorage<Config>& shared, int stage, int row,
                                             const CUtensorMap* q_map) {
  constexpr bool kOneTokenSet = Config::kHeads > Config::kBatchHeads;  // both batches: same tokens
#pragma unroll
  for (int batch = 0; batch < 2; ++batch) {
    const int token = kOneTokenSet ? 0 : batch * Config::kBatchTokens;
    const int pair = kOneTokenSet ? batch * Config::kBatchHeads / 2 : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tma_load_4d(shared_address(shared.q[stage]) + (2 * batch + half) * Config::kHalfBatchBytes,
                  q_map, &shared.q_full[stage], half * Config::kHalfChannels, 0, row + token, pair);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void load_tile(SharedStorage<Config>& shared, int stage, int row,
                                          const CUtensorMap* k_map) {
  uint64_t* full = &shared.k_full[stage];
  const uint32_t to = shared_address(shared.k[stage]);
  barrier_arrive_expect(full, Config::kTileBytes);
  tma_load_2d(to, k_map, full, 0, row);
  tma_load_2d(to + Config::kHalfTileBytes, k_map, full, Config::kHalfChannels, row);
}

// One warp. Lane 0 draws and copies; the rows of an item are prepared side by side.
template <typename Config>
__device__ __forceinline__ void produce(const KernelParams& p, SharedStorage<Config>& shared,
                                        const CUtensorMap* q_map, const CUtensorMap* k_map) {
  const int lane = static_cast<int>(threadIdx.x);
  const int items = p.chunk->items;
  const Item* list = p.items + p.chunk->item;
  KeyRing<Config> ring{0, 1};
  for (int n = 0;; ++n) {
    const int stage = n & 1;
    barrier_wait(&shared.q_empty[stage], ((n >> 1) & 1) ^ 1);
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(&p.tickets->items, 1);
    ticket = __shfl_sync(kAllLanes, ticket, 0);
    Item item{};
    if (ticket < items) item = list[ticket];
    if (item.tiles > 0) prepare_row(p, shared, stage, item, lane);
    __syncwarp();
    if (lane == 0) {
      shared.item[stage] = item;
      if (item.tiles == 0) {
        barrier_arrive(&shared.q_full[stage]);
      } else {
        barrier_arrive_expect(&shared.q_full[stage],
                              Config::kQueryBytes + Config::kTokens * Config::kWeightBytes);
        load_queries(shared, stage, p.map_row + item.row, q_map);
      }
    }
    if (item.tiles == 0) return;
#pragma unroll 1
    for (int tile = 0; tile < item.tiles; ++tile) {
      barrier_wait(&shared.k_empty[ring.stage], ring.parity);
      const uint32_t key = item.key + static_cast<uint32_t>(tile) * kTileKeys;
      if (lane == 0) load_tile(shared, ring.stage, static_cast<int>(key - p.map_key), k_map);
      ring.advance(1);
    }
    __syncwarp();
  }
}

// ------------------------------------------------------------------------------ math

// The sums over heads of the thread's two keys.
struct HeadSum {
  float low_even = 0.f, low_odd = 0.f, high_even = 0.f, high_odd = 0.f;

  // Adds the batch's heads; `heads` of its 32 exist (all of them if kAll).
  template <bool kAll>
  __device__ __forceinline__ void add(const float (&dot)[64], const float (&w)[32], int heads) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (kAll || 2 * j < heads) {
        low_even = fmaf(w[2 * j], relu_keep_nan(dot[4 * j]), low_even);
        high_even = fmaf(w[2 * j], relu_keep_nan(dot[4 * j + 2]), high_even);
      }
      if (kAll || 2 * j + 1 < heads) {
        low_odd = fmaf(w[2 * j + 1], relu_keep_nan(dot[4 * j + 1]), low_odd);
        high_odd = fmaf(w[2 * j + 1], relu_keep_nan(dot[4 * j + 3]), high_odd);
      }
    }
  }
  __device__ __forceinline__ float low() const { return low_even + low_odd; }
  __device__ __forceinline__ float high() const { return high_even + high_odd; }
};

// dot [64 keys, 128 columns] = k q^T, in flight.
template <typename Config>
__device__ __forceinline__ void start_batch(float (&dot)[64], uint64_t keys, uint64_t queries) {
  constexpr int kSteps = 4;  // of 16 channels a half
  wgmma_pin(dot);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 2 * kSteps; ++step) {
    const int half = step / kSteps, piece = step % kSteps * 2;
    Wgmma<128>::shared(dot, keys + half * (Config::kHalfTileBytes >> 4) + piece,
                       queries + half * (Config::kHalfBatchBytes >> 4) + piece, step > 0);
  }
  wgmma_commit();
}

__device__ __forceinline__ void load_weights(float (&w)[32], const float* s_weights) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 v = reinterpret_cast<const float4*>(s_weights)[i];
    w[4 * i] = v.x;
    w[4 * i + 1] = v.y;
    w[4 * i + 2] = v.z;
    w[4 * i + 3] = v.w;
  }
}

// Where this thread stores the scores of one token, whose tile 0 of the item lies `column` floats
// behind the row's first score.
struct Output {
  float* to;  // of the thread's first key in the row's first tile
  uint32_t column;
  uint32_t pitch;

  __device__ __forceinline__ Output(float* scores, const RowTarget& target, uint32_t item_key,
                                    int key_in_tile)
      : to(scores + target.offset + key_in_tile),
        column(item_key - target.first),
        pitch(target.pitch) {}

  // Keys of tiles that the row does not see have no place.
  __device__ __forceinline__ void store(int tile, const HeadSum& sum) const {
    const uint32_t at = column + static_cast<uint32_t>(tile) * kTileKeys;
    if (at >= pitch) return;
    to[at] = sum.low();
    to[at + 8] = sum.high();
  }
};

template <typename Config, bool kAllHeads>
__device__ __forceinline__ void math(const KernelParams& p, SharedStorage<Config>& shared, int wg) {
  constexpr bool kOneTokenSet = Config::kHeads > Config::kBatchHeads;  // both batches: same tokens
  const int warp = (threadIdx.x / 32) & 3, lane = threadIdx.x & 31;
  const int token = lane & 3, key_in_tile = warp * 16 + lane / 4;
  const int second_token = kOneTokenSet ? token : token + Config::kBatchTokens;
  float dot0[64], dot1[64], w0[32], w1[32];
  KeyRing<Config> ring{wg, 0};

  for (int n = 0;; ++n) {
    const int s = n & 1;
    barrier_wait(&shared.q_full[s], (n >> 1) & 1);
    const uint32_t item_key = shared.item[s].key;
    const int tiles = shared.item[s].tiles;
    if (tiles == 0) return;
    const uint64_t queries = wgmma_descriptor(shared_address(shared.q[s]), 16, 1024);
    const Output first(p.scores, shared.target[s][token], item_key, key_in_tile);
    const Output second(p.scores, shared.target[s][second_token], item_key, key_in_tile);
    const float* s_weights = shared.weights[s];
    load_weights(w0, s_weights + token * Config::kWeightStride);
    load_weights(w1, s_weights + second_token * Config::kWeightStride +
                         (kOneTokenSet ? Config::kBatchHeads : 0));

    for (int tile = wg; tile < tiles; tile += Config::kMathWarpgroups) {
      const uint64_t keys = wgmma_descriptor(shared_address(shared.k[ring.stage]), 16, 1024);
      barrier_wait(&shared.k_full[ring.stage], ring.parity);
      start_batch<Config>(dot0, keys, queries);
      start_batch<Config>(dot1, keys, queries + (Config::kBatchBytes >> 4));

      wgmma_wait<1>();
      wgmma_pin(dot0);
      HeadSum sum;
      sum.add<kAllHeads || kOneTokenSet>(dot0, w0, p.heads);
      if (!kOneTokenSet) {
        first.store(tile, sum);
        sum = HeadSum();
      }

      wgmma_wait<0>();
      wgmma_pin(dot1);
      if (lane == 0) barrier_arrive(&shared.k_empty[ring.stage]);
      sum.add<kAllHeads>(dot1, w1, kOneTokenSet ? p.heads - Config::kBatchHeads : p.heads);
      second.store(tile, sum);
      ring.advance(Config::kMathWarpgroups);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.q_empty[s]);
  }
}

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (int i = 0; i < Config::kQueryStages; ++i) {
    barrier_init(&shared.q_full[i], 1);
    barrier_init(&shared.q_empty[i], 4 * Config::kMathWarpgroups);
  }
  for (int i = 0; i < Config::kKeyStages; ++i) {
    barrier_init(&shared.k_full[i], 1);
    barrier_init(&shared.k_empty[i], 4);
  }
  barrier_init_fence();
}

template <typename Config, bool kAllHeads>
__global__ void __launch_bounds__(Config::kThreads, 1)
    indexer_scores_kernel(const __grid_constant__ KernelParams p,
                          const __grid_constant__ CUtensorMap q_map,
                          const __grid_constant__ CUtensorMap k_map) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared);
  await_earlier_kernels();
  let_next_kernel_start();
  __syncthreads();

  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == 0) {
    shrink_registers<Config::kProducerRegisters>();
    if (threadIdx.x < 32) produce(p, shared, &q_map, &k_map);
  } else {
    grow_registers<Config::kMathRegisters>();
    math<Config, kAllHeads>(p, shared, warpgroup - 1);
  }
}

}  // namespace flashdsa::indexer::sm90::score_pass
