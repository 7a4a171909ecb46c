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

/// A query row of the backward's first phase. The last two arrays are read by the second.
struct BackwardRow {
  std::int32_t heads;
  const std::uint16_t* q;  // [heads, 128] BF16
  std::int64_t q_head_stride;
  const float* weights;          // [heads]
  const std::uint16_t* index_k;  // [T_k, 128]
  std::int64_t index_k_row_stride;
  const std::int32_t* keys;  // [key_count], of the counted slots in their order, each in 0..T_k-1
  const float* grad_scores;  // [key_count], likewise
  std::int32_t key_count;    // >= 1
  std::uint16_t* grad_q;     // [heads, 128]
  float* grad_weights;       // [heads]
  std::uint16_t* factors;    // [key_count, even heads], g * w * 1[dot > 0] in BF16
  std::uint32_t* q_pairs;    // the query row as the second phase's right operand
};

/// What the second phase adds to the rows of grad_index_k: factors^T q for the slots of `slots`
/// (positions into keys).
struct AccumulateRow {
  std::int32_t heads;
  const std::int32_t* keys;
  const std::uint16_t* factors;
  const std::uint32_t* q_pairs;
  const std::int32_t* slots;  // [slot_count]
  std::int32_t slot_count;
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

  std::size_t (*backward_scratch_bytes)(std::int32_t heads);  // per thread, aligned to 64 bytes
  std::size_t (*pairs_words)(std::int32_t heads);             // size of q_pairs, in words
  void (*backward_row)(const BackwardRow& row, void* scratch);

  /// accumulators: FP32 [T_k, 128] in the kernels' own channel order.
  void (*accumulate_grad_index_k)(const AccumulateRow& row, float* accumulators);

  /// `count` rows of accumulators to BF16 or FP32, channels in order; the FP32 rows may be the
  /// accumulators themselves.
  void (*store_bf16)(const float* rows, std::int64_t count, std::uint16_t* grad_index_k);
  void (*store_f32)(const float* rows, std::int64_t count, float* grad_index_k);
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

/// Even number of heads that rows of factors are stored with.
inline constexpr std::int32_t even_heads(std::int32_t heads) { return (heads + 1) / 2 * 2; }

}  // namespace flashdsa::indexer::cpu
