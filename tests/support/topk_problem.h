#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flashdsa/indexer.h"
#include "tests/support/host_tensor.h"

namespace flashdsa::test {

/// Inputs of the indexer. BF16 queries and keys, FP32 or BF16 weights.
struct TopkProblem {
  std::uint64_t seed = 0;
  HostTensor index_q;         // [T_q, H_index, 128]
  HostTensor index_k;         // [T_k, 128]
  HostTensor head_weights;    // [T_q, H_index]
  HostTensor starts;          // int32 [T_q]
  HostTensor causal_lengths;  // int32 [T_q]
  std::int64_t topk = 1;

  std::int64_t t_q() const { return index_q.size(0); }
  std::int64_t t_k() const { return index_k.size(0); }
  std::int64_t heads() const { return index_q.size(1); }

  /// "seed 7, T_q 3, T_k 40, H_index 4, K 8"
  std::string describe() const;
  void set_rows(const std::vector<std::int32_t>& row_starts,
                const std::vector<std::int32_t>& lengths);
  void fill_query(std::int64_t t, double value);
  void fill_key(std::int64_t s, double value);

  /// First and behind-last visible key of a row that lie in the storage.
  std::int64_t first_key(std::int64_t t) const;
  std::int64_t end_key(std::int64_t t) const;

  IndexerTopkArgs inputs() const;
};

/// Row t sees keys 0 .. T_k - T_q + t: the last rows of one causal document. All zero.
TopkProblem causal_topk(std::int64_t t_q, std::int64_t t_k, std::int64_t heads, std::int64_t topk);

/// The same with normal queries and keys, and normal weights over sqrt(H * 128).
TopkProblem random_topk(std::int64_t t_q, std::int64_t t_k, std::int64_t heads, std::int64_t topk,
                        std::uint64_t seed);

/// The same with integers of -2..2, and weights that are powers of two or their negatives: every
/// partial sum is exact in FP32, and ties abound.
TopkProblem integer_topk(std::int64_t t_q, std::int64_t t_k, std::int64_t heads, std::int64_t topk,
                         std::uint64_t seed);

/// One row whose visible keys have exactly these scores: BF16 numbers, infinities, NaN.
TopkProblem topk_of_scores(const std::vector<double>& scores, std::int64_t topk);

/// One row whose visible keys have exactly these scores: integers of 0 .. 2^24 - 1.
TopkProblem topk_of_integers(const std::vector<std::int64_t>& scores, std::int64_t topk);

TopkProblem in_float64(const TopkProblem& problem);
TopkProblem rows_of(const TopkProblem& problem, std::int64_t begin, std::int64_t count);

struct TopkResult {
  HostTensor topk_indices;                // [T_q, 1, K]
  HostTensor topk_length;                 // [T_q]
  std::optional<HostTensor> topk_scores;  // [T_q, K]
};

enum class WantScores : bool { kNo, kYes };

/// Outputs that hold a sentinel between guard bands.
TopkResult empty_result(const TopkProblem& problem, WantScores want = WantScores::kYes);

/// The call that fills a result.
IndexerTopkArgs topk_args(const TopkProblem& problem, const TopkResult& result);

/// Runs the indexer. Outputs lie between guard bands and hold a sentinel before the call; a band
/// that changed is a test failure.
TopkResult run_topk(const TopkProblem& problem, const Runtime& runtime,
                    WantScores want = WantScores::kYes);

/// Scores of row t's visible keys: plain loops in double.
std::vector<double> brute_force_scores(const TopkProblem& problem, std::int64_t t);

/// Positions of the `count` best scores in SPEC section 3's total order, ascending.
std::vector<std::int64_t> brute_force_best(const std::vector<double>& scores, std::int64_t count);

/// The result is the brute force's index by index, and its scores number by number.
::testing::AssertionResult exactly_best(const TopkProblem& problem, const TopkResult& got);

/// The result is one that SPEC section 8 allows.
::testing::AssertionResult best_within_spec(const TopkProblem& problem, const TopkResult& got);

::testing::AssertionResult same_topk_bits(const TopkResult& got, const TopkResult& want);

}  // namespace flashdsa::test
