#pragma once

// Interface between the CPU indexer's host code and its kernels, which are compiled once per
// instruction set. Plain structs and pointers only: kernels.cc must not instantiate inline
// functions that another set could share.

#include <cstddef>
#include <cstdint>

namespace flashdsa::indexer::cpu {

/// The kernels of one instruction set.
struct Kernels {
  std::int32_t panel_keys;  // keys of one packed panel

  /// Packs `count` <= panel_keys key rows [count, 128] BF16 into panel [64 words][panel_keys];
  /// missing keys are zero.
  void (*pack_keys)(const std::uint16_t* keys, std::int64_t key_stride, std::int32_t count,
                    std::uint32_t* panel);

  /// scores [panel_keys] of one query row [heads, 128] BF16 (contiguous) with its FP32 weights.
  void (*score_panel)(const std::uint16_t* q, const float* weights, std::int32_t heads,
                      const std::uint32_t* panel, float* scores);

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
