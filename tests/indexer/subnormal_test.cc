// Numbers below FP32's normal range. Some instructions of CPUs flush them; SPEC section 3 does not.

#include <cmath>

#include "tests/indexer/fixture.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

// One row of weight 1 whose scores are `q0` * keys[s].
TopkProblem products_of(double q0, const std::vector<double>& keys, std::int64_t topk) {
  TopkProblem problem = causal_topk(1, static_cast<std::int64_t>(keys.size()), 1, topk);
  problem.head_weights.fill(1);
  problem.index_q.set({0, 0, 0}, q0);
  for (std::size_t s = 0; s < keys.size(); ++s) {
    problem.index_k.set({static_cast<std::int64_t>(s), 0}, keys[s]);
  }
  return problem;
}

TEST_P(TopKOnHost, SubnormalKeysAreTold) {
  const TopkProblem problem = products_of(1, {0x5p-133, 0x1p-133, 0x9p-133, 0, 0x7p-133}, 2);
  const TopkResult result = run_topk(problem, runtime());
  EXPECT_EQ(result.topk_indices.get({0, 0, 0}), 2);
  EXPECT_EQ(result.topk_indices.get({0, 0, 1}), 4);
  EXPECT_EQ(result.topk_scores->get({0, 0}), 0x9p-133);
  EXPECT_EQ(result.topk_scores->get({0, 1}), 0x7p-133);
}

TEST_P(TopKOnHost, SubnormalKeysTimesLargeQueriesAreTold) {
  expect_exactly_best(products_of(0x1p100, {0x5p-133, 0x1p-133, 0x9p-133, 0, 0x7p-133}, 2));
}

TEST_P(TopKOnHost, SubnormalQueriesAreTold) {
  expect_exactly_best(products_of(0x3p-133, {5, 1, 0x1p100, 0, 7}, 2));
}

TEST_P(TopKOnHost, SubnormalSumsOfNormalProductsAreTold) {
  // 2^-126 * (1 + j/128) - 2^-126 = j * 2^-133.
  TopkProblem problem = causal_topk(1, 60, 1, 7);
  problem.head_weights.fill(1);
  for (std::int64_t c : {0, 5}) problem.index_q.set({0, 0, c}, 0x1p-63);
  for (std::int64_t s = 0; s < 60; ++s) {
    const auto j = static_cast<double>(s * 37 % 61);
    problem.index_k.set({s, 0}, std::ldexp(1 + j / 128, -63));
    problem.index_k.set({s, 5}, -0x1p-63);
  }
  expect_exactly_best(problem);
}

// The least that products can leave: u v (129 * 129 - 128 * 130) = u v, on both sides of 2^-126.
TEST_P(TopKOnHost, TheLastBitOfACancellingDotIsTold) {
  for (int power = -149; power <= -100; ++power) {
    const double u = std::ldexp(1, -60), v = std::ldexp(1, power + 60);
    TopkProblem problem = causal_topk(1, 5, 1, 2);
    problem.head_weights.fill(1);
    problem.index_q.set({0, 0, 10}, 129 * u);
    problem.index_q.set({0, 0, 90}, 128 * u);
    problem.index_k.set({3, 10}, 129 * v);
    problem.index_k.set({3, 90}, -130 * v);
    const TopkResult result = run_topk(problem, runtime());
    EXPECT_EQ(result.topk_indices.get({0, 0, 1}), 3) << power;
    EXPECT_EQ(result.topk_scores->get({0, 1}), std::ldexp(1, power));
  }
}

// Every power of two that a query and a key may have, both sides of every limit.
TEST_P(TopKOnHost, ProductsOfEveryMagnitudeAreTold) {
  for (int power = -133; power <= 120; power += 11) {
    std::vector<double> keys;
    for (int other = -133; other <= 127 - std::max(power, 0); ++other) {
      if (power + other >= -149) keys.push_back(std::ldexp(1, other));
    }
    expect_exactly_best(products_of(std::ldexp(1, power), keys, 50));
  }
}

// Key 99, which only the last row sees, is packed and scored beside its neighbours for all rows.
TEST_P(TopKOnHost, ATinyKeyLeavesTheBitsOfItsNeighboursAlone) {
  const Runtime on = runtime_with_threads(1);
  TopkProblem problem = random_topk(3, 100, 5, 100, 821);
  problem.set_rows({0, 0, 0}, {99, 99, 100});
  // Where two NaNs meet, kernels may differ in which one they keep, so the scores have but one.
  problem.index_k.view().as<BFloat16>()[97 * 128 + 7] = BFloat16::from_bits(0xFFC3);
  problem.index_q.view().as<BFloat16>()[7] = BFloat16::from_bits(0x7FE5);
  problem.fill_key(99, 1);
  const TopkResult want = run_topk(problem, on);
  problem.fill_key(99, 0x1p-133);
  const TopkResult got = run_topk(problem, on);
  EXPECT_TRUE(same_bits(got.topk_scores->rows(0, 2), want.topk_scores->rows(0, 2)));
  if (!is_reference()) {
    EXPECT_EQ(got.topk_scores->bits(97), 0x7FC00000u);
  }
}

// Numbers of any exponent: sums and products overflow, vanish and cancel.
TEST(TopKSets, AllFusedSetsGiveTheSameBits) {
  Random random(822);
  TopkProblem problem = random_topk(8, 400, 4, 30, 823);
  const auto spread = [&random](HostTensor& tensor, int row_size, int low, int high) {
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      const auto row = static_cast<int>(i / row_size);
      const auto power = static_cast<int>(random.integer(0, row % 9 * 8));
      tensor.set(i, std::ldexp(tensor.get(i), low + row * 7 % (high - low) + power));
    }
  };
  spread(problem.index_q, 4 * 128, -130, 60);
  spread(problem.index_k, 128, -130, 60);
  std::optional<TopkResult> want;
  for (const Engine& engine : engines()) {
    if (engine.simd < SimdTarget::kAvx2 || !engine_refusal(engine).empty()) continue;
    Runtime on;
    on.backend = engine.backend;
    on.simd = engine.simd;
    const TopkResult got = run_topk(problem, on);
    if (!want) want = got;
    EXPECT_TRUE(same_topk_bits(got, *want)) << simd_target_name(engine.simd);
  }
  if (!want) GTEST_SKIP() << "this CPU or build has no set with fused multiply-add";
}

}  // namespace
}  // namespace flashdsa::test
