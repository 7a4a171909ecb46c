#include "tests/support/score_gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tests/support/compare.h"
#include "tests/support/engines.h"
#include "tests/support/placement.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr std::int64_t kDim = 128;

ScoreGradientProblem empty_problem(const ScoreGradientSizes& sizes, std::uint64_t seed) {
  const auto& [t_q, t_k, heads, topk] = sizes;
  ScoreGradientProblem problem;
  problem.seed = seed;
  problem.index_q = HostTensor(DType::kBFloat16, {t_q, heads, kDim});
  problem.index_k = HostTensor(DType::kBFloat16, {t_k, kDim});
  problem.head_weights = HostTensor(DType::kFloat32, {t_q, heads});
  problem.topk_indices = HostTensor(DType::kInt32, {t_q, 1, topk});
  problem.grad_scores = HostTensor(DType::kFloat32, {t_q, topk});
  Random random(seed + 1);
  for (std::int64_t t = 0; t < t_q; ++t) {
    problem.set_row(t, random.subset(t_k, std::min(t_k, topk)));
  }
  return problem;
}

}  // namespace

std::string ScoreGradientProblem::describe() const {
  return fmt::format("seed {}, T_q {}, T_k {}, H_index {}, K {}", seed, t_q(), t_k(), heads(),
                     topk());
}

void ScoreGradientProblem::set_row(std::int64_t t, const std::vector<std::int32_t>& keys) {
  for (std::int64_t j = 0; j < topk(); ++j) {
    const auto i = static_cast<std::size_t>(j);
    topk_indices.set({t, 0, j}, i < keys.size() ? keys[i] : -1);
  }
}

void ScoreGradientProblem::set_lengths(const std::vector<std::int32_t>& lengths) {
  topk_length = HostTensor(DType::kInt32, {t_q()});
  for (std::int64_t t = 0; t < t_q(); ++t) {
    topk_length->set({t}, lengths[static_cast<std::size_t>(t)]);
  }
}

IndexerBackwardArgs ScoreGradientProblem::inputs() const {
  IndexerBackwardArgs args;
  args.index_q = index_q;
  args.index_k = index_k;
  args.head_weights = head_weights;
  args.topk_indices = topk_indices;
  if (topk_length) args.topk_length = *topk_length;
  args.grad_scores = grad_scores;
  return args;
}

ScoreGradientProblem random_score_gradients(const ScoreGradientSizes& sizes, std::uint64_t seed) {
  ScoreGradientProblem problem = empty_problem(sizes, seed);
  Random random(seed);
  random.fill_normal(problem.index_q);
  random.fill_normal(problem.index_k);
  random.fill_normal(problem.head_weights, 1 / std::sqrt(static_cast<double>(sizes.heads * kDim)));
  random.fill_normal(problem.grad_scores);
  return problem;
}

ScoreGradientProblem integer_score_gradients(const ScoreGradientSizes& sizes, std::uint64_t seed) {
  ScoreGradientProblem problem = empty_problem(sizes, seed);
  Random random(seed);
  random.fill_integers(problem.index_q, -2, 2);
  random.fill_integers(problem.index_k, -2, 2);
  random.fill_integers(problem.grad_scores, -2, 2);
  for (std::int64_t i = 0; i < problem.head_weights.elements(); ++i) {
    const double power = std::ldexp(1.0, static_cast<int>(random.integer(-3, 0)));
    problem.head_weights.set(i, random.integer(0, 3) == 0 ? -power : power);
  }
  return problem;
}

ScoreGradientProblem in_float64(const ScoreGradientProblem& problem) {
  ScoreGradientProblem result = problem;
  for (HostTensor* tensor :
       {&result.index_q, &result.index_k, &result.head_weights, &result.grad_scores}) {
    *tensor = tensor->as(DType::kFloat64);
  }
  return result;
}

ScoreGradientProblem rows_of(const ScoreGradientProblem& problem, std::int64_t begin,
                             std::int64_t count) {
  ScoreGradientProblem result = problem;
  for (HostTensor* tensor :
       {&result.index_q, &result.head_weights, &result.topk_indices, &result.grad_scores}) {
    *tensor = tensor->rows(begin, count);
  }
  if (result.topk_length) result.topk_length = result.topk_length->rows(begin, count);
  return result;
}

ScoreGradients empty_gradients(const ScoreGradientProblem& problem, DType keys) {
  const DType real = problem.index_q.dtype();
  return {HostTensor(real, problem.index_q.shape()),
          HostTensor(real == DType::kFloat64 ? real : keys, problem.index_k.shape()),
          HostTensor(problem.head_weights.dtype(), problem.head_weights.shape())};
}

IndexerBackwardArgs backward_args(const ScoreGradientProblem& problem,
                                  const ScoreGradients& result) {
  IndexerBackwardArgs args = problem.inputs();
  args.grad_index_q = result.grad_index_q;
  args.grad_index_k = result.grad_index_k;
  args.grad_head_weights = result.grad_head_weights;
  return args;
}

ScoreGradients run_score_gradients(const ScoreGradientProblem& problem, const Runtime& runtime,
                                   DType keys) {
  const ScoreGradients result = empty_gradients(problem, keys);
  run_placed(backward_args(problem, result), runtime);
  const auto expect_intact = [&](const char* name, const HostTensor& tensor) {
    EXPECT_TRUE(tensor.bands_intact()) << "guard band of " << name << "; " << problem.describe();
  };
  expect_intact("index_q", problem.index_q);
  expect_intact("index_k", problem.index_k);
  expect_intact("head_weights", problem.head_weights);
  expect_intact("topk_indices", problem.topk_indices);
  expect_intact("grad_scores", problem.grad_scores);
  expect_intact("grad_index_q", result.grad_index_q);
  expect_intact("grad_index_k", result.grad_index_k);
  expect_intact("grad_head_weights", result.grad_head_weights);
  return result;
}

::testing::AssertionResult gradients_within_spec(const ScoreGradientProblem& problem,
                                                 const ScoreGradients& got) {
  const ScoreGradients want = run_score_gradients(in_float64(problem), reference_runtime());
  const auto check = [&](const char* name, const HostTensor& mine, const HostTensor& exact) {
    const Values a = values_of(name, mine, problem.describe());
    const Values b = values_of(name, exact);
    if (auto result = relative_rmse_within(a, b, kGradRmse); !result) return result;
    return vectors_within(a, b, kVectorFactor * kGradRmse);
  };
  if (auto result = check("grad_index_q", got.grad_index_q, want.grad_index_q); !result) {
    return result;
  }
  if (auto result = check("grad_index_k", got.grad_index_k, want.grad_index_k); !result) {
    return result;
  }
  return check("grad_head_weights", got.grad_head_weights, want.grad_head_weights);
}

::testing::AssertionResult same_gradient_bits(const ScoreGradients& got,
                                              const ScoreGradients& want) {
  if (auto result = same_bits(got.grad_index_q, want.grad_index_q); !result) return result;
  if (auto result = same_bits(got.grad_index_k, want.grad_index_k); !result) return result;
  return same_bits(got.grad_head_weights, want.grad_head_weights);
}

}  // namespace flashdsa::test
