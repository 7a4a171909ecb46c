#pragma once

// Interface between the CPU indexer's host code and its kernels, which are compiled once per
// instruction set. Plain structs and pointers only: kernels.cc must not instantiate inline
// functions that another set could share.

#include <cstddef>
#include <cstdint>

namespace flashdsa::indexer::cpu {

/// A query row with its weights.
struct Query {
  const std::uint16_t* q;  // [heads, 128] BF16, contiguous
  const float* weights;    // [heads]
  std::int32_t heads;
  std::uint32_t least_magnitude;  // of q
};

/// Packed keys, at most panel_keys of them.
struct Panel {
  std::uint32_t* words;           // [64][panel_keys]
  std::uint32_t least_magnitude;  // of the keys
};

/// The kernels of one instruction set.
struct Kernels {
  std::int32_t panel_keys;  // keys of one packed panel

  /// Smallest magnitude (BF16 bits) of the numbers that are not zero.
  std::uint32_t (*least_magnitude)(const std::uint16_t* numbers, std::int32_t count);

  /// Packs `count` <= panel_keys key rows [count, 128] BF16; missing keys are zero.
  void (*pack_keys)(const std::uint16_t* keys, std::int64_t key_stride, std::int32_t count,
                    Panel& panel);

  /// scores [panel_keys] of one query row.
  void (*score_panel)(const Query& query, const Panel& panel, float* scores);

  /// Appends the scores above `threshold` (NaN is above every number, nothing is above NaN) and
  /// their keys, first_key + position, in order. Returns how many. Writes up to 16 entries more
  /// than it counts.
  std::int32_t (*append_above)(const float* scores, std::int32_t count, float threshold,
                               std::int32_t first_key, float* kept_scores, std::int32_t* kept_keys);
};

#define FLASHDSA_DECLARE_KERNELS(target) \
  namespace target {                     \
  const Kernels& kernels();              \
  }
FLASHDSA_DECLARE_KERNELS(baseline)
FLASHDSA_DECLARE_KERNELS(avx2)
FLASHDSA_DECLARE_KERNELS(avx512)
FLASHDSA_DECLARE_KERNELS(avx512bf16)
#undef FLASHDSA_DECLARE_KERNELS

}  // namespace flashdsa::indexer::cpu
