// SPEC section 3's total order: higher first, NaN above +inf, -0 equal to +0, the smaller key among
// equals. Scores are exact, so every selection is.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/indexer/fixture.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

using Keys = std::vector<std::int32_t>;

Keys row_of(const TopkResult& result, std::int64_t t) {
  Keys keys;
  for (std::int64_t j = 0; j < result.topk_indices.size(2); ++j) {
    keys.push_back(static_cast<std::int32_t>(result.topk_indices.get({t, 0, j})));
  }
  return keys;
}

Keys range(std::int32_t begin, std::int32_t end) {
  Keys keys(static_cast<std::size_t>(end - begin));
  std::iota(keys.begin(), keys.end(), begin);
  return keys;
}

Keys joined(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_P(TopK, HigherScoresFirst) {
  const TopkProblem problem = topk_of_scores({1, 5, -3, 2, 4, -1, 3}, 3);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{1, 4, 6}));
  expect_exactly_best(problem);
}

TEST_P(TopK, EqualScoresTakeSmallerIndex) {
  EXPECT_EQ(row_of(run_topk(topk_of_scores({2, 7, 2, 7, 7, 2, 7}, 3), runtime()), 0),
            (Keys{1, 3, 4}));
  EXPECT_EQ(row_of(run_topk(topk_of_scores({2, 7, 2, 2, 2, 7}, 4), runtime()), 0),
            (Keys{0, 1, 2, 5}));
}

TEST_P(TopK, AllEqualScoresTakeTheFirstKeys) {
  for (const double score : {0.0, 3.0, -3.0, kInf, -kInf, kNan}) {
    const TopkProblem problem = topk_of_scores(std::vector<double>(1000, score), 37);
    EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), range(0, 37)) << score;
    expect_exactly_best(problem);
  }
}

TEST_P(TopK, NanRanksAboveInfinity) {
  const TopkProblem problem = topk_of_scores({kInf, 1, kNan, kInf, 2, kNan, -kInf}, 3);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{0, 2, 5}));
  expect_exactly_best(problem);
}

TEST_P(TopK, AllNansAreEqual) {
  // More NaNs than slots, with different bits.
  TopkProblem problem = topk_of_scores(std::vector<double>(300, kNan), 5);
  auto* k = problem.index_k.view().as<BFloat16>();
  for (std::int64_t s = 0; s < 300; ++s) {
    k[s * 128] = BFloat16::from_bits(static_cast<std::uint16_t>(0x7FC0 + s % 60 + s % 2 * 0x8000));
  }
  problem.fill_key(0, 1);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), range(1, 6));
}

TEST_P(TopK, MinusInfinityRanksLast) {
  const TopkProblem problem = topk_of_scores({-kInf, -1, -kInf, -3e38, -2, -kInf}, 4);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{0, 1, 3, 4}));
  expect_exactly_best(problem);
}

TEST_P(TopK, ZeroOfEitherSignTies) {
  // One head of weight -1: a dot cut off at zero gives -0, other orders of operations give +0.
  TopkProblem problem = causal_topk(1, 60, 1, 7);
  problem.head_weights.fill(-1);
  problem.index_q.set({0, 0, 0}, 1);
  for (std::int64_t s = 0; s < 60; ++s) problem.index_k.set({s, 0}, static_cast<double>(s % 3 - 1));
  problem.index_k.set({1, 0}, -0.0);
  // Scores are -1 where s % 3 == 2, zero elsewhere.
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{0, 1, 3, 4, 6, 7, 9}));
}

TEST_P(TopK, AscendingScoresTakeTheLastKeys) {
  for (const std::int32_t topk : {1, 64, 2048}) {
    std::vector<std::int64_t> scores(5000);
    std::iota(scores.begin(), scores.end(), 0);
    const TopkResult result = run_topk(topk_of_integers(scores, topk), runtime());
    EXPECT_EQ(row_of(result, 0), range(5000 - topk, 5000)) << topk;
    EXPECT_EQ(result.topk_scores->get({0, topk - 1}), 4999);
  }
}

TEST_P(TopK, DescendingScoresTakeTheFirstKeys) {
  for (const std::int32_t topk : {1, 64, 2048}) {
    std::vector<std::int64_t> scores(5000);
    std::iota(scores.rbegin(), scores.rend(), 0);
    EXPECT_EQ(row_of(run_topk(topk_of_integers(scores, topk), runtime()), 0), range(0, topk))
        << topk;
  }
}

TEST_P(TopK, TwoValuesTakeTheHigherThenSmallerKeys) {
  std::vector<std::int64_t> scores(4000, 3);
  for (std::size_t s = 0; s < scores.size(); s += 7) scores[s] = 4;
  for (const std::int64_t topk : {100, 571, 572, 573, 2048}) {
    expect_exactly_best(topk_of_integers(scores, topk));
  }
}

TEST_P(TopK, RandomTiesAreDecidedByTheIndex) {
  Random random(131);
  std::vector<std::int64_t> scores(3000);
  for (auto& score : scores) score = random.integer(0, 5);
  for (const std::int64_t topk : {1, 7, 500, 2048}) {
    expect_exactly_best(topk_of_integers(scores, topk));
  }
}

// FAULTS R1: thousands of keys share the upper bits of their scores.
TopkProblem close_scores(std::int64_t keys) {
  TopkProblem problem = causal_topk(1, keys, 1, 2048);
  problem.head_weights.fill(1);
  problem.index_q.set({0, 0, 0}, 1);
  for (std::int64_t b = 0; b < 14; ++b) {
    problem.index_q.set({0, 0, 1 + b}, std::ldexp(1.0, static_cast<int>(b) - 14));
  }
  for (std::int64_t j = 0; j < keys; ++j) {
    problem.index_k.set({j, 0}, 1);
    for (std::int64_t b = 0; b < 14; ++b) {
      problem.index_k.set({j, 1 + b}, static_cast<double>(j >> b & 1));
    }
  }
  return problem;
}

TEST_P(TopK, CloseScoresAreAllTold) {
  const TopkResult result = run_topk(close_scores(16384), runtime());
  EXPECT_EQ(row_of(result, 0), range(16384 - 2048, 16384));
  EXPECT_EQ(result.topk_scores->get({0, 0}), 1 + (16384 - 2048) * 0x1p-14);
}

TEST_P(TopK, CloseScoresBehindClearWinnersAreAllTold) {
  TopkProblem problem = close_scores(16384);
  for (std::int64_t j = 0; j < 100; ++j) problem.index_k.set({j, 0}, 3);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0),
            joined(range(0, 100), range(16384 - 1948, 16384)));
}

// FAULTS R2: 100 winners, all other scores exactly 0; launched again and again.
TEST_P(TopK, ZeroPlateauTakesSmallerKeys) {
  TopkProblem problem = causal_topk(3, 8320, 1, 2048);
  problem.causal_lengths.fill(8320);
  problem.head_weights.fill(1);
  Random random(132);
  const std::vector<std::int32_t> winners = random.subset(8320, 100);
  for (std::int64_t c = 0; c < 128; ++c) {
    const double value = static_cast<double>(random.integer(1, 3));
    for (std::int64_t t = 0; t < 3; ++t) problem.index_q.set({t, 0, c}, value);
    for (std::int64_t s = 0; s < 8320; ++s) problem.index_k.set({s, c}, -value);
    for (const std::int32_t s : winners) problem.index_k.set({s, c}, value);
  }
  Keys want = winners;
  for (std::int32_t s = 0; want.size() < 2048; ++s) {
    if (!std::binary_search(winners.begin(), winners.end(), s)) want.push_back(s);
  }
  std::sort(want.begin(), want.end());
  const int launches = is_reference() ? 2 : 20;
  for (int launch = 0; launch < launches; ++launch) {
    const TopkResult result = run_topk(problem, runtime(), WantScores::kNo);
    for (std::int64_t t = 0; t < 3; ++t) ASSERT_EQ(row_of(result, t), want) << launch;
  }
}

// FAULTS: a coarse key in half precision overflows at 65504.
TEST_P(TopK, ScoresBeyondHalfPrecisionAreTold) {
  for (const double sign : {-1.0, 1.0}) {
    TopkProblem problem = causal_topk(1, 3001, 1, 2048);
    problem.head_weights.fill(sign);
    problem.index_q.set({0, 0, 0}, 256);
    for (std::int64_t s = 0; s < 3001; ++s) problem.index_k.set({s, 0}, 300);
    const TopkResult result = run_topk(problem, runtime());
    EXPECT_EQ(row_of(result, 0), range(0, 2048));
    EXPECT_EQ(result.topk_scores->get({0, 5}), sign * 76800);
    problem.index_k.set({3000, 0}, sign > 0 ? 302 : 298);  // the better one, last
    EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), joined(range(0, 2047), {3000}));
  }
}

// FAULTS: phantom lanes of a partial tile outrank -inf; storage around the document holds winners.
TEST_P(TopK, NothingBesideTheDocumentOutranksMinusInfinity) {
  for (const std::int32_t width : {121, 123, 127, 961, 963, 967}) {
    for (const std::int32_t start : {1, 13}) {
      for (const std::int64_t topk : {64, 2048}) {
        std::vector<double> scores(static_cast<std::size_t>(start + width + 9), -kInf);
        for (std::int32_t i = 0; i < 10; ++i) {
          scores[static_cast<std::size_t>(start + 3 + 11 * i)] = -5.0 * i;
        }
        for (std::int32_t s = 0; s < start; ++s) scores[static_cast<std::size_t>(s)] = kInf;
        for (auto s = static_cast<std::size_t>(start + width); s < scores.size(); ++s) {
          scores[s] = kNan;
        }
        TopkProblem problem = topk_of_scores(scores, topk);
        problem.set_rows({start}, {width});
        expect_exactly_best(problem);
      }
    }
  }
}

TEST_P(TopK, SubnormalScoresAreTold) {
  // A subnormal weight times dots of 1, 2, 3, ...
  TopkProblem problem = topk_of_integers({5, 1, 4, 4, 2, 3, 9, 0}, 4);
  problem.head_weights.fill(0x1p-140);
  const TopkResult result = run_topk(problem, runtime());
  EXPECT_EQ(row_of(result, 0), (Keys{0, 2, 3, 6}));
  EXPECT_EQ(result.topk_scores->get({0, 3}), 9 * 0x1p-140);
}

TEST_P(TopK, SubnormalDotsAreTold) {
  // Products of 2^-70 and 2^-76 * integer: below FP32's normal range, exact in FP32 all the same.
  const std::vector<double> units = {5, 1, 4, 4, 2, 3, 9, 0};
  TopkProblem problem = causal_topk(1, 8, 1, 4);
  problem.head_weights.fill(1);
  problem.index_q.set({0, 0, 0}, 0x1p-70);
  for (std::int64_t s = 0; s < 8; ++s) {
    problem.index_k.set({s, 0}, units[static_cast<std::size_t>(s)] * 0x1p-76);
  }
  const TopkResult result = run_topk(problem, runtime());
  EXPECT_EQ(row_of(result, 0), (Keys{0, 2, 3, 6}));
  EXPECT_EQ(result.topk_scores->get({0, 3}), 9 * 0x1p-146);
}

TEST_P(TopK, InfiniteWeightTimesZeroIsNan) {
  TopkProblem problem = topk_of_integers({3, 0, 5, 0, 7, 0}, 4);
  problem.head_weights.fill(kInf);  // scores +inf and, where the dot is 0, NaN
  const TopkResult result = run_topk(problem, runtime());
  EXPECT_EQ(row_of(result, 0), (Keys{0, 1, 3, 5}));
  expect_exactly_best(problem);
}

TEST_P(TopK, ZeroWeightTimesInfinityIsNan) {
  TopkProblem problem = topk_of_integers({3, 1, 5, 2, 7, 4}, 2);
  problem.index_k.set({3, 100}, kInf);
  problem.index_q.set({0, 0, 100}, 1);
  problem.head_weights.fill(0);  // scores 0 and, where the dot is +inf, NaN
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{0, 3}));
  expect_exactly_best(problem);
}

TEST_P(TopK, ReluKeepsNan) {
  TopkProblem problem = topk_of_integers({9, 8, 7, 6, 5}, 2);
  problem.index_k.set({4, 127}, kNan);
  const TopkResult result = run_topk(problem, runtime());
  EXPECT_EQ(row_of(result, 0), (Keys{0, 4}));
  EXPECT_TRUE(std::isnan(result.topk_scores->get({0, 1})));
}

TEST_P(TopK, NanQueryRowLeavesItsNeighboursAlone) {
  TopkProblem problem = integer_topk(5, 400, 3, 50, 133);
  problem.fill_query(2, kNan);
  expect_exactly_best(problem);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 2), range(0, 50));
}

TEST_P(TopK, WeightsAreUsedInTheirPrecision) {
  TopkProblem problem = causal_topk(1, 3, 2, 1);
  problem.index_q.set({0, 0, 0}, 1);
  problem.index_q.set({0, 1, 1}, 1);
  problem.index_k.set({0, 0}, 1);  // score w0 = 1
  problem.index_k.set({1, 1}, 1);  // score w1 = 1 + 2^-10, in BF16 1
  problem.head_weights.set({0, 0}, 1);
  problem.head_weights.set({0, 1}, 1 + 0x1p-10);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{1}));
  problem.head_weights = problem.head_weights.as(DType::kBFloat16);
  EXPECT_EQ(row_of(run_topk(problem, runtime()), 0), (Keys{0}));
}

TEST_P(TopK, BFloat16WeightsGiveTheBitsOfTheSameFloat32Weights) {
  TopkProblem half = random_topk(4, 500, 5, 40, 134);
  half.head_weights = half.head_weights.as(DType::kBFloat16);
  TopkProblem single = half;
  single.head_weights = half.head_weights.as(DType::kFloat32);
  EXPECT_TRUE(same_topk_bits(run_topk(half, runtime()), run_topk(single, runtime())));
}

}  // namespace
}  // namespace flashdsa::test
