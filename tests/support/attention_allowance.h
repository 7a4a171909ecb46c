#pragma once

#include <vector>

#include "tests/support/attention_problem.h"

namespace flashdsa::test {

inline constexpr double kTiny = 1e-35;  // below this FP32 and BF16 underflow

/// What rounding may do to a result beside the relative bound of SPEC section 8, which cannot be
/// met where terms cancel (grad_q of a row with one key is zero): absolute allowances that scale
/// with the terms before they cancel.
struct Allowance {
  std::vector<double> out;            // [T_q * H], BF16 rounding of P
  std::vector<double> grad_q;         // [T_q * H], each vector: FP32 sums, BF16 dS, D from BF16 out
  std::vector<double> grad_q_tensor;  // [T_q * H], the whole tensor: FP32 sums only
  std::vector<double> grad_kv;        // [T_k], likewise
  std::vector<double> grad_kv_tensor;  // [T_k]
  double grad_attn_sink = kTiny;       // D from BF16 out
};

/// `want` is the float64 result of the same problem.
Allowance allowance_of(const AttentionProblem& problem, const AttentionResult& want);

/// Euclidean norm.
double norm(const std::vector<double>& values);

}  // namespace flashdsa::test
