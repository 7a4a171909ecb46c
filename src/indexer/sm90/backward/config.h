#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace flashdsa::indexer::sm90::backward_pass {

// Sizes of the backward kernel. A chunk is rows of 64 BF16 numbers: 128 bytes a row, in the
// 128-byte swizzle of core/cuda/wgmma.cuh.
//
// kOrdered: grad_index_k rows of every slot are stored instead of added up.
template <int kHeadsArg, bool kOrderedArg>
struct Config {
  static constexpr int kHeads = kHeadsArg;  // H_index, rounded up
  static constexpr bool kOrdered = kOrderedArg;
  static constexpr int kDim = 128;
  static constexpr int kKeys = 64;  // rows of a key tile
  static constexpr int kChunkChannels = 64;
  static constexpr int kChunks = kDim / kChunkChannels;
  static constexpr int kKeyChunkBytes = kKeys * 128;
  static constexpr int kQueryChunkBytes = kHeads * 128;

  // Walkers are warpgroups that walk query rows of their own; while one adds, another scores. The
  // sums of more than 32 heads take the registers of a third walker.
  static constexpr int kWalkers = kHeads > 32 ? 2 : 3;
  static constexpr int kQueryStages = 2;
  static constexpr int kKeyStages = 3;

  static constexpr int kThreads = 128 * (1 + kWalkers);
  static constexpr int kWalkerRegisters = kHeads > 32 ? 224 : 152;
  static constexpr int kLoadRegisters = 56;

  static_assert(kHeads == 16 || kHeads == 32 || kHeads == 64, "a product takes 16 heads at a time");
  static_assert(kWalkers * kWalkerRegisters + kLoadRegisters <= 512,
                "the warpgroups share the 65536 registers of an SM");
  static_assert(kWalkers <= 4, "a warp of the loading warpgroup serves one walker");
};

// What one walker and its loading warp share.
template <typename Config>
struct Lane {
  alignas(1024) uint8_t q[Config::kQueryStages][Config::kChunks * Config::kQueryChunkBytes];
  alignas(1024) uint8_t keys[Config::kKeyStages][Config::kChunks * Config::kKeyChunkBytes];
  alignas(1024) uint8_t ds[2][Config::kHeads * 128];  // [head][key]; at last grad_q [head][channel]
  int32_t rows[Config::kKeyStages][Config::kKeys];    // key of each slot of the tile, -1 for none
  float grad_scores[Config::kKeyStages][Config::kKeys];
  float weights[Config::kQueryStages][Config::kHeads];
  float grad_weights[4][Config::kHeads];  // a warp's sums
  int32_t extents[Config::kQueryStages];  // of the rows whose queries are there
  uint64_t key_full[Config::kKeyStages];
  uint64_t key_empty[Config::kKeyStages];
  uint64_t query_full[Config::kQueryStages];
  uint64_t query_empty[Config::kQueryStages];
  uint64_t row_end;
};

template <typename Config>
struct SharedStorage {
  Lane<Config> lanes[Config::kWalkers];
};

static_assert(sizeof(SharedStorage<Config<16, false>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<32, false>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<64, false>>) <= 232448, "over the limit of a Hopper SM");

// What the kernel receives. Strides count elements.
struct KernelParams {
  const __nv_bfloat16* index_q;  // [T_q, H_index, 128]
  int64_t index_q_row_stride;
  int64_t index_q_head_stride;
  const __nv_bfloat16* index_k;  // [T_k, 128]
  int64_t index_k_row_stride;
  const void* head_weights;  // [T_q, H_index], FP32 or BF16
  int64_t head_weights_row_stride;
  const int32_t* topk_indices;  // [T_q, K]
  int64_t topk_indices_row_stride;
  const int32_t* topk_length;  // [T_q] or null
  const float* grad_scores;    // [T_q, K]
  int64_t grad_scores_row_stride;

  __nv_bfloat16* grad_index_q;  // [T_q, H_index, 128], contiguous
  void* grad_head_weights;      // [T_q, H_index], contiguous, as head_weights
  // Rows of 128 channels in the order of channels.cuh, aligned to 16 bytes: the accumulators [T_k],
  // or, of the ordered kernel, [rows, K], one for every slot.
  float* grad_k_rows;

  int64_t first_row;  // query rows of this launch: first_row, + 1, ...
  int rows;
  int walkers;  // of the whole grid
  int heads;
  int t_k;
  int topk;
  bool weights_are_bf16;
  bool q_aligned;  // every row of index_q begins at a multiple of 16 bytes
  bool k_aligned;
  bool grad_q_aligned;
};

}  // namespace flashdsa::indexer::sm90::backward_pass
