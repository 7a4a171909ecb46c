#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "attention/sm90/forward/config.h"

namespace flashdsa::attention::sm90::forward_few_heads {

using forward_pass::KernelParams;

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
  static constexpr int kSlots = kColumns == 32 ? 7 : kColumns == 16 ? 8 : 9;
  static constexpr int kStages = kColumns == 8 ? 1 : 2;  // tiles of P; at 8 a slot is worth more

  static constexpr int kThreads = 384;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kScoreRegisters = 200;
  static constexpr int kValueRegisters = 232;

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
  static_assert(kProducerRegisters + kScoreRegisters + kValueRegisters <= 504,
                "the warpgroups share the registers that the launch takes, 168 a thread");
};

template <typename Config>
struct SharedStorage {
  alignas(1024) uint8_t q[Config::kBlocks * Config::kQueryBlockBytes];  // [block][head]
  alignas(1024) uint8_t ring[Config::kSlots * Config::kSlotBytes];      // [block][key]
  alignas(1024) uint8_t p[Config::kStages][Config::kQueryBlockBytes];   // [head][key], swizzled
  alignas(
      8) float alpha[Config::kStages][Config::kColumns];  // what O is multiplied with before P V
  alignas(8) float inverse[Config::kColumns];             // 1 / softmax denominator
  alignas(8) float partial[4][Config::kColumns];          // by warp, see exchange()
  uint32_t moved[Config::kStages];                        // whether an alpha is not 1
  uint32_t valid[Config::kSlots];  // slots 0, 1 of a tile: bit c: key c, 32 + c of the tile counts
  uint64_t kv_full[Config::kSlots];
  uint64_t kv_empty[Config::kSlots];
  uint64_t p_full[Config::kStages];
  uint64_t p_empty[Config::kStages];
  uint64_t inverse_full;
  uint64_t inverse_empty;
  uint64_t partial_full;
  uint64_t partial_empty;
};

static_assert(sizeof(SharedStorage<Config<576, 8>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<576, 16>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<576, 32>>) <= 232448, "over the limit of a Hopper SM");

}  // namespace flashdsa::attention::sm90::forward_few_heads
