#pragma once

// Interface between the CPU backend's host code and its kernels, which are compiled once per
// instruction set. Plain structs and pointers only: kernels.cc must not instantiate inline
// functions that another set could share.

#include <cstddef>
#include <cstdint>

namespace flashdsa::attention::cpu {

/// Sizes of one call, the same for all of its rows.
struct Sizes {
  std::int32_t heads;     // H
  std::int32_t head_dim;  // D, 576 or 512
  std::int32_t topk;      // K
  float softmax_scale;
};

/// One query row. BF16 numbers are their bit patterns.
struct RowInputs {
  const std::uint16_t* q;  // [H, D]
  std::int64_t q_head_stride;
  const std::uint16_t* kv;  // [T_k, D]
  std::int64_t kv_row_stride;
  const std::int32_t* keys;  // [key_count], the counted slots in their order, each in 0..T_k-1
  std::int32_t key_count;    // >= 1
};

struct ForwardRow : RowInputs {
  const float* attn_sink;  // [H] or null
  std::uint16_t* out;      // [H, 512]
  float* lse;              // [H]
  float* max_logits;       // [H] or null
};

/// A row of the backward's first phase. The last four arrays are read by the second.
struct BackwardRow : RowInputs {
  const std::uint16_t* out;  // [H, 512]
  std::int64_t out_head_stride;
  const std::uint16_t* grad_out;  // [H, 512]
  std::int64_t grad_out_head_stride;
  const float* lse;        // [H], natural log of the softmax's whole denominator, sink included
  const float* key_mass;   // [H], what the sink leaves of the probability: sum_j P
  std::uint16_t* grad_q;   // [H, D]
  float* grad_dot_out;     // [H], D[t,h] = sum_j P * dP, which is sum_c grad_out * out
  std::uint16_t* p;        // [key_count, even H], P in BF16
  std::uint16_t* ds;       // [key_count, even H], dS in BF16
  std::uint32_t* q_pairs;  // query row as the second phase's right operand
  std::uint32_t* grad_out_pairs;
};

/// What the second phase adds to the rows of grad_kv: for the slots [begin, end) of `slots`
/// (positions into keys), dS^T q + P^T grad_out.
struct AccumulateRow {
  const std::int32_t* keys;
  const std::uint16_t* p;
  const std::uint16_t* ds;
  const std::uint32_t* q_pairs;
  const std::uint32_t* grad_out_pairs;
  const std::int32_t* slots;  // [slot_count]
  std::int32_t slot_count;
};

/// The kernels of one instruction set.
struct Kernels {
  std::size_t (*forward_scratch_bytes)(const Sizes&);  // per thread, aligned to 64 bytes
  void (*forward_row)(const Sizes&, const ForwardRow&, void* scratch);

  std::size_t (*backward_scratch_bytes)(const Sizes&);              // per thread
  std::size_t (*pairs_words)(const Sizes&, std::int32_t channels);  // size of q_pairs, in words
  void (*backward_row)(const Sizes&, const BackwardRow&, void* scratch);
  // accumulators: FP32 [T_k, D] in the kernels' own channel order
  void (*accumulate_grad_kv)(const Sizes&, const AccumulateRow&, float* accumulators);
  // one row of accumulators to BF16 or FP32, channels in order; `row` may be the output row itself
  void (*store_bf16)(const Sizes&, const float* row, std::uint16_t* grad_kv_row);
  void (*store_f32)(const Sizes&, const float* row, float* grad_kv_row);

  // The plain product that benchmarks take as the peak: scores[key, head] = dot(q[head], k[key]).
  std::size_t (*product_scratch_bytes)(const Sizes&);
  void (*product)(const Sizes&, const RowInputs&, float* scores, void* scratch);
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

/// Even number of heads that P and dS rows are stored with.
inline constexpr std::int32_t even_heads(std::int32_t heads) { return (heads + 1) / 2 * 2; }

}  // namespace flashdsa::attention::cpu
