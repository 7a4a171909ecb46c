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

}  // namespace flashdsa::indexer::cpu
