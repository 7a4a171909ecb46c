#include "tests/support/topk_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/support/compare.h"
#include "tests/support/placement.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

constexpr std::int64_t kDim = 128;
constexpr double kInf = std::numeric_limits<double>::infinity();

double finite_or_zero(double value) { return std::isfinite(value) ? value : 0.0; }

// Row t's queries [H, 128] and weights [H].
struct Query {
  std::vector<double> q;
  std::vector<double> weights;
};

Query query_of(const TopkProblem& problem, std::int64_t t) {
  Query query;
  for (std::int64_t h = 0; h < problem.heads(); ++h) {
    query.weights.push_back(problem.head_weights.get({t, h}));
    for (std::int64_t c = 0; c < kDim; ++c) query.q.push_back(problem.index_q.get({t, h, c}));
  }
  return query;
}

// relu(0 or less) = 0, relu(NaN) = NaN.
double relu(double value) { return value < 0 ? 0 : value; }

double head_dot(const Query& query, std::size_t h, const std::vector<double>& key) {
  double dot = 0;
  for (std::size_t c = 0; c < key.size(); ++c) dot += query.q[h * key.size() + c] * key[c];
  return dot;
}

std::vector<double> key_of(const TopkProblem& problem, std::int64_t s) {
  std::vector<double> key;
  for (std::int64_t c = 0; c < kDim; ++c) key.push_back(problem.index_k.get({s, c}));
  return key;
}

// What SPEC section 8 lets a row's scores err: 2e-5 of the largest sum before its heads cancel,
// and one FP32 rounding of the largest sum before anything cancels.
double score_slack(const TopkProblem& problem, std::int64_t t) {
  const Query query = query_of(problem, t);
  double largest = 0, largest_absolute = 0;
  for (std::int64_t s = problem.first_key(t); s < problem.end_key(t); ++s) {
    const std::vector<double> key = key_of(problem, s);
    double sum = 0, absolute_sum = 0;
    for (std::size_t h = 0; h < query.weights.size(); ++h) {
      double dot = 0, absolute = 0;
      for (std::size_t c = 0; c < key.size(); ++c) {
        const double product = finite_or_zero(query.q[h * key.size() + c]) * finite_or_zero(key[c]);
        dot += product;
        absolute += std::abs(product);
      }
      sum += std::abs(finite_or_zero(query.weights[h])) * relu(dot);
      absolute_sum += std::abs(finite_or_zero(query.weights[h])) * absolute;
    }
    largest = std::max(largest, sum);
    largest_absolute = std::max(largest_absolute, absolute_sum);
  }
  return std::max(kScoreError * largest, 0x1p-24 * largest_absolute);
}

// The form every row has: `count` strictly ascending visible keys, then -1.
std::string form_error(const TopkProblem& problem, const TopkResult& got, std::int64_t t,
                       std::int64_t count) {
  if (got.topk_length.get({t}) != static_cast<double>(count)) {
    return fmt::format("topk_length {}, want {}", got.topk_length.get({t}), count);
  }
  double previous = static_cast<double>(problem.first_key(t)) - 1;
  for (std::int64_t j = 0; j < problem.topk; ++j) {
    const double key = got.topk_indices.get({t, 0, j});
    if (j >= count && key != -1) return fmt::format("slot {} holds {}, want -1", j, key);
    if (j >= count) continue;
    if (key <= previous || key >= static_cast<double>(problem.end_key(t))) {
      return fmt::format("slot {} holds {} after {}, visible are {}..{}", j, key, previous,
                         problem.first_key(t), problem.end_key(t) - 1);
    }
    previous = key;
  }
  return "";
}

bool same_number(double got, double want) {
  return std::isnan(want) ? std::isnan(got) : got == want;
}

// Scores of the row's slots against `scores` of its visible keys; each may err by `slack`.
std::string scores_error(const TopkProblem& problem, const TopkResult& got, std::int64_t t,
                         std::int64_t count, const std::vector<double>& scores, double slack) {
  if (!got.topk_scores) return "";
  for (std::int64_t j = 0; j < problem.topk; ++j) {
    const double mine = got.topk_scores->get({t, j});
    double want = -kInf;
    if (j < count) {
      const auto key = static_cast<std::int64_t>(got.topk_indices.get({t, 0, j}));
      want = scores[static_cast<std::size_t>(key - problem.first_key(t))];
    }
    const bool right =
        std::isfinite(want) ? std::abs(mine - want) <= slack : same_number(mine, want);
    if (!right) return fmt::format("score {} of slot {}, want {} +- {}", mine, j, want, slack);
  }
  return "";
}

AssertionResult row_failure(const TopkProblem& problem, std::int64_t t, const std::string& what) {
  return AssertionFailure() << fmt::format("row {}: {}; {}", t, what, problem.describe());
}

// Whether every head's dot is so clearly not positive that any arithmetic gives the score 0.
bool surely_zero(const Query& query, const std::vector<double>& key) {
  for (std::size_t h = 0; h < query.weights.size(); ++h) {
    double absolute = 0;
    for (std::size_t c = 0; c < key.size(); ++c) {
      absolute += std::abs(query.q[h * key.size() + c] * key[c]);
    }
    if (!(head_dot(query, h, key) <= -1e-5 * absolute) || !std::isfinite(query.weights[h])) {
      return false;
    }
  }
  return true;
}

// Whether the row's choice differs from the best only by keys near the K-th score, and prefers the
// smaller of the keys whose score is surely zero.
std::string choice_error(const TopkProblem& problem, const TopkResult& got, std::int64_t t,
                         std::int64_t count, const std::vector<double>& scores, double slack) {
  const auto best = brute_force_best(scores, count);
  std::vector<bool> is_best(scores.size()), is_mine(scores.size());
  for (const std::int64_t position : best) is_best[static_cast<std::size_t>(position)] = true;
  for (std::int64_t j = 0; j < count; ++j) {
    const auto key = static_cast<std::int64_t>(got.topk_indices.get({t, 0, j}));
    is_mine[static_cast<std::size_t>(key - problem.first_key(t))] = true;
  }
  double last = kInf;
  for (const std::int64_t position : best) {
    last = std::min(last, scores[static_cast<std::size_t>(position)]);
  }
  const Query query = query_of(problem, t);
  bool left_a_zero = false;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (is_mine[i] != is_best[i] && !(std::abs(scores[i] - last) <= 2 * slack)) {
      return fmt::format("key {} of score {} decided wrongly, K-th score {}, slack {}",
                         problem.first_key(t) + static_cast<std::int64_t>(i), scores[i], last,
                         slack);
    }
    if (scores[i] != 0 ||
        !surely_zero(query, key_of(problem, problem.first_key(t) + static_cast<std::int64_t>(i)))) {
      continue;
    }
    if (is_mine[i] && left_a_zero) return "among scores of zero a larger key was preferred";
    left_a_zero = left_a_zero || !is_mine[i];
  }
  return "";
}

}  // namespace

std::string TopkProblem::describe() const {
  return fmt::format("seed {}, T_q {}, T_k {}, H_index {}, K {}", seed, t_q(), t_k(), heads(),
                     topk);
}

void TopkProblem::set_rows(const std::vector<std::int32_t>& row_starts,
                           const std::vector<std::int32_t>& lengths) {
  for (std::size_t t = 0; t < row_starts.size(); ++t) {
    starts.set(static_cast<std::int64_t>(t), row_starts[t]);
    causal_lengths.set(static_cast<std::int64_t>(t), lengths.at(t));
  }
}

void TopkProblem::fill_query(std::int64_t t, double value) {
  for (std::int64_t i = 0; i < heads() * kDim; ++i) index_q.set(t * heads() * kDim + i, value);
}

void TopkProblem::fill_key(std::int64_t s, double value) {
  for (std::int64_t c = 0; c < kDim; ++c) index_k.set(s * kDim + c, value);
}

std::int64_t TopkProblem::first_key(std::int64_t t) const {
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(starts.get(t)));
}

std::int64_t TopkProblem::end_key(std::int64_t t) const {
  const auto start = static_cast<std::int64_t>(starts.get(t));
  const auto length = std::max<std::int64_t>(0, static_cast<std::int64_t>(causal_lengths.get(t)));
  return std::max(first_key(t), std::min(start + length, t_k()));
}

IndexerTopkArgs TopkProblem::inputs() const {
  IndexerTopkArgs args;
  args.index_q = index_q;
  args.index_k = index_k;
  args.head_weights = head_weights;
  args.starts = starts;
  args.causal_lengths = causal_lengths;
  return args;
}

TopkProblem causal_topk(std::int64_t t_q, std::int64_t t_k, std::int64_t heads, std::int64_t topk) {
  TopkProblem problem;
  problem.index_q = HostTensor(DType::kBFloat16, {t_q, heads, kDim});
  problem.index_k = HostTensor(DType::kBFloat16, {t_k, kDim});
  problem.head_weights = HostTensor(DType::kFloat32, {t_q, heads});
  problem.starts = HostTensor(DType::kInt32, {t_q});
  problem.causal_lengths = HostTensor(DType::kInt32, {t_q});
  problem.topk = topk;
  problem.index_q.fill(0);
  problem.index_k.fill(0);
  problem.head_weights.fill(0);
  problem.starts.fill(0);
  for (std::int64_t t = 0; t < t_q; ++t) {
    problem.causal_lengths.set(t, static_cast<double>(t_k - t_q + t + 1));
  }
  return problem;
}

TopkProblem random_topk(std::int64_t t_q, std::int64_t t_k, std::int64_t heads, std::int64_t topk,
                        std::uint64_t seed) {
  TopkProblem problem = causal_topk(t_q, t_k, heads, topk);
  problem.seed = seed;
  Random random(seed);
  random.fill_normal(problem.index_q);
  random.fill_normal(problem.index_k);
  random.fill_normal(problem.head_weights, 1 / std::sqrt(static_cast<double>(heads * kDim)));
  return problem;
}

TopkProblem integer_topk(std::int64_t t_q, std::int64_t t_k, std::int64_t heads, std::int64_t topk,
                         std::uint64_t seed) {
  TopkProblem problem = causal_topk(t_q, t_k, heads, topk);
  problem.seed = seed;
  Random random(seed);
  random.fill_integers(problem.index_q, -2, 2);
  random.fill_integers(problem.index_k, -2, 2);
  for (std::int64_t i = 0; i < problem.head_weights.elements(); ++i) {
    const double power = std::ldexp(1.0, static_cast<int>(random.integer(-3, 0)));
    problem.head_weights.set(i, random.integer(0, 3) == 0 ? -power : power);
  }
  return problem;
}

// Two heads, of which one has the dot |score| and the other -|score|, which is cut off.
TopkProblem topk_of_scores(const std::vector<double>& scores, std::int64_t topk) {
  TopkProblem problem = causal_topk(1, static_cast<std::int64_t>(scores.size()), 2, topk);
  problem.index_q.set({0, 0, 0}, 1);
  problem.index_q.set({0, 0, 1}, -1);
  problem.index_q.set({0, 1, 0}, -1);
  problem.index_q.set({0, 1, 1}, 1);
  problem.head_weights.set({0, 0}, 1);
  problem.head_weights.set({0, 1}, -1);
  for (std::size_t s = 0; s < scores.size(); ++s) {
    const bool negative = scores[s] < 0;
    problem.index_k.set({static_cast<std::int64_t>(s), negative ? 1 : 0}, std::abs(scores[s]));
  }
  return problem;
}

// Channel b of the query is 2^b, of the key bit b of its score.
TopkProblem topk_of_integers(const std::vector<std::int64_t>& scores, std::int64_t topk) {
  TopkProblem problem = causal_topk(1, static_cast<std::int64_t>(scores.size()), 1, topk);
  problem.head_weights.fill(1);
  for (std::int64_t b = 0; b < 24; ++b) {
    problem.index_q.set({0, 0, b}, std::ldexp(1.0, static_cast<int>(b)));
    for (std::size_t s = 0; s < scores.size(); ++s) {
      problem.index_k.set({static_cast<std::int64_t>(s), b},
                          static_cast<double>(scores[s] >> b & 1));
    }
  }
  return problem;
}

TopkProblem in_float64(const TopkProblem& problem) {
  TopkProblem result = problem;
  result.index_q = problem.index_q.as(DType::kFloat64);
  result.index_k = problem.index_k.as(DType::kFloat64);
  result.head_weights = problem.head_weights.as(DType::kFloat64);
  return result;
}

TopkProblem rows_of(const TopkProblem& problem, std::int64_t begin, std::int64_t count) {
  TopkProblem result = problem;
  result.index_q = problem.index_q.rows(begin, count);
  result.head_weights = problem.head_weights.rows(begin, count);
  result.starts = problem.starts.rows(begin, count);
  result.causal_lengths = problem.causal_lengths.rows(begin, count);
  return result;
}

TopkResult empty_result(const TopkProblem& problem, WantScores want) {
  const bool is_double = problem.index_q.dtype() == DType::kFloat64;
  TopkResult result;
  result.topk_indices = HostTensor(DType::kInt32, {problem.t_q(), 1, problem.topk});
  result.topk_length = HostTensor(DType::kInt32, {problem.t_q()});
  if (want == WantScores::kYes) {
    result.topk_scores =
        HostTensor(is_double ? DType::kFloat64 : DType::kFloat32, {problem.t_q(), problem.topk});
  }
  return result;
}

IndexerTopkArgs topk_args(const TopkProblem& problem, const TopkResult& result) {
  IndexerTopkArgs args = problem.inputs();
  args.topk_indices = result.topk_indices;
  args.topk_length = result.topk_length;
  if (result.topk_scores) args.topk_scores = *result.topk_scores;
  return args;
}

TopkResult run_topk(const TopkProblem& problem, const Runtime& runtime, WantScores want) {
  const TopkResult result = empty_result(problem, want);
  run_placed(topk_args(problem, result), runtime);
  const auto expect_intact = [&](const char* name, const HostTensor& tensor) {
    EXPECT_TRUE(tensor.bands_intact()) << "guard band of " << name << "; " << problem.describe();
  };
  expect_intact("index_q", problem.index_q);
  expect_intact("index_k", problem.index_k);
  expect_intact("head_weights", problem.head_weights);
  expect_intact("starts", problem.starts);
  expect_intact("causal_lengths", problem.causal_lengths);
  expect_intact("topk_indices", result.topk_indices);
  expect_intact("topk_length", result.topk_length);
  if (result.topk_scores) expect_intact("topk_scores", *result.topk_scores);
  return result;
}

std::vector<double> brute_force_scores(const TopkProblem& problem, std::int64_t t) {
  const Query query = query_of(problem, t);
  std::vector<double> scores;
  for (std::int64_t s = problem.first_key(t); s < problem.end_key(t); ++s) {
    const std::vector<double> key = key_of(problem, s);
    double score = 0;
    for (std::size_t h = 0; h < query.weights.size(); ++h) {
      score += query.weights[h] * relu(head_dot(query, h, key));
    }
    scores.push_back(score);
  }
  return scores;
}

std::vector<std::int64_t> brute_force_best(const std::vector<double>& scores, std::int64_t count) {
  std::vector<std::int64_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto class_of = [&](std::int64_t i) {
    return std::isnan(scores[static_cast<std::size_t>(i)]) ? 1 : 0;
  };
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    if (class_of(a) != class_of(b)) return class_of(a) > class_of(b);
    return class_of(a) == 0 &&
           scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(static_cast<std::size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

AssertionResult exactly_best(const TopkProblem& problem, const TopkResult& got) {
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    const std::vector<double> scores = brute_force_scores(problem, t);
    const std::int64_t count = std::min(problem.topk, static_cast<std::int64_t>(scores.size()));
    if (const auto error = form_error(problem, got, t, count); !error.empty()) {
      return row_failure(problem, t, error);
    }
    const auto best = brute_force_best(scores, count);
    for (std::int64_t j = 0; j < count; ++j) {
      const double want =
          static_cast<double>(problem.first_key(t) + best[static_cast<std::size_t>(j)]);
      const double mine = got.topk_indices.get({t, 0, j});
      if (mine != want) {
        return row_failure(problem, t, fmt::format("slot {} holds key {}, want {}", j, mine, want));
      }
    }
    if (const auto error = scores_error(problem, got, t, count, scores, 0); !error.empty()) {
      return row_failure(problem, t, error);
    }
  }
  return AssertionSuccess();
}

AssertionResult best_within_spec(const TopkProblem& problem, const TopkResult& got) {
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    const std::vector<double> scores = brute_force_scores(problem, t);
    const std::int64_t count = std::min(problem.topk, static_cast<std::int64_t>(scores.size()));
    const double slack = score_slack(problem, t);
    std::string error = form_error(problem, got, t, count);
    if (error.empty()) error = scores_error(problem, got, t, count, scores, slack);
    if (error.empty()) error = choice_error(problem, got, t, count, scores, slack);
    if (!error.empty()) return row_failure(problem, t, error);
  }
  return AssertionSuccess();
}

AssertionResult same_topk_bits(const TopkResult& got, const TopkResult& want) {
  if (auto result = same_bits(got.topk_indices, want.topk_indices); !result) return result;
  if (auto result = same_bits(got.topk_length, want.topk_length); !result) return result;
  if (got.topk_scores.has_value() != want.topk_scores.has_value()) {
    return AssertionFailure() << "only one result has scores";
  }
  return got.topk_scores ? same_bits(*got.topk_scores, *want.topk_scores) : AssertionSuccess();
}

}  // namespace flashdsa::test
