#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/sm90/forward_params.h"

namespace flashdsa::attention::sm90::forward_many_rows {

using KernelParams = ForwardKernelParams;

/// The channels of a key or query row in three parts: those above 511, which may be none, and the
/// halves of the value channels, one for each consumer.
enum Part { kTail = 0, kHalf0 = 1, kHalf1 = 2, kParts = 3 };

// Sizes of the forward kernel for tiles of 64 rows. kGroups: an item is a group of the plan instead
// of one row's heads. A block is 64 rows x 64 channels in the 128-byte
// swizzle of core/cuda/wgmma.cuh; blocks 0..3 are half 0, 4..7 half 1, 8 the tail.
template <int kHeadDimArg, bool kGroupsArg>
struct Config {
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr bool kGroups = kGroupsArg;
  static constexpr int kValueDim = 512;
  static constexpr int kRows = 64;                   // of a query tile
  static constexpr int kMaxGroup = kGroups ? 8 : 1;  // tokens of an item
  static constexpr int kTileKeys = 64;
  static constexpr int kBlocks = kHeadDim / 64;
  static constexpr int kHalfBlocks = 4;
  static constexpr int kTailBlocks = kBlocks - 2 * kHalfBlocks;
  static constexpr int kBlockBytes = 64 * 128;
  static constexpr int kTileBytes = kBlocks * kBlockBytes;
  static constexpr int kStages = 2;  // one for each consumer

  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;

  static_assert(kHeadDim == 576 || kHeadDim == 512, "SPEC's two latents");
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 504,
                "the warpgroups share the registers that the launch takes, 168 a thread");
};

template <typename Config>
struct SharedStorage {
  // What a product with descriptors of stride 0 reads. It stands in front because compute-sanitizer
  // takes the strides for larger.
  alignas(1024) uint8_t zeros[1152];
  float reference[2][Config::kRows];  // by side
  float2 sums[2][Config::kRows];      // by side: its part of the denominator, its maximum
  // Of tile keys 0.., 32..; bit c: key c of these counts for a token.
  uint32_t valid[Config::kStages][2][Config::kMaxGroup];
  uint64_t q_full[kParts];
  uint64_t q_empty;
  uint64_t kv_full[Config::kStages][kParts];
  uint64_t kv_empty[Config::kStages][kParts];
  uint64_t p_full[2];
  uint64_t sums_full[2];
  uint64_t sums_empty[2];
  uint64_t walk_end;
  uint32_t repairs;                                                 // not 0: an item is flagged
  alignas(1024) uint8_t q[Config::kTileBytes];                      // [block][row]
  alignas(1024) uint8_t ring[Config::kStages][Config::kTileBytes];  // [block][key]
  alignas(1024) uint8_t p[Config::kBlockBytes];                     // [row][key], swizzled
};

static_assert(sizeof(SharedStorage<Config<576, true>>) <= 232448, "over the limit of a Hopper SM");

}  // namespace flashdsa::attention::sm90::forward_many_rows
