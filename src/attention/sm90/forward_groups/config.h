#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/sm90/forward_params.h"

namespace flashdsa::attention::sm90::forward_groups {

using KernelParams = ForwardKernelParams;

// Sizes of the forward kernel for groups. A block is 64 channels, 128 bytes of a row, in the
// 128-byte swizzle of core/cuda/wgmma.cuh; a slot is what the ring hands over at once; a tile is
// one softmax step.
template <int kHeadDimArg>
struct Config {
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr int kValueDim = 512;
  static constexpr int kRows = 64;  // of a query tile: tokens x heads
  static constexpr int kBlocks = kHeadDim / 64;
  static constexpr int kBlockBytes = kRows * 128;  // of the query tile

  // The tensor core truncates every partial sum, which one sum over all channels turns into 1.4e-6
  // of the largest logits; S is made of this many sums over channels, which FP32 registers add.
  static constexpr int kSums = 3;
  static constexpr int kStepsPerSum = kBlocks * 4 / kSums + (kBlocks * 4 % kSums != 0);

  static constexpr int kMaxGroup = 8;   // tokens of an item
  static constexpr int kSlotKeys = 32;  // one word of validity bits a token
  static constexpr int kSlots = 4;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileKeys = kSlotKeys * kTileSlots;
  static constexpr int kGroupBytes = kBlocks * 1024;  // eight keys, block after block
  static constexpr int kSlotBytes = kSlotKeys / 8 * kGroupBytes;

  static constexpr int kThreads = 512;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kScoreRegisters = 152;
  static constexpr int kValueRegisters = 160;

  static_assert(kHeadDim == 576 || kHeadDim == 512, "SPEC's two latents");
  static_assert(kSlots % kTileSlots == 0, "a tile never wraps round the ring");
  static_assert(kProducerRegisters + kScoreRegisters + 2 * kValueRegisters <= 512,
                "the warpgroups share the 65536 registers of an SM");
};

template <typename Config>
struct SharedStorage {
  alignas(1024) uint8_t q[Config::kBlocks * Config::kBlockBytes];   // [block][row]
  alignas(1024) uint8_t ring[Config::kSlots * Config::kSlotBytes];  // [8 keys][block][key]
  alignas(1024) uint8_t p[Config::kRows * Config::kTileKeys * 2];   // [row][key], swizzled
  float alpha[Config::kRows];    // what O has to be multiplied with before this tile's products
  float inverse[Config::kRows];  // 1 / softmax denominator
  uint32_t valid[Config::kSlots][Config::kMaxGroup];  // bit c: key c of the slot counts for a token
  uint64_t kv_full[Config::kSlots];
  uint64_t kv_empty[Config::kSlots];
  uint64_t p_full;
  uint64_t p_empty[Config::kTileSlots];
  uint64_t inverse_full;
  uint64_t inverse_empty;
  uint64_t walk_end;
  uint32_t repairs;  // not 0: an item is flagged
};

static_assert(sizeof(SharedStorage<Config<576>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<512>>) <= 232448, "over the limit of a Hopper SM");

}  // namespace flashdsa::attention::sm90::forward_groups
