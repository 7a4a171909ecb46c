// The judges of `flashdsa verify`: right results pass, each planted fault is found.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <vector>

#include "tools/verify.h"

namespace flashdsa::tools {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A tensor of `rows` vectors of 512 numbers of size about 1.
std::vector<std::vector<double>> sample(std::size_t rows) {
  std::vector<std::vector<double>> tensor(rows, std::vector<double>(512));
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t c = 0; c < 512; ++c) {
      tensor[row][c] = std::sin(static_cast<double>(1 + row * 512 + c));
    }
  }
  return tensor;
}

ErrorTable judge(const std::vector<std::vector<double>>& got,
                 const std::vector<std::vector<double>>& want, double bound,
                 double tensor_floor = 0, double vector_floor = 0, double cosine = 0) {
  VectorJudge judge("x", bound);
  for (std::size_t row = 0; row < want.size(); ++row) {
    judge.add(got[row], want[row], tensor_floor, vector_floor, {static_cast<std::int64_t>(row), 0});
  }
  ErrorTable table;
  judge.report(table, cosine);
  return table;
}

TEST(VectorJudge, EqualTensorsPass) {
  EXPECT_TRUE(judge(sample(10), sample(10), kGradRmse, 0, 0, kOutCosine).ok());
}

TEST(VectorJudge, TenPercentTooLargeFails) {
  auto got = sample(10);
  for (auto& row : got) {
    for (double& value : row) value *= 1.1;
  }
  EXPECT_FALSE(judge(got, sample(10), kGradRmse).ok());
}

TEST(VectorJudge, ErrorJustInsideTheBoundPassesAndJustOutsideFails) {
  for (const double share : {0.999, 1.001}) {
    auto got = sample(10);
    for (auto& row : got) {
      for (double& value : row) value *= 1 + share * kGradRmse;
    }
    EXPECT_EQ(judge(got, sample(10), kGradRmse).ok(), share < 1);
  }
}

TEST(VectorJudge, OneWrongVectorAmongThousandsFails) {
  auto got = sample(4000);
  for (double& value : got[1234]) value *= 1.05;  // of the whole: 0.05 / sqrt(4000) = 8e-4
  const ErrorTable table = judge(got, sample(4000), kGradRmse);
  EXPECT_FALSE(table.ok());
  EXPECT_NE(table.text().find("worst vector [1234, 0]"), std::string::npos) << table.text();
}

TEST(VectorJudge, AllowancesCountWhereTermsCancel) {
  const std::vector<std::vector<double>> want = {{0, 0, 0}};
  const std::vector<std::vector<double>> got = {{3e-6, 4e-6, 0}};  // length 5e-6
  EXPECT_FALSE(judge(got, want, kGradRmse).ok());
  EXPECT_FALSE(judge(got, want, kGradRmse, 4.9e-6, 5.1e-6).ok());
  EXPECT_FALSE(judge(got, want, kGradRmse, 5.1e-6, 4.9e-6).ok());
  EXPECT_TRUE(judge(got, want, kGradRmse, 5.1e-6, 5.1e-6).ok());
  EXPECT_FALSE(judge(got, want, kGradRmse, kNan, kNan).ok());
}

TEST(VectorJudge, NonFiniteValuesMustStandWhereTheReferenceHasThem) {
  for (const double value : {kNan, kInf, -kInf}) {
    auto got = sample(10);
    got[9][511] = value;
    EXPECT_FALSE(judge(got, sample(10), kGradRmse).ok());
    EXPECT_FALSE(judge(sample(10), got, kGradRmse).ok());
    EXPECT_TRUE(judge(got, got, kGradRmse).ok());
  }
}

TEST(VectorJudge, CosineOfAnOppositeTensorFails) {
  const std::vector<std::vector<double>> want = {{1e-3, 0}}, got = {{-1e-3, 0}};
  EXPECT_FALSE(judge(got, want, kOutRmse, 1, 1, kOutCosine).ok());
  EXPECT_TRUE(judge(got, want, kOutRmse, 1, 1, 0).ok());
}

bool logs_pass(double got, double want, bool tight) {
  LogJudge judge("lse", tight);
  judge.add(got, want, {0, 0});
  ErrorTable table;
  judge.report(table);
  return table.ok();
}

TEST(LogJudge, HoldsTheBoundOfSection8) {
  EXPECT_TRUE(logs_pass(10 + 1.9e-5, 10, true));  // 1e-5 + 1e-6 * 10
  EXPECT_FALSE(logs_pass(10 + 2.1e-5, 10, true));
  EXPECT_TRUE(logs_pass(10 + 1.09e-4, 10, false));
  EXPECT_FALSE(logs_pass(10 + 1.11e-4, 10, false));
}

TEST(LogJudge, LogarithmToTheBaseTwoFails) {
  EXPECT_FALSE(logs_pass(2 / std::numbers::ln2, 2, false));
}

TEST(LogJudge, NonFiniteValuesMustBeTheSame) {
  for (const double want : {-kInf, kInf, kNan, 1.0}) {
    for (const double got : {-kInf, kInf, kNan, 1.0}) {
      const bool same = got == want || (std::isnan(got) && std::isnan(want));
      EXPECT_EQ(logs_pass(got, want, true), same) << got << " for " << want;
    }
  }
}

TEST(LogJudge, ReportsTheWorstPlace) {
  LogJudge judge("lse", true);
  for (std::int64_t row = 0; row < 100; ++row) judge.add(row == 42 ? 1.5 : 1.0, 1.0, {row, 3});
  ErrorTable table;
  judge.report(table);
  EXPECT_FALSE(table.ok());
  EXPECT_NE(table.text().find("[42, 3]"), std::string::npos);
}

TEST(ZeroJudge, CountsNumbersAndNan) {
  for (const double value : {0.0, -0.0, 1e-300, kNan}) {
    ZeroJudge judge("grad_kv", "rows");
    judge.add(std::vector{0.0, value});
    ErrorTable table;
    judge.report(table);
    EXPECT_EQ(table.ok(), value == 0) << value;
  }
}

// One head, weight 1, one channel: the score of a key is max(0, q * key).
struct Row {
  std::vector<double> q = {1};
  std::vector<double> weights = {1};
  std::vector<double> keys;

  ScoreRow view() const { return {q, weights, keys}; }
};

TEST(ExactScores, FollowTheFormula) {
  const Row row{{1, 2, /*second head*/ -1, 0}, {3, -5}, {1, 1, /*second key*/ -4, 1}};
  // Heads' dots with key 0: 3, -1; with key 1: -2, 4.
  EXPECT_EQ(exact_scores(row.view()), (std::vector<double>{9, -20}));
}

TEST(ExactScores, NanIsHandedOnByRelu) {
  EXPECT_TRUE(std::isnan(exact_scores(Row{{1}, {1}, {kNan}}.view())[0]));
}

TEST(ScoreSlack, IsOfTheLargestSumBeforeHeadsCancel) {
  // Heads' dots with the key: 6 and 6 with weights 1 and -1: the score is 0, the terms are 12.
  EXPECT_DOUBLE_EQ(score_slack(Row{{2, 2}, {1, -1}, {3}}.view()), kScoreError * 12);
  // A dot that cancels: 1000 - 999.5, terms 1999.5 at one rounding of FP32 are more than 2e-5 of
  // it.
  EXPECT_DOUBLE_EQ(score_slack(Row{{1, 1}, {1}, {1000, -999.5}}.view()), kScoreFloor * 1999.5);
}

TEST(ScoresAreExact, WhenAllSumsFitInto24Bits) {
  EXPECT_TRUE(scores_are_exact(Row{{1, 1}, {1}, {8388607, 8388608}}.view()));   // sum 2^24 - 1
  EXPECT_FALSE(scores_are_exact(Row{{1, 1}, {1}, {8388609, 8388607}}.view()));  // sum 2^24
  EXPECT_TRUE(scores_are_exact(Row{{0.25}, {0.5}, {3, 5, -7}}.view()));
  EXPECT_FALSE(scores_are_exact(Row{{1}, {1.0 / 3}, {12345.678f}}.view()));
  EXPECT_TRUE(scores_are_exact(Row{{1}, {1}, {0, 0}}.view()));
}

TEST(JudgeChoice, TheRightChoicePasses) {
  const Row row{{1}, {1}, {5, 1, 4, 2, 3}};
  EXPECT_EQ(judge_choice(row.view(), std::vector{0, 2}, std::vector{0, 2}), "");
}

TEST(JudgeChoice, OneExchangedKeyFailsWhereScoresAreExact) {
  const Row row{{1}, {1}, {5, 1, 4, 2, 3}};
  EXPECT_NE(judge_choice(row.view(), std::vector{0, 4}, std::vector{0, 2}), "");
}

TEST(JudgeChoice, TheLargerKeyOfATieFailsWhereScoresAreExact) {
  const Row row{{1}, {1}, {2, 2, 2}};
  EXPECT_NE(judge_choice(row.view(), std::vector{2}, std::vector{0}), "");
}

TEST(JudgeChoice, DifferencesWithinTheScoreErrorPass) {
  const double close = 1 + 1e-5, far = 1 + 1e-4;  // twice the error is 4e-5 of the largest sum
  const double odd = 1.0 / 3;                     // makes scores inexact
  EXPECT_EQ(judge_choice(Row{{1}, {odd}, {close, 1, odd}}.view(), std::vector{1}, std::vector{0}),
            "");
  EXPECT_NE(judge_choice(Row{{1}, {odd}, {far, 1, odd}}.view(), std::vector{1}, std::vector{0}),
            "");
}

TEST(JudgeChoice, EveryWrongKeyIsLookedAt) {
  const double odd = 1.0 / 3;
  const Row row{{1}, {odd}, {1 + 1e-5, 3, 1, odd, 3 + odd}};
  // Best three: 4, 1, 0. Taking 2 for 0 is close, taking 3 for 1 is not.
  EXPECT_EQ(judge_choice(row.view(), std::vector{1, 2, 4}, std::vector{0, 1, 4}), "");
  EXPECT_NE(judge_choice(row.view(), std::vector{2, 3, 4}, std::vector{0, 1, 4}), "");
}

TEST(JudgeChoice, SpecialScoresDecideExactly) {
  const Row row{{1}, {1.0 / 3}, {1, kNan, kInf, 2}};
  EXPECT_EQ(judge_choice(row.view(), std::vector{1, 2}, std::vector{1, 2}), "");
  EXPECT_NE(judge_choice(row.view(), std::vector{2, 3}, std::vector{1, 2}), "");
  EXPECT_NE(judge_choice(row.view(), std::vector{3}, std::vector{1}), "");
}

TEST(JudgeChoice, TiesAtAClearZeroFollowTheRule) {
  const double odd = 1.0 / 3;
  const Row row{{1}, {odd}, {1, -1, -odd, -2}};
  EXPECT_EQ(judge_choice(row.view(), std::vector{0, 1}, std::vector{0, 1}), "");
  EXPECT_NE(judge_choice(row.view(), std::vector{0, 2}, std::vector{0, 1}), "");
}

TEST(ErrorTable, IsGoodWhenEveryLineIs) {
  ErrorTable table;
  EXPECT_TRUE(table.ok());
  table.add("a", "b", "1", "2", true);
  EXPECT_TRUE(table.ok());
  table.add("a", "b", "3", "2", false);
  EXPECT_FALSE(table.ok());
  EXPECT_NE(table.text().find("FAIL"), std::string::npos);
  EXPECT_EQ(table.json()[1]["ok"], false);
}

}  // namespace
}  // namespace flashdsa::tools
