// Sparse MLA attention, forward, on Hopper: one query row and up to 64 heads an item.
//
//   S = softmax_scale q k,  P = softmax_j(S, and the sink),  out = sum_j P kv[i_j, :512]
//   lse = ln sum_j exp(S),  max_logits = max_j S
//
// Inputs and outputs: KernelParams in config.h. Slots without a key are zero rows with P = 0.
// Tile rows past the item's last head repeat it and are not stored.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ...    Tile: 64 heads x 64 keys.
// Warpgroups                                                                       registers
//   0     producer: cp.async gather of 32-key slots into the ring, validity words        40
//   1     score: S, masks, online softmax, P; lse, max_logits                            152
//   2, 3  value: O = sum P V of value channels 0..255 and 256..511; out                  160
// The softmax is taken against a reference maximum that moves only when the true one outgrows it
// by 2^8; P and its sum share it, so the result is exact and O is almost never rescaled.
//
// Shared memory, bytes (D = 576 / 512): q 73728 / 65536, ring 147456 / 131072, P 8192, the rest
// 640, padded: 230400 / 205824. The ring consists of groups of eight keys, each block after block
// in the 128-byte swizzle: one copy is the K operand of S and, transposed, the V operand.
//
// Barriers
//   kv_full[slot]   128 cp.async + 1 of 0   1 waits, parity 0     keys and validity word are there
//   kv_empty[slot]  8 warps of 2, 3, 4 of 1 0 waits, parity 1     O has read them, S before; 1 has
//                                                                 read the validity word
//   p_full          32 lanes of 1           2, 3 wait, parity 0   P and alpha are there
//   p_empty[half]   64 lanes of 2, 3        1 waits, parity 1     O has read this half of P (and
//                                                                 alpha, before)
//   inverse_full    32 lanes of 1           2, 3 wait, parity 0   the item's inverse is there
//   inverse_empty   256 threads of 2, 3     1 waits, parity 1     it has been read
// Named barrier kScoreQuery: 1 meets; q may be overwritten, it is there.
// Every lane that writes or reads alpha, an inverse or a validity word arrives itself: racecheck
// follows neither one lane's arrival for its warp nor named barriers of a part of the block.
//
// Rounded to BF16: P, as operand of the second product (its sum is not), and out. All else is FP32.
// S is summed in parts (kSums in config.h). The order of every sum depends on the row's slots
// alone.
#pragma once

#include <cmath>

#include "attention/sm90/forward/config.h"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::forward_pass {

using namespace core::cuda;

inline constexpr int kScoreQuery = 1;  // named barrier

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMaximumSlack = 8.f;  // log2 of how far P may outgrow 1
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// ------------------------------------------------------------------------------ small things

struct Item {
  int64_t token;
  int first_head;
  int heads;   // of the tile's 64 rows
  int extent;  // slots to look at, 0: a row without keys
};

__device__ __forceinline__ Item item_at(const KernelParams& p, int64_t index) {
  Item item;
  item.token = index >> p.head_blocks_log2;
  item.first_head = static_cast<int>(index & ((1 << p.head_blocks_log2) - 1)) * 64;
  item.heads = min(p.heads - item.first_head, 64);
  item.extent = __ldg(p.extents + item.token);
  return item;
}

template <typename Config>
__device__ __forceinline__ int tiles_of(const Item& item) {
  return (item.extent + Config::kTileKeys - 1) / Config::kTileKeys;
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

// Everything this warp wrote or read before is behind the arrival.
__device__ __forceinline__ void warp_arrive(uint64_t* barrier, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}

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

// Slots are read four ahead: one ahead costs a global load's latency every time.
template <typename Config>
__device__ __forceinline__ void produce(const KernelParams& p, SharedStorage<Config>& shared) {
  constexpr int kAhead = 4;
  const int thread = threadIdx.x & 127, lane = thread & 31, row = thread >> 3, piece = thread & 7;
  const uint64_t policy = l2_keep_policy();
  const char* kv = reinterpret_cast<const char*>(p.kv) + piece * 16;
  const uint32_t to = shared_address(shared.ring) + (row >> 3) * Config::kGroupBytes +
                      (row & 7) * 128 + ((piece ^ (row & 7)) << 4);
  RingPosition<Config> ring{0, 1};

  for (int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = item_at(p, index);
    const int32_t* entries = p.topk_indices + item.token * p.topk_indices_row_stride;
    const int slots = tiles_of<Config>(item) * Config::kTileSlots;
    const auto entry_of = [&](int slot) {
      const int position = slot * Config::kSlotKeys + lane;
      return position < item.extent ? __ldg(entries + position) : -1;
    };
    int ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = entry_of(i);

    for (int first = 0; first < slots; first += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= slots) break;
        const bool counts = static_cast<unsigned>(ahead[i]) < static_cast<unsigned>(p.t_k);
        const uint32_t valid = __ballot_sync(kAllLanes, counts);
        const int key = counts ? ahead[i] : -1;
        const int key_a = __shfl_sync(kAllLanes, key, row);
        const int key_b = __shfl_sync(kAllLanes, key, row + 16);
        ahead[i] = entry_of(first + i + kAhead);

        barrier_wait(&shared.kv_empty[ring.slot], ring.parity);
        gather<Config>(to + ring.slot * Config::kSlotBytes, kv, p.kv_row_bytes, key_a, key_b,
                       policy);
        barrier_arrive_cp_async(&shared.kv_full[ring.slot]);
        if (thread == 0) {
          shared.valid[ring.slot] = valid;
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
};

// The item's query rows into shared memory.
template <typename Config>
__device__ __forceinline__ void load_query(const KernelParams& p, SharedStorage<Config>& shared,
                                           const Item& item) {
  constexpr int kPieces = Config::kBlocks * 8;  // of 16 bytes, of a row
  const int thread = threadIdx.x & 127, last = item.heads - 1;
  const __nv_bfloat16* q = p.q + item.token * p.q_row_stride + item.first_head * p.q_head_stride;

  named_sync(kScoreQuery, 128);
#pragma unroll 4
  for (int i = 0; i < Config::kHeads * kPieces / 128; ++i) {
    const int row = (i * 128 + thread) / kPieces, piece = (i * 128 + thread) % kPieces;
    const uint4* from = reinterpret_cast<const uint4*>(q + min(row, last) * p.q_head_stride);
    uint8_t* to = shared.q + (piece >> 3) * Config::kBlockBytes + row * 128;
    *reinterpret_cast<uint4*>(to + (((piece & 7) ^ (row & 7)) << 4)) = __ldg(from + piece);
  }
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

// The validity words of the tile from `slot` on, shifted to this lane's first column.
template <typename Config>
__device__ __forceinline__ void take_validity(SharedStorage<Config>& shared, int slot,
                                              uint32_t (&words)[Config::kTileSlots]) {
  const int lane = threadIdx.x & 31;
  uint32_t word = 0;
  if (lane < Config::kTileSlots) {
    word = shared.valid[slot + lane];
    barrier_arrive(&shared.kv_empty[slot + lane]);
  }
#pragma unroll
  for (int i = 0; i < Config::kTileSlots; ++i) {
    words[i] = __shfl_sync(kAllLanes, word, i) >> (2 * (lane & 3));
  }
}

// Row `half` of this lane (see Softmax) of one tile: `words` are the validity bits of its slots,
// shifted to the lane's first column. Gives P as BF16 pairs and returns alpha.
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

// 1 / (sum + 2^(sink - reference)); sink in log2 units, -inf for none. Neither infinite sinks nor
// those far from the reference make NaN; 2^x of a large |x| stays subnormal, hence exp2f.
__device__ __forceinline__ float inverse_denominator(float sum, float reference, float sink) {
  if (sink == -INFINITY) return 1.f / sum;
  const float above = sink - reference;
  if (above > 0) {
    const float shrink = exp2f(-above);
    return shrink / (sum * shrink + 1.f);
  }
  return 1.f / (sum + exp2f(above));
}

// lse and max_logits of the item, and the inverse for the value warps. All of it is right for a
// row without keys, too: a maximum of -inf and a sum of zero.
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
      const int row = warp * 16 + (lane >> 2) + 8 * half, head = item.first_head + row;
      const bool live = row < item.heads;
      const float sum = softmax.sum[half], reference = softmax.reference[half];
      const float sink =
          live && p.attn_sink != nullptr ? __ldg(p.attn_sink + head) * kLog2E : -INFINITY;
      shared.inverse[row] = item.extent == 0 ? 0.f : inverse_denominator(sum, reference, sink);
      if (live) {
        const int64_t at = item.token * p.heads + head;
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

  for (int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = item_at(p, index);
    const int tiles = tiles_of<Config>(item);
    Softmax softmax;
    if (tiles > 0) load_query(p, shared, item);
    for (int tile = 0; tile < tiles; ++tile) {
      barrier_wait(&shared.kv_full[ring.slot], ring.parity);
      barrier_wait(&shared.kv_full[ring.slot + 1], ring.parity);
      fence_async_shared();
      issue_scores<Config>(sums, query, ring_keys + ring.slot * (Config::kSlotBytes >> 4));
      uint32_t words[Config::kTileSlots];
      take_validity(shared, ring.slot, words);
      ring.advance(Config::kTileSlots);
      wgmma_wait<0>();
      float(&s)[32] = sums[0];
      add_sums(sums);

      uint32_t pairs[2][8];
      float alpha[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
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

__device__ __forceinline__ void store_16_bytes(__nv_bfloat16* to, const uint32_t (&words)[4],
                                               bool aligned) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    halves[2 * i] = static_cast<uint16_t>(words[i]);
    halves[2 * i + 1] = static_cast<uint16_t>(words[i] >> 16);
  }
}

// Transposes the 4 x 4 words of four neighbouring lanes: word i of lane j becomes word j of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  uint32_t a = __shfl_xor_sync(kAllLanes, odd ? words[0] : words[1], 1);
  uint32_t b = __shfl_xor_sync(kAllLanes, odd ? words[2] : words[3], 1);
  if (odd) {
    words[0] = a, words[2] = b;
  } else {
    words[1] = a, words[3] = b;
  }
  a = __shfl_xor_sync(kAllLanes, upper ? words[0] : words[2], 2);
  b = __shfl_xor_sync(kAllLanes, upper ? words[1] : words[3], 2);
  if (upper) {
    words[0] = a, words[1] = b;
  } else {
    words[2] = a, words[3] = b;
  }
}

// This warpgroup's 256 channels of the item's rows, each times its inverse denominator.
template <typename Config>
__device__ __forceinline__ void store_output(const KernelParams& p, const Item& item,
                                             const Output& o, const float (&inverse)[2], int row,
                                             int first_channel) {
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
  for (int64_t index = blockIdx.x; index < p.items; index += gridDim.x) {
    const Item item = item_at(p, index);
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
    store_output<Config>(p, item, o, inverse, row, side * 256);
  }
}

// ------------------------------------------------------------------------------ the kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (int slot = 0; slot < Config::kSlots; ++slot) {
    barrier_init(&shared.kv_full[slot], 128 + 1);
    barrier_init(&shared.kv_empty[slot], 8 + 4);
  }
  barrier_init(&shared.p_full, 32);
  for (int half = 0; half < Config::kTileSlots; ++half) barrier_init(&shared.p_empty[half], 64);
  barrier_init(&shared.inverse_full, 32);
  barrier_init(&shared.inverse_empty, 256);
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_forward_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(shared_bytes);
  if (threadIdx.x == 0) init_barriers(shared);
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

}  // namespace flashdsa::attention::sm90::forward_pass
