#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/sm90/forward_params.h"

namespace flashdsa::attention::sm90::forward_few_heads {

using KernelParams = ForwardKernelParams;

inline constexpr int kMostHeads = 32;

// Sizes of the forward kernel for few heads. A block is 64 keys x 64 channels in the 128-byte
// swizzle of core/cuda/wgmma.cuh; a slot is what the ring hands over at once, three blocks of one
// tile; a tile of 64 keys, three slots, is one softmax step.
template <int kHeadDimArg, int kColumnsArg>
struct Config {
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr int kValueDim = 512;
  static constexpr int kColumns = kColumnsArg;  // heads of a tile, the products' N
  static constexpr int kBlocks = kHeadDim / 64;
  static constexpr int kValueBlocks = kValueDim / 64;
  static constexpr int kQueryBlockBytes = kColumns * 128;

  static constexpr int kTileKeys = 64;  // the products' M, two words of validity bits
  static constexpr int kBlockBytes = kTileKeys * 128;
  static constexpr int kSlotBlocks = 3;
  static constexpr int kTileSlots = 3;  // each gives a sum of S of its own, see kernel.cuh
  static constexpr int kSlotBytes = kSlotBlocks * kBlockBytes;
  static constexpr int kSlots = kColumns == 32 ? 7 : 8;
  static constexpr int kScorers = 2;  // warpgroups that take turns; each has a tile of P

  static constexpr int kThreads = 512;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kScoreRegisters = 128;
  static constexpr int kValueRegisters = 216;

  // Blocks of slot kSlot of a tile, and those that are values.
  static constexpr int kLastSlot = kTileSlots - 1;
  template <int kSlot>
  static constexpr int kKeyBlocks =
      kSlot < kLastSlot ? kSlotBlocks : kBlocks - kLastSlot * kSlotBlocks;
  template <int kSlot>
  static constexpr int kSlotValueBlocks =
      kSlot < kLastSlot ? kSlotBlocks : kValueBlocks - kLastSlot * kSlotBlocks;

  static_assert(kHeadDim == 576 || kHeadDim == 512, "SPEC's two latents");
  static_assert(kColumns == 8 || kColumns == 16 || kColumns == kMostHeads, "sizes of a product");
  static_assert(kTileSlots * kSlotBlocks >= kBlocks, "a tile's slots hold all of a key");
  static_assert(kProducerRegisters + kScorers * kScoreRegisters + kValueRegisters <= 512,
                "the warpgroups share the 65536 registers of an SM");
};

template <typename Config>
struct SharedStorage {
  alignas(1024) uint8_t q[Config::kBlocks * Config::kQueryBlockBytes];  // [block][head]
  alignas(1024) uint8_t ring[Config::kSlots * Config::kSlotBytes];      // [block][key]
  alignas(1024) uint8_t p[Config::kScorers][Config::kQueryBlockBytes];  // [head][key], swizzled
  alignas(8) float alpha[Config::kScorers][Config::kColumns];       // of O, before the tile's P V
  alignas(8) float inverse[Config::kColumns];                       // 1 / softmax denominator
  alignas(8) float reference[Config::kScorers][Config::kColumns];   // where a tile moved it
  alignas(8) float partial[Config::kScorers][4][Config::kColumns];  // maxima by warp
  alignas(8) float sum[Config::kScorers * 4][Config::kColumns];     // of the item, by warp
  alignas(8) float top[Config::kScorers * 4][Config::kColumns];
  uint32_t moved[Config::kScorers];            // whether an alpha may differ from 1
  uint32_t reference_moved[Config::kScorers];  // whether `reference` is to be taken
  uint32_t valid[Config::kSlots];  // slots 0, 1 of a tile: bit c: key c, 32 + c of the tile counts
  uint64_t kv_full[Config::kSlots];
  uint64_t kv_empty[Config::kSlots];
  uint64_t p_full[Config::kScorers];
  uint64_t p_empty[Config::kScorers];
  uint64_t turn[Config::kScorers];
  uint64_t partial_full[Config::kScorers];
  uint64_t partial_empty[Config::kScorers];
  uint64_t totals_full;
  uint64_t totals_empty;
  uint64_t inverse_full;
  uint64_t inverse_empty;
};

static_assert(sizeof(SharedStorage<Config<576, 8>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<576, 16>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<576, 32>>) <= 232448, "over the limit of a Hopper SM");

}  // namespace flashdsa::attention::sm90::forward_few_heads
