#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/sm90/backward/config.h"

namespace flashdsa::attention::sm90::backward_many_heads {

using KernelParams = backward_pass::KernelParams;

// Sizes of the backward kernel for many heads. A block is 64 keys or vectors x 64 channels in the
// 128-byte swizzle of core/cuda/wgmma.cuh. kGroups: items are those of backward/groups.h, up to
// eight tokens of at most 32 heads.
template <int kHeadDimArg, bool kGroupsArg>
struct Config {
  static constexpr bool kGroups = kGroupsArg;
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr int kValueDim = 512;
  static constexpr bool kHasRope = kHeadDim > kValueDim;
  static constexpr int kColumns = 64;           // vectors of a tile, the products' N
  static constexpr int kTileKeys = 64;          // the products' M
  static constexpr int kChunkBytes = 64 * 128;  // of a block

  static constexpr int kValueBlocks = 4;  // of the CTA: half of the value channels
  static constexpr int kRope = 4;         // place of the rope block, which both CTAs have
  static constexpr int kBlocks = kValueBlocks + (kHasRope ? 1 : 0);

  static constexpr int kStages = 2;  // key tiles
  static constexpr int kScorers = 2;

  static constexpr int kThreads = (2 + kScorers) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kScoreRegisters = kHasRope ? 128 : 136;
  static constexpr int kGradQRegisters = kHasRope ? 216 : 200;

  // 32 accumulators of each of a warpgroup's threads, in sixteen-byte pieces: [piece][thread].
  static constexpr int kExchangeBytes = 32 * 4 * 128;

  // What the adds of backward/kernel.cuh ask for: rows of grad_kv are added up.
  static constexpr bool kOrdered = false;
  static constexpr bool kRepair = false;

  static_assert(kHeadDim == 576 || kHeadDim == 512, "SPEC's two latents");
  static_assert(kProducerRegisters + kScorers * kScoreRegisters + kGradQRegisters <= 512,
                "the warpgroups share what the launch gives them: 128 registers a thread of 512");
  static_assert(kStages == 2,
                "a tile's keys are there only after its last but one's weights are read");
};

template <typename Config>
struct SharedStorage {
  alignas(1024) uint8_t q[Config::kBlocks * Config::kChunkBytes];              // [block][vector]
  alignas(1024) uint8_t grad_out[Config::kValueBlocks * Config::kChunkBytes];  // [block][vector]
  alignas(1024) uint8_t keys[Config::kStages][Config::kBlocks * Config::kChunkBytes];
  alignas(1024) uint8_t p[Config::kChunkBytes];                           // [vector][key]
  alignas(1024) uint8_t ds[Config::kChunkBytes];                          // [vector][key]
  alignas(16) uint8_t partner[Config::kScorers][Config::kExchangeBytes];  // its S, then its dP
  alignas(16) uint8_t partner_p_k[Config::kHasRope ? Config::kExchangeBytes : 16];
  alignas(8) float lse_log2[2][Config::kColumns];  // whole denominator; +inf past the last vector
  alignas(8) float d[2][Config::kColumns];         // sum of grad_out * out
  alignas(8) float sums[Config::kScorers * 4][3][Config::kColumns];  // of P, P u, P u^2, by warp
  uint64_t key_full[Config::kScorers];
  uint64_t key_empty[Config::kStages];
  uint64_t query_full;
  uint64_t query_empty;
  uint64_t partner_full[Config::kScorers];
  uint64_t partner_empty[Config::kScorers];
  uint64_t weights_full;
  uint64_t weights_empty;
  uint64_t heads_full[2];
  uint64_t sums_full;
  uint64_t sums_empty;
  uint64_t p_k_full;
  uint64_t p_k_empty;
};

static_assert(sizeof(SharedStorage<Config<576, false>>) <= 232448, "over the limit of a Hopper SM");

}  // namespace flashdsa::attention::sm90::backward_many_heads
