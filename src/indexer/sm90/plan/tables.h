#pragma once

// What the planning kernels tell the others, and where it lies. A call is worked off in blocks of
// query rows; a block in windows of keys; the scores of a block's rows in one window in chunks that
// fit into scratch. Every table is of one block and one window.

#include <cstdint>

#ifdef __CUDACC__
#define FLASHDSA_HOST_DEVICE __host__ __device__
#else
#define FLASHDSA_HOST_DEVICE
#endif

namespace flashdsa::indexer::sm90 {

/// Keys of a score tile. Tiles lie on multiples of it, and so do the scores of a row.
inline constexpr std::uint32_t kTileKeys = 64;

/// Keys of the longest segment, at least. A row of several segments shares its keys evenly, so each
/// has half as many and therefore K candidates.
inline constexpr std::int64_t kLeastSegmentKeys = 16384;

/// One row in the window. A row without scores to make has begin == end == 0.
struct RowPlan {
  std::int64_t offset;       // of its scores, counted over the whole window
  std::uint32_t begin, end;  // visible keys in the window
  std::int32_t slot;         // first candidate slot, counted over the whole window
  std::int32_t segments;     // the selection's tasks
  std::int32_t kept;         // candidates kept of earlier windows
  std::int32_t continues;    // 1: visible keys lie in later windows too

  /// Key of the row's first stored score.
  FLASHDSA_HOST_DEVICE std::uint32_t first() const { return begin & ~(kTileKeys - 1); }
  /// Stored scores, whole tiles.
  FLASHDSA_HOST_DEVICE std::uint32_t pitch() const {
    return ((end + kTileKeys - 1) & ~(kTileKeys - 1)) - first();
  }
  /// First stored score of a segment; segments share the tiles evenly.
  FLASHDSA_HOST_DEVICE std::uint32_t segment_begin(int segment) const {
    const std::uint64_t tiles = pitch() / kTileKeys;
    return static_cast<std::uint32_t>(tiles * static_cast<std::uint64_t>(segment) /
                                      static_cast<std::uint64_t>(segments)) *
           kTileKeys;
  }
  /// Whether several partial selections make the row's result.
  FLASHDSA_HOST_DEVICE bool is_merged() const { return segments > 1 || kept > 0 || continues != 0; }
};

/// Where a chunk's shares begin; the next chunk's entry says where they end.
struct ChunkBegin {
  std::int64_t offset;
  std::int32_t group;  // row group
  std::int32_t task;
  std::int32_t slot;
  std::int32_t merge;
  std::int32_t item;  // first score item, and how many
  std::int32_t items;
};

/// A score item: the rows of one group, a span of keys.
struct alignas(16) Item {
  std::int32_t row;    // first of the group
  std::uint32_t key;   // first, a multiple of kTileKeys
  std::int32_t tiles;  // even; 0: no more items
  std::int32_t unused;
};

/// A selection task: one segment of a row.
struct Task {
  std::int32_t row;
  std::int32_t segment;
};

/// Counters from which a chunk's CTAs draw their work.
struct Tickets {
  std::int32_t items;
  std::int32_t tasks;
  std::int32_t merges;
};

/// The tables in device memory.
struct Tables {
  RowPlan* rows;       // [block rows]
  ChunkBegin* chunks;  // [chunks + 1]
  Tickets* tickets;    // [chunks]
  Item* items;
  std::int32_t* item_count;  // [1]
  Task* tasks;
  std::int32_t* merges;  // rows
};

}  // namespace flashdsa::indexer::sm90
