#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashdsa/attention.h"
#include "tests/support/host_tensor.h"

namespace flashdsa::test {

struct AttentionShape {
  std::int64_t t_q = 3;
  std::int64_t t_k = 40;
  std::int64_t heads = 4;
  std::int64_t topk = 24;
  std::int64_t head_dim = 576;
};

/// Inputs of forward and backward. BF16 beside FP32 unless `in_float64` made them.
struct AttentionProblem {
  std::uint64_t seed = 0;
  double softmax_scale = 0.0625;
  HostTensor q;                           // [T_q, H, D]
  HostTensor kv;                          // [T_k, 1, D]
  HostTensor topk_indices;                // int32 [T_q, 1, K]
  HostTensor grad_out;                    // [T_q, H, 512]
  std::optional<HostTensor> topk_length;  // int32 [T_q]
  std::optional<HostTensor> attn_sink;    // [H]

  std::int64_t t_q() const { return q.size(0); }
  std::int64_t t_k() const { return kv.size(0); }
  std::int64_t heads() const { return q.size(1); }
  std::int64_t head_dim() const { return q.size(2); }
  std::int64_t topk() const { return topk_indices.size(2); }

  /// "seed 7, T_q 3, T_k 40, ..."
  std::string describe() const;
  /// The keys of a row, one entry a counted slot. SPEC section 5, in plain words.
  std::vector<std::int64_t> keys_of_row(std::int64_t t) const;
  /// Slots of row t; those behind `slots` hold -1.
  void set_row(std::int64_t t, const std::vector<std::int32_t>& slots);
  void set_lengths(const std::vector<std::int32_t>& lengths);
  void set_sink(const std::vector<double>& sink);
  void set_key(std::int64_t key, double value);  // every channel

  SparseAttentionInputs inputs() const;
};

/// Normal q, kv and grad_out; every row picks min(K, T_k) different keys in ascending order.
AttentionProblem random_attention(const AttentionShape& shape, std::uint64_t seed);

/// The same problem in float64, exactly.
AttentionProblem in_float64(const AttentionProblem& problem);

/// Rows [begin, begin + count) of the problem over the same keys.
AttentionProblem rows_of(const AttentionProblem& problem, std::int64_t begin, std::int64_t count);

struct AttentionResult {
  Backend backend = Backend::kReference;     // that computed it
  HostTensor out, lse, max_logits;           // of the forward call
  HostTensor grad_q, grad_kv;                // of the backward call
  std::optional<HostTensor> grad_attn_sink;  // when the problem has a sink
};

/// Outputs for all that a problem can ask for: NaN between guard bands. grad_kv has q's dtype where
/// none is given.
AttentionResult empty_result(const AttentionProblem& problem, Backend backend,
                             std::optional<DType> grad_kv_dtype = std::nullopt);

/// The calls that fill a result; backward reads the forward's.
AttentionForwardArgs forward_args(const AttentionProblem& problem, const AttentionResult& result);
AttentionBackwardArgs backward_args(const AttentionProblem& problem, const AttentionResult& result);

/// Runs the forward call, all outputs requested. The outputs lie between guard bands and are filled
/// with NaN before the call; a band that changed is a test failure.
AttentionResult run_forward(const AttentionProblem& problem, const Runtime& runtime);

/// Adds the backward call, over the forward's own results.
AttentionResult run_attention(const AttentionProblem& problem, const Runtime& runtime,
                              std::optional<DType> grad_kv_dtype = std::nullopt);

/// The oracle of the other backends: `reference` on the problem in float64, unrounded.
AttentionResult reference_attention(const AttentionProblem& problem);

/// Everything SPEC section 8 asks of a result, and what has to be exact: rows without keys, keys
/// that nobody selected.
::testing::AssertionResult forward_within_spec(const AttentionProblem& problem,
                                               const AttentionResult& got);
::testing::AssertionResult within_spec(const AttentionProblem& problem, const AttentionResult& got);

/// The forward's outputs of two results have the same bits.
::testing::AssertionResult same_forward_bits(const AttentionResult& got,
                                             const AttentionResult& want);

/// All outputs of two results have the same bits.
::testing::AssertionResult same_result_bits(const AttentionResult& got,
                                            const AttentionResult& want);

}  // namespace flashdsa::test
