#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flashdsa::tools {

/// The FP64 values of one query row that its rounding allowances are made of. Spans are row-major.
struct AttentionRow {
  std::int64_t heads = 0;     // H
  std::int64_t head_dim = 0;  // D
  double softmax_scale = 0;
  std::span<const double> q;              // [H, D]
  std::span<const double> keys;           // [U, D], the block's keys
  std::span<const double> value_squares;  // [U], squared norm of the first 512 channels
  std::span<const double> key_squares;    // [U], squared norm of all channels
  std::span<const std::int32_t> slots;    // [n], which of the keys the row counts, n >= 1
  std::span<const double> attn_sink;      // [H], or empty
  std::span<const double> lse;            // [H], of the reference
  std::span<const double> out;            // [H, 512], of the reference
  std::span<const double> grad_out;       // [H, 512], or empty: forward only
};

/// What rounding may do to a row's results however much their terms cancel.
///
/// FP32 resolves kFp32Floor of the sum of absolute terms; P and dS may be BF16 (independent errors:
/// the root of the sum of squares); D comes from a BF16 `out` and shifts all dS of a row and head.
struct AttentionFloors {
  std::vector<double> out;         // [H]
  std::vector<double> absolute_q;  // [H], before kFp32Floor
  std::vector<double> rounded_q;   // [H]
  std::vector<double> kv_terms;    // [H, n], softmax_scale * P * sum_c |grad_out * value|
  std::vector<double> rounded_kv;  // [n], squares
  double sink_squares = 0;         // of what BF16 rounding of `out` does to grad_attn_sink
};

AttentionFloors attention_floors(const AttentionRow& row);

}  // namespace flashdsa::tools
