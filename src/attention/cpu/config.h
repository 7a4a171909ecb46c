#pragma once

// Tile sizes of the CPU attention kernels, by the width and number of the vector registers.

namespace flashdsa::attention::cpu {

template <int kLanes>
struct Config {
  // Keys per block. A block's copied keys, its packed pairs, its logits and the row's accumulators
  // together take about 0.6 MB at H = 64, which stays in a 1 MB second-level cache.
  static constexpr int kBlockKeys = 144;

  // 32 registers of 16 lanes, or 16 narrower ones: accumulators of one tile.
  static constexpr bool kWide = kLanes == 16;

  // Scores: vectors of heads x keys.
  static constexpr int kScoreVectors = 2;
  static constexpr int kScoreKeys = kWide ? 12 : 4;

  // Channels of a chunk of the score's contraction; a chunk of a panel takes 8 KB.
  static constexpr int kChunkChannels = 128;

  // Products over pairs of keys or heads: rows x vectors of words.
  static constexpr int kPairRows = kWide ? 6 : 4;
  static constexpr int kPairVectors = kWide ? 4 : 2;
};

}  // namespace flashdsa::attention::cpu
