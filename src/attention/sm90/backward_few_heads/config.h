#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/sm90/backward/config.h"

namespace flashdsa::attention::sm90::backward_few_heads {

using KernelParams = backward_pass::KernelParams;

inline constexpr int kMostHeads = 32;

// Sizes of the backward kernel for few heads. A block is 64 keys, or kColumns heads, x 64 channels
// in the 128-byte swizzle of core/cuda/wgmma.cuh.
template <int kHeadDimArg, int kColumnsArg>
struct Config {
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr int kValueDim = 512;
  static constexpr int kColumns = kColumnsArg;  // heads of a tile, the products' N
  static constexpr int kBlocks = kHeadDim / 64;
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr int kQueryBlockBytes = kColumns * 128;

  static constexpr int kTileKeys = 64;  // the products' M
  static constexpr int kBlockBytes = kTileKeys * 128;
  static constexpr int kStages = 2;                                // key tiles
  static constexpr int kQueries = kColumns == kMostHeads ? 1 : 2;  // places of q and grad_out
  static constexpr int kScorers = 3;  // two left 8 % at 32 heads: both scored too often

  // Eight heads of dS and eight of P make one product of grad_kv; the rope channels, which grad_out
  // does not have, meet a block of zeros.
  static constexpr bool kPairs = kColumns == 8;
  static constexpr int kVectorBlocks = kBlocks + (kPairs ? kBlocks : kValueBlocks);

  // The block of the rope channels, over which sum P k is made; out is that of the others.
  static constexpr bool kSumsRope = kHeadDim > kValueDim;
  static constexpr int kRope = kValueBlocks;

  static constexpr int kThreads = (2 + kScorers) * 128;
  static constexpr int kProducerRegisters = 32;
  static constexpr int kScoreRegisters = 80;
  static constexpr int kGradQRegisters = 208;

  // What the adds of backward/kernel.cuh ask for: rows of grad_kv are added up.
  static constexpr bool kOrdered = false;
  static constexpr bool kRepair = false;

  static_assert(kHeadDim == 576 || kHeadDim == 512, "SPEC's two latents");
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == kMostHeads, "sizes of a product");
  static_assert(kProducerRegisters + kScorers * kScoreRegisters + kGradQRegisters <=
                    (2 + kScorers) * 96,
                "the warpgroups share what the launch gives them: 96 registers a thread of 640");
  static_assert(kStages == 2,
                "a tile's keys are there only after its last but one's weights are read");
};

template <typename Config>
struct SharedStorage {
  // [block][q, grad_out][head]: one product makes S and dP of a block.
  alignas(1024) uint8_t vectors[Config::kQueries][Config::kVectorBlocks * Config::kQueryBlockBytes];
  alignas(1024) uint8_t keys[Config::kStages][Config::kBlocks * Config::kBlockBytes];
  alignas(1024) uint8_t p[Config::kQueryBlockBytes];   // [head][key], swizzled
  alignas(1024) uint8_t ds[Config::kQueryBlockBytes];  // [head][key], swizzled
  alignas(8) float lse_log2[2][Config::kColumns];      // whole denominator; +inf past the last head
  alignas(8) float d[2][Config::kColumns];             // sum of grad_out * out
  alignas(8) float sums[Config::kScorers * 4][3][Config::kColumns];  // of P, P u, P u^2, by warp
  uint64_t key_full[Config::kScorers];
  uint64_t key_empty[Config::kStages];
  uint64_t query_full[Config::kQueries];
  uint64_t query_empty[Config::kQueries];
  uint64_t weights_full;
  uint64_t weights_empty;
  uint64_t heads_full[2];
  uint64_t sums_full;
  uint64_t sums_empty;
};

static_assert(sizeof(SharedStorage<Config<576, 8>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<576, 16>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<576, 32>>) <= 232448, "over the limit of a Hopper SM");

}  // namespace flashdsa::attention::sm90::backward_few_heads
