// Real-valued scores, within SPEC section 8 of float64.

#include "tests/indexer/fixture.h"
#include "tests/support/property.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

TEST_P(TopK, RandomScoresAreWithinSpec) {
  for (const std::int64_t heads : {1, 3, 8, 32, 64}) {
    const TopkProblem problem = random_topk(3, 300, heads, 40, 181);
    EXPECT_TRUE(best_within_spec(problem, run_topk(problem, runtime())));
  }
}

TEST_P(TopK, FullWidthIsWithinSpec) {
  const TopkProblem problem = random_topk(2, 2500, 4, 2048, 182);
  EXPECT_TRUE(best_within_spec(problem, run_topk(problem, runtime())));
}

// All weights of one sign: ReLU makes many scores exactly zero, which then tie.
TEST_P(TopK, ManyZeroScoresAreWithinSpec) {
  TopkProblem problem = random_topk(4, 600, 2, 300, 183);
  for (std::int64_t i = 0; i < problem.head_weights.elements(); ++i) {
    problem.head_weights.set(i, std::abs(problem.head_weights.get(i)));
  }
  for (std::int64_t s = 0; s < 600; s += 2) {  // clearly negative dots with row 3
    for (std::int64_t c = 0; c < 128; ++c) {
      problem.index_k.set({s, c}, -problem.index_q.get({3, 0, c}) - problem.index_q.get({3, 1, c}));
    }
  }
  EXPECT_TRUE(best_within_spec(problem, run_topk(problem, runtime())));
}

TEST_P(TopK, HeadsThatCancelAreWithinSpec) {
  TopkProblem problem = random_topk(3, 300, 2, 40, 184);
  for (std::int64_t t = 0; t < 3; ++t) {  // two equal heads, weights w and -w (1 + 2^-8)
    for (std::int64_t c = 0; c < 128; ++c) {
      problem.index_q.set({t, 1, c}, problem.index_q.get({t, 0, c}));
    }
    problem.head_weights.set({t, 0}, 1);
    problem.head_weights.set({t, 1}, -1 - 0x1p-8);
  }
  EXPECT_TRUE(best_within_spec(problem, run_topk(problem, runtime())));
}

// `reference` on float64 tensors is judged by the brute force, far below FP32's precision.
TEST(TopKReference, Float64AgreesWithBruteForce) {
  const TopkProblem problem = in_float64(random_topk(5, 200, 6, 200, 185));
  const TopkResult result = run_topk(problem, reference_runtime());
  for (std::int64_t t = 0; t < 5; ++t) {
    const std::vector<double> scores = brute_force_scores(problem, t);
    ASSERT_EQ(result.topk_length.get({t}), static_cast<double>(scores.size()));
    for (std::size_t s = 0; s < scores.size(); ++s) {
      EXPECT_NEAR(result.topk_scores->get({t, static_cast<std::int64_t>(s)}), scores[s], 1e-13);
    }
  }
}

TEST(TopKReference, WorkedExample) {
  // Two heads, two channels: dots (1*3, 2*3) and (1*-1, 2*4) with weights 0.5 and -0.25.
  TopkProblem problem = in_float64(causal_topk(1, 2, 2, 2));
  problem.index_q.set({0, 0, 0}, 1);
  problem.index_q.set({0, 1, 1}, 2);
  problem.index_k.set({0, 0}, 3);
  problem.index_k.set({0, 1}, 3);
  problem.index_k.set({1, 0}, -1);
  problem.index_k.set({1, 1}, 4);
  problem.head_weights.set({0, 0}, 0.5);
  problem.head_weights.set({0, 1}, -0.25);
  const TopkResult result = run_topk(problem, reference_runtime());
  EXPECT_EQ(result.topk_scores->get({0, 0}), 0.5 * 3 - 0.25 * 6);
  EXPECT_EQ(result.topk_scores->get({0, 1}), -0.25 * 8);
}

// The judges see what is wrong.
TEST(TopKJudge, SeesAWrongKeyAWrongScoreAndAWrongForm) {
  const TopkProblem problem = integer_topk(2, 50, 2, 6, 186);
  const TopkResult right = run_topk(problem, reference_runtime());
  EXPECT_TRUE(exactly_best(problem, right));
  EXPECT_TRUE(best_within_spec(problem, right));

  const auto expect_seen = [&](const TopkResult& wrong) {
    EXPECT_FALSE(exactly_best(problem, wrong));
    EXPECT_FALSE(best_within_spec(problem, wrong));
  };
  TopkResult wrong = right;
  wrong.topk_scores->set({1, 2}, right.topk_scores->get({1, 2}) + 0.125);
  expect_seen(wrong);
  wrong = right;
  wrong.topk_length.set({0}, 5);
  expect_seen(wrong);
  wrong = right;  // two slots exchanged
  wrong.topk_indices.set({0, 0, 0}, right.topk_indices.get({0, 0, 1}));
  wrong.topk_indices.set({0, 0, 1}, right.topk_indices.get({0, 0, 0}));
  expect_seen(wrong);

  // The worst key in place of the best one, its score told truly.
  const std::vector<double> scores = brute_force_scores(problem, 0);
  const auto worst = std::min_element(scores.begin(), scores.end()) - scores.begin();
  TopkProblem other = problem;
  other.topk = 1;
  TopkResult single = run_topk(other, reference_runtime());
  single.topk_indices.set({0, 0, 0}, static_cast<double>(worst));
  single.topk_scores->set({0, 0}, scores[static_cast<std::size_t>(worst)]);
  EXPECT_FALSE(exactly_best(other, single));
  EXPECT_FALSE(best_within_spec(other, single));
}

TEST(TopKJudge, SeesALargerKeyAmongEqualScores) {
  const TopkProblem problem = topk_of_integers({1, 1, 1, 1}, 2);
  TopkResult result = run_topk(problem, reference_runtime());
  EXPECT_TRUE(exactly_best(problem, result));
  result.topk_indices.set({0, 0, 1}, 2);
  EXPECT_FALSE(exactly_best(problem, result));
}

TEST_P(TopK, PropertyRandomScoresAreWithinSpec) {
  const Runtime on = runtime();
  check_property(20, 1005, [&on] {
    const auto between = [](std::int64_t low, std::int64_t high) {
      return *rc::gen::inRange(low, high + 1);
    };
    const std::int64_t t_q = between(1, 4);
    const TopkProblem problem = random_topk(t_q, between(t_q, 250), between(1, 12), between(1, 60),
                                            static_cast<std::uint64_t>(between(0, 1 << 20)));
    const auto verdict = best_within_spec(problem, run_topk(problem, on));
    if (!verdict) RC_FAIL(std::string(verdict.message()));
  });
}

}  // namespace
}  // namespace flashdsa::test
