// The comparator that judges every numerical test has to reject what is wrong.

#include <cmath>
#include <limits>
#include <string>

#include "tests/attention/fixture.h"
#include "tests/support/compare.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

Values line(std::vector<double> data) {
  const auto size = static_cast<std::int64_t>(data.size());
  return {"x", "seed 7", {1, size}, std::move(data)};
}

// Every comparison by value, at the bounds of `out`.
std::vector<::testing::AssertionResult> all_comparisons(const Values& got, const Values& want) {
  return {relative_rmse_within(got, want, kOutRmse), cosine_at_least(got, want, kOutCosine),
          vectors_within(got, want, kVectorFactor * kOutRmse),
          elements_within(got, want, log_absolute(Backend::kCpu), kLogRelative)};
}

void expect_all_reject(const Values& got, const Values& want) {
  for (const auto& result : all_comparisons(got, want)) EXPECT_FALSE(result);
}

TEST(Comparator, AcceptsEqualValues) {
  const Values values = line({1, -2, 0, kInf, -kInf, kNan});
  for (const auto& result : all_comparisons(values, values)) EXPECT_TRUE(result);
}

TEST(Comparator, RejectsNan) {
  expect_all_reject(line({1, kNan}), line({1, 2}));
  expect_all_reject(line({1, 2}), line({1, kNan}));
}

TEST(Comparator, RejectsMisplacedInfinity) {
  expect_all_reject(line({kInf, 1}), line({1, kInf}));
  expect_all_reject(line({kInf, 1}), line({-kInf, 1}));
  expect_all_reject(line({kInf, 1}), line({kNan, 1}));
  expect_all_reject(line({-kInf, 1}), line({-1e30, 1}));
}

TEST(Comparator, RejectsAMismatchOfNegativeNumbers) {
  const Values got = line({-1.1, -2, -3}), want = line({-1, -2, -3});
  EXPECT_FALSE(relative_rmse_within(got, want, kGradRmse));
  EXPECT_FALSE(vectors_within(got, want, kGradRmse));
  EXPECT_FALSE(elements_within(got, want, log_absolute(Backend::kCpu), kLogRelative));
}

TEST(Comparator, RejectsAnotherShape) {
  Values got = line({1, 2, 3, 4});
  const Values want = got;
  got.shape = {2, 2};
  expect_all_reject(got, want);
  got = line({1, 2, 3});
  expect_all_reject(got, want);
}

TEST(Comparator, RejectsOneWrongElementInAMillion) {
  HostTensor want(DType::kFloat32, {2048, 512});
  Random(3).fill_normal(want);
  const std::int64_t place = want.at({1234, 500});
  want.set(place, 1.0);
  HostTensor got = want;
  got.set(place, -1.0);
  EXPECT_FALSE(vectors_within(values_of("x", got), values_of("x", want), kVectorFactor * kOutRmse));
  EXPECT_FALSE(
      elements_within(values_of("x", got), values_of("x", want), log_absolute(Backend::kCpu)));
  EXPECT_FALSE(same_bits(got, want));
}

TEST(Comparator, RejectsAResultScaledBy1_1) {
  const Values want = line({0.5, -2, 3, 1e-3});
  Values got = want;
  for (double& value : got.data) value *= 1.1;
  EXPECT_FALSE(relative_rmse_within(got, want, kGradRmse));
  EXPECT_FALSE(vectors_within(got, want, kVectorFactor * kGradRmse));
}

TEST(Comparator, CosineRejectsATurnedResult) {
  EXPECT_TRUE(cosine_at_least(line({1, 0.004}), line({1, 0}), kOutCosine));
  EXPECT_FALSE(cosine_at_least(line({1, 0.005}), line({1, 0}), kOutCosine));
  EXPECT_FALSE(cosine_at_least(line({0, 0}), line({1, 0}), kOutCosine));
}

TEST(Comparator, BoundsAreSharp) {
  const Values want = line({3, 4});
  EXPECT_TRUE(relative_rmse_within(line({3, 4.049}), want, 0.01));
  EXPECT_FALSE(relative_rmse_within(line({3, 4.051}), want, 0.01));
  EXPECT_TRUE(relative_rmse_within(line({3, 4.099}), want, 0.01, 0.05));
  EXPECT_FALSE(relative_rmse_within(line({3, 4.101}), want, 0.01, 0.05));
  EXPECT_TRUE(vectors_within(line({3, 4.099}), want, 0.01, {0.05}));
  EXPECT_FALSE(vectors_within(line({3, 4.101}), want, 0.01, {0.05}));
  EXPECT_TRUE(elements_within(line({3, 4.049}), want, 0.01, 0.01));
  EXPECT_FALSE(elements_within(line({3, 4.051}), want, 0.01, 0.01));
}

TEST(Comparator, ZeroWantedAllowsOnlyTheFloor) {
  EXPECT_FALSE(relative_rmse_within(line({0, 1e-30}), line({0, 0}), kGradRmse));
  EXPECT_FALSE(vectors_within(line({0, 1e-30}), line({0, 0}), kGradRmse));
  EXPECT_FALSE(all_zero(line({0, 1e-30})));
  EXPECT_FALSE(all_zero(line({0, kNan})));
  EXPECT_TRUE(all_zero(line({0, -0.0})));
}

TEST(Comparator, SameBitsSeesTheSignOfZeroAndTheDtype) {
  HostTensor zero(DType::kFloat32, {1});
  zero.fill(0.0);
  HostTensor negative = zero;
  negative.fill(-0.0);
  EXPECT_TRUE(same_bits(zero, zero));
  EXPECT_FALSE(same_bits(zero, negative));
  EXPECT_FALSE(same_bits(zero, zero.as(DType::kFloat64)));
}

TEST(Comparator, FailureNamesFirstAndWorstPlaceAndTheProblem) {
  Values want = line({1, 1, 1, 1});
  want.shape = {2, 2};
  Values got = want;
  got.data = {1, 2, 1, -7};
  const auto result = elements_within(got, want, 0.5);
  EXPECT_STREQ(
      result.message(),
      "x: error above 0.5 + 0 of the value; 2 of 4 elements off; first [0, 1]: got 2, want "
      "1; worst [1, 1]: got -7, want 1; shape [2, 2]; seed 7");
}

TEST(GuardedTensor, NoticesAWriteBesideThePayload) {
  HostTensor tensor(DType::kInt32, {3});
  EXPECT_TRUE(tensor.untouched());
  tensor.set({2}, 5);
  EXPECT_FALSE(tensor.untouched());
  EXPECT_TRUE(tensor.bands_intact());
#ifndef __SANITIZE_ADDRESS__  // which traps the write itself
  tensor.view().as<std::int32_t>()[3] = 0;
  EXPECT_FALSE(tensor.bands_intact());
#endif
}

TEST(GuardedTensor, HoldsNanUntilItIsSet) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    EXPECT_TRUE(std::isnan(HostTensor(dtype, {1}).get({0}))) << dtype_name(dtype);
  }
}

TEST(GuardedTensor, UnalignedIsOneElementOff) {
  const HostTensor tensor = HostTensor::unaligned(DType::kBFloat16, {4});
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.view().data) % 64, 2u);
}

// Mutations of a right answer: the judge of the attention tests sees every one of them.
class JudgeSees : public ::testing::Test {
 protected:
  JudgeSees() : problem_(random_attention({.t_q = 3, .t_k = 20, .heads = 2, .topk = 8}, 41)) {
    problem_.set_sink({0.5, -1});
    problem_.set_row(1, {});
    right_ = run_attention(problem_, reference_runtime());
  }

  void expect_seen(HostTensor AttentionResult::* tensor, std::int64_t place, double value) const {
    AttentionResult wrong = right_;
    (wrong.*tensor).set(place, value);
    EXPECT_FALSE(within_spec(problem_, wrong));
  }
  void expect_scaling_seen(HostTensor AttentionResult::* tensor) const {
    AttentionResult wrong = right_;
    HostTensor& values = wrong.*tensor;
    for (std::int64_t i = 0; i < values.elements(); ++i) values.set(i, 1.1 * values.get(i));
    EXPECT_FALSE(within_spec(problem_, wrong));
  }

  AttentionProblem problem_;
  AttentionResult right_;
};

TEST_F(JudgeSees, NothingInARightAnswer) { EXPECT_TRUE(within_spec(problem_, right_)); }

TEST_F(JudgeSees, ResultsScaledBy1_1) {
  expect_scaling_seen(&AttentionResult::out);
  expect_scaling_seen(&AttentionResult::lse);
  expect_scaling_seen(&AttentionResult::max_logits);
  expect_scaling_seen(&AttentionResult::grad_q);
  expect_scaling_seen(&AttentionResult::grad_kv);
  AttentionResult wrong = right_;
  wrong.grad_attn_sink->set(0, 1.1 * wrong.grad_attn_sink->get(0));
  wrong.grad_attn_sink->set(1, 1.1 * wrong.grad_attn_sink->get(1));
  EXPECT_FALSE(within_spec(problem_, wrong));
}

TEST_F(JudgeSees, OneWrongElement) {
  expect_seen(&AttentionResult::out, 5, 2.0);
  expect_seen(&AttentionResult::lse, 0, right_.lse.get(0) + 3e-4);
  expect_seen(&AttentionResult::max_logits, 0, right_.max_logits.get(0) + 3e-4);
  expect_seen(&AttentionResult::grad_q, 5, 2.0);
}

TEST_F(JudgeSees, ValuesInEmptyRows) {
  expect_seen(&AttentionResult::out, right_.out.at({1, 0, 0}), 1e-6);
  expect_seen(&AttentionResult::lse, right_.lse.at({1, 0}), -1e30);
  expect_seen(&AttentionResult::max_logits, right_.max_logits.at({1, 0}), -1e30);
  expect_seen(&AttentionResult::grad_q, right_.grad_q.at({1, 0, 0}), 1e-6);
}

TEST_F(JudgeSees, AGradientOfAKeyThatNobodySelected) {
  const auto mine = problem_.keys_of_row(0), other = problem_.keys_of_row(2);
  for (std::int64_t key = 0; key < problem_.t_k(); ++key) {
    if (std::count(mine.begin(), mine.end(), key) + std::count(other.begin(), other.end(), key) >
        0) {
      continue;
    }
    expect_seen(&AttentionResult::grad_kv, right_.grad_kv.at({key, 0, 3}), 1e-6);
    return;
  }
  FAIL() << "every key is selected";
}

}  // namespace
}  // namespace flashdsa::test
