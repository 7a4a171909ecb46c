#pragma once

// Tile sizes of the CPU indexer, by the width and number of the vector registers.

namespace flashdsa::indexer::cpu {

template <int kLanes>
struct Config {
  static constexpr bool kWide = kLanes == 16;
  static constexpr int kHeads = kWide ? 8 : 4;       // heads of a tile
  static constexpr int kKeyVectors = kWide ? 3 : 2;  // vectors of keys of a tile and a panel
  static constexpr int kPanelKeys = kKeyVectors * kLanes;
};

// Keys per block of the backward. At H_index = 64 a block's copied keys, its packed pairs, its dots
// and the row's sums take 170 KB of second-level cache.
inline constexpr int kBlockKeys = 144;

}  // namespace flashdsa::indexer::cpu
