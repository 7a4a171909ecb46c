// `reference` judges the other backends. Here it is judged itself, on float64 tensors: by numbers
// worked by hand and by central finite differences.

#include <cmath>
#include <limits>

#include "tests/attention/fixture.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

// One query e0 and two keys: logits 0 and ln 3, so P = 1/4 and 3/4; values 4 and 8 on channel 1.
AttentionProblem quarter_and_three_quarters() {
  AttentionProblem problem = in_float64(random_attention({1, 2, 1, 2, 576}, 0));
  problem.softmax_scale = 1;
  problem.q.fill(0);
  problem.kv.fill(0);
  problem.grad_out.fill(0);
  problem.q.set({0, 0, 0}, 1);
  problem.kv.set({1, 0, 0}, std::log(3.0));
  problem.kv.set({0, 0, 1}, 4);
  problem.kv.set({1, 0, 1}, 8);
  problem.grad_out.set({0, 0, 1}, 1);
  return problem;
}

constexpr double kEpsilon = 1e-14;

TEST(AttentionReference, WorkedExample) {
  const AttentionResult result = run_attention(quarter_and_three_quarters(), reference_runtime());
  EXPECT_NEAR(result.out.get({0, 0, 0}), 0.75 * std::log(3.0), kEpsilon);
  EXPECT_NEAR(result.out.get({0, 0, 1}), 7, kEpsilon);
  EXPECT_EQ(result.out.get({0, 0, 2}), 0);
  EXPECT_NEAR(result.lse.get({0, 0}), std::log(4.0), kEpsilon);
  EXPECT_NEAR(result.max_logits.get({0, 0}), std::log(3.0), kEpsilon);
  // D = 7, dP = 4 and 8, dS = -3/4 and 3/4.
  EXPECT_NEAR(result.grad_q.get({0, 0, 0}), 0.75 * std::log(3.0), kEpsilon);
  EXPECT_NEAR(result.grad_q.get({0, 0, 1}), 3, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({0, 0, 0}), -0.75, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({0, 0, 1}), 0.25, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({1, 0, 0}), 0.75, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({1, 0, 1}), 0.75, kEpsilon);
}

TEST(AttentionReference, WorkedExampleWithSink) {
  AttentionProblem problem = quarter_and_three_quarters();
  problem.set_sink({std::log(4.0)});  // halves P
  const AttentionResult result = run_attention(problem, reference_runtime());
  EXPECT_NEAR(result.out.get({0, 0, 1}), 3.5, kEpsilon);
  EXPECT_NEAR(result.lse.get({0, 0}), std::log(4.0), kEpsilon);
  EXPECT_NEAR(result.max_logits.get({0, 0}), std::log(3.0), kEpsilon);
  // D = 3.5, dS = 1/8 * 1/2 and 3/8 * 9/2.
  EXPECT_NEAR(result.grad_q.get({0, 0, 0}), 1.6875 * std::log(3.0), kEpsilon);
  EXPECT_NEAR(result.grad_q.get({0, 0, 1}), 0.0625 * 4 + 1.6875 * 8, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({0, 0, 0}), 0.0625, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({0, 0, 1}), 0.125, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({1, 0, 0}), 1.6875, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({1, 0, 1}), 0.375, kEpsilon);
  EXPECT_NEAR(result.grad_attn_sink->get({0}), -1.75, kEpsilon);
}

TEST(AttentionReference, RopeChannelsCountInLogitsAndNotInOut) {
  AttentionProblem problem = quarter_and_three_quarters();
  problem.kv.set({1, 0, 0}, 0);
  problem.q.set({0, 0, 575}, 2);
  problem.kv.set({1, 0, 575}, std::log(3.0) / 2);  // the same logits by the last channel
  const AttentionResult result = run_attention(problem, reference_runtime());
  EXPECT_NEAR(result.out.get({0, 0, 1}), 7, kEpsilon);
  EXPECT_NEAR(result.grad_q.get({0, 0, 575}), 0.75 * std::log(3.0) / 2, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({1, 0, 575}), 1.5, kEpsilon);
}

TEST(AttentionReference, DuplicateSlotsWeighAsOften) {
  AttentionProblem problem = in_float64(random_attention({1, 2, 1, 4, 512}, 0));
  problem.q.fill(0);
  problem.kv.fill(0);
  problem.grad_out.fill(1);
  problem.kv.set({0, 0, 0}, 8);
  problem.set_row(0, {0, 0, 1, 0});
  const AttentionResult result = run_attention(problem, reference_runtime());
  EXPECT_NEAR(result.out.get({0, 0, 0}), 6, kEpsilon);
  EXPECT_NEAR(result.lse.get({0, 0}), std::log(4.0), kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({0, 0, 7}), 0.75, kEpsilon);
  EXPECT_NEAR(result.grad_kv.get({1, 0, 7}), 0.25, kEpsilon);
}

// Holes, a duplicate, an unsorted row, an empty row and lengths in one problem of float64.
AttentionProblem awkward_problem(std::int64_t head_dim) {
  AttentionProblem problem = in_float64(
      random_attention({.t_q = 4, .t_k = 6, .heads = 2, .topk = 5, .head_dim = head_dim}, 101));
  problem.set_row(0, {-1, 4, -1, 0, 2});
  problem.set_row(1, {3, 3, 1, 6, 5});
  problem.set_row(2, {0, 1, 2, 4, 5});
  problem.set_row(3, {2, -1, 4, 0, 1});
  problem.set_lengths({5, 5, 0, 3});
  problem.set_sink({0.75, -0.5});
  return problem;
}

// sum(grad_out * out): the function whose gradients the backward computes.
double loss(const AttentionProblem& problem) {
  Runtime runtime = reference_runtime();
  runtime.threads = 1;  // the problem is too small for more
  const auto out = run_forward(problem, runtime).out.values();
  const auto grad_out = problem.grad_out.values();
  double sum = 0;
  for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * grad_out[i];
  return sum;
}

// Central difference of the loss at every `pace`-th element of `tensor`, against `gradient`.
void expect_differences(AttentionProblem& problem, HostTensor& tensor, const HostTensor& gradient,
                        std::int64_t pace) {
  constexpr double kStep = 1e-4;
  for (std::int64_t i = 0; i < tensor.elements(); i += pace) {
    const double value = tensor.get(i);
    tensor.set(i, value + kStep);
    const double above = loss(problem);
    tensor.set(i, value - kStep);
    const double below = loss(problem);
    tensor.set(i, value);
    EXPECT_NEAR(gradient.get(i), (above - below) / (2 * kStep), 1e-7)
        << place_text(tensor.shape(), i) << "; " << problem.describe();
  }
}

class AttentionReferenceDim : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(AttentionReferenceDim, GradientsAreTheFiniteDifferencesOfTheForward) {
  AttentionProblem problem = awkward_problem(GetParam());
  const AttentionResult result = run_attention(problem, reference_runtime());
  expect_differences(problem, problem.q, result.grad_q, 67);
  expect_differences(problem, problem.kv, result.grad_kv, 37);
  expect_differences(problem, *problem.attn_sink, *result.grad_attn_sink, 1);
}

TEST_P(AttentionReferenceDim, GradientsWithoutSinkAreFiniteDifferences) {
  AttentionProblem problem = awkward_problem(GetParam());
  problem.attn_sink.reset();
  const AttentionResult result = run_attention(problem, reference_runtime());
  expect_differences(problem, problem.q, result.grad_q, 101);
  expect_differences(problem, problem.kv, result.grad_kv, 71);
}

INSTANTIATE_TEST_SUITE_P(HeadDim, AttentionReferenceDim, ::testing::Values(512, 576),
                         ::testing::PrintToStringParamName());

// Results of float64 tensors are float64 results, not rounded ones.
TEST(AttentionReference, Float64IsNotRounded) {
  const AttentionProblem problem = in_float64(random_attention({2, 9, 2, 6, 576}, 5));
  const AttentionResult result = run_attention(problem, reference_runtime());
  const auto rounded = [](const HostTensor& tensor) {
    std::int64_t count = 0;
    for (const double value : tensor.values()) count += static_cast<float>(value) == value;
    return count;
  };
  EXPECT_EQ(rounded(result.out), 0);
  EXPECT_EQ(rounded(result.lse), 0);
  EXPECT_EQ(rounded(result.grad_q), 0);
}

// On BF16 tensors `reference` still computes in float64 and rounds the results once. D comes from
// the rounded out that the caller hands back, so only the forward is a plain rounding.
TEST(AttentionReference, BFloat16ForwardIsTheRoundedFloat64Forward) {
  const AttentionProblem problem = random_attention({2, 40, 3, 30, 576}, 6);
  const AttentionResult rounded = run_forward(problem, reference_runtime());
  const AttentionResult exact = run_forward(in_float64(problem), reference_runtime());
  EXPECT_TRUE(same_bits(rounded.out, exact.out.as(DType::kBFloat16)));
  EXPECT_TRUE(same_bits(rounded.lse, exact.lse.as(DType::kFloat32)));
  EXPECT_TRUE(same_bits(rounded.max_logits, exact.max_logits.as(DType::kFloat32)));
}

}  // namespace
}  // namespace flashdsa::test
