#pragma once

#include <cstdint>

#include "indexer/sm90/plan/tables.h"

namespace flashdsa::indexer::sm90::score_pass {

// Sizes of the score kernel. A batch is one product of a tile of keys with 128 columns, each a head
// of one of four tokens; a tile of keys meets two batches.
template <int kHeadsArg>
struct Config {
  static constexpr int kHeads = kHeadsArg;  // H_index, rounded up
  static constexpr int kTokens = 256 / kHeads;
  static constexpr int kBatchColumns = 128;
  static constexpr int kBatchHeads = 32;
  static constexpr int kBatchTokens = 4;
  static constexpr int kHalfChannels = 64;  // 128 bytes of a row, one swizzled block
  static constexpr int kHalfBatchBytes = kBatchColumns * kHalfChannels * 2;
  static constexpr int kBatchBytes = 2 * kHalfBatchBytes;
  static constexpr int kQueryBytes = 2 * kBatchBytes;
  static constexpr int kHalfTileBytes = static_cast<int>(kTileKeys) * kHalfChannels * 2;
  static constexpr int kTileBytes = 2 * kHalfTileBytes;

  static constexpr int kQueryStages = 2;
  static constexpr int kKeyStages = 6;
  static constexpr int kWeightBytes = kHeads * static_cast<int>(sizeof(float));  // of a row
  static constexpr int kWeightStride = kHeads + 4;  // the four tokens of a warp in different banks

  static constexpr int kMathWarpgroups = 2;
  static constexpr int kThreads = 128 * (1 + kMathWarpgroups);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kMathRegisters = 240;

  static_assert(kHeads == 32 || kHeads == 64, "two batches hold 8 tokens of 32 heads or 4 of 64");
  // With an odd number both math warpgroups would use a stage in turn, and the one that runs ahead
  // could wait for a phase two ahead of the barrier's, which a wait by parity takes for complete.
  static_assert(kKeyStages % kMathWarpgroups == 0, "a stage belongs to one math warpgroup");
  static_assert(kProducerRegisters + kMathWarpgroups * kMathRegisters <= 512,
                "the warpgroups share the 65536 registers of an SM");
};

// Where the scores of one row of an item go: the tile whose first key is k begins at float
// offset + (k - first), if k - first < pitch.
struct RowTarget {
  std::uint32_t offset;
  std::uint32_t first;
  std::uint32_t pitch;
};

template <typename Config>
struct SharedStorage {
  alignas(1024) std::uint8_t q[Config::kQueryStages][Config::kQueryBytes];  // [batch][half][column]
  alignas(1024) std::uint8_t k[Config::kKeyStages][Config::kTileBytes];     // [half][key]
  alignas(128) float weights[Config::kQueryStages][Config::kTokens * Config::kWeightStride];
  Item item[Config::kQueryStages];
  RowTarget target[Config::kQueryStages][Config::kTokens];
  std::uint64_t q_full[Config::kQueryStages];
  std::uint64_t q_empty[Config::kQueryStages];
  std::uint64_t k_full[Config::kKeyStages];
  std::uint64_t k_empty[Config::kKeyStages];
};

static_assert(sizeof(SharedStorage<Config<32>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<64>>) <= 232448, "over the limit of a Hopper SM");

// What the kernel receives beside the tensor maps of q and k.
struct KernelParams {
  const float* weights;     // [block rows, Config::kHeads], zeros behind H_index
  const RowPlan* rows;      // [block rows]
  const Item* items;        // of all chunks
  const ChunkBegin* chunk;  // of this launch
  Tickets* tickets;         // of this launch
  float* scores;            // of the chunk
  std::int32_t block_rows;
  std::int32_t map_row;   // row of the q map that holds the block's first row
  std::uint32_t map_key;  // key that the k map begins with
  std::int32_t heads;     // H_index
};

}  // namespace flashdsa::indexer::sm90::score_pass
