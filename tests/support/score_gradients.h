#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashdsa/indexer.h"
#include "tests/support/host_tensor.h"

namespace flashdsa::test {

/// Inputs of `indexer_backward`: BF16 queries and keys, FP32 or BF16 weights, FP32 gradients.
struct ScoreGradientProblem {
  std::uint64_t seed = 0;
  HostTensor index_q;                     // [T_q, H_index, 128]
  HostTensor index_k;                     // [T_k, 128]
  HostTensor head_weights;                // [T_q, H_index]
  HostTensor topk_indices;                // int32 [T_q, 1, K]
  std::optional<HostTensor> topk_length;  // int32 [T_q]
  HostTensor grad_scores;                 // [T_q, K]

  std::int64_t t_q() const { return index_q.size(0); }
  std::int64_t t_k() const { return index_k.size(0); }
  std::int64_t heads() const { return index_q.size(1); }
  std::int64_t topk() const { return topk_indices.size(2); }

  /// "seed 7, T_q 3, T_k 40, H_index 4, K 8"
  std::string describe() const;
  void set_row(std::int64_t t, const std::vector<std::int32_t>& keys);
  void set_lengths(const std::vector<std::int32_t>& lengths);

  IndexerBackwardArgs inputs() const;
};

struct ScoreGradientSizes {
  std::int64_t t_q, t_k, heads, topk;
};

/// Normal numbers, weights over sqrt(H_index * 128). A row selects different keys, ascending, then
/// -1 where T_k < K.
ScoreGradientProblem random_score_gradients(const ScoreGradientSizes& sizes, std::uint64_t seed);

/// The same with integers of -2..2 and weights that are powers of two or their negatives: every
/// factor is exact in BF16 and every sum exact in FP32.
ScoreGradientProblem integer_score_gradients(const ScoreGradientSizes& sizes, std::uint64_t seed);

ScoreGradientProblem in_float64(const ScoreGradientProblem& problem);
ScoreGradientProblem rows_of(const ScoreGradientProblem& problem, std::int64_t begin,
                             std::int64_t count);

struct ScoreGradients {
  HostTensor grad_index_q;       // [T_q, H_index, 128]
  HostTensor grad_index_k;       // [T_k, 128]
  HostTensor grad_head_weights;  // [T_q, H_index]
};

/// Outputs that hold a sentinel between guard bands. float64 beside float64, else grad_index_k in
/// `keys`.
ScoreGradients empty_gradients(const ScoreGradientProblem& problem, DType keys = DType::kBFloat16);

/// The call that fills a result.
IndexerBackwardArgs backward_args(const ScoreGradientProblem& problem,
                                  const ScoreGradients& result);

/// Runs the call; a guard band that changed is a test failure.
ScoreGradients run_score_gradients(const ScoreGradientProblem& problem, const Runtime& runtime,
                                   DType keys = DType::kBFloat16);

/// The gradients are within SPEC section 3's bound of the reference's in float64: relative RMSE,
/// and every vector of the last axis within four times that.
::testing::AssertionResult gradients_within_spec(const ScoreGradientProblem& problem,
                                                 const ScoreGradients& got);

::testing::AssertionResult same_gradient_bits(const ScoreGradients& got,
                                              const ScoreGradients& want);

}  // namespace flashdsa::test
