// A plan beside the arguments of attention: refused where it does not belong, without effect on the
// host.

#include <cmath>
#include <cstdint>
#include <string>

#include "flashdsa/selection.h"
#include "tests/attention/fixture.h"
#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

// T_q = 3, T_k = 40, H = 4, K = 24, so groups of 8 rows.
class AttentionWithPlan : public ::testing::Test {
 protected:
  SelectionPlan plan_for(std::int64_t heads, std::int64_t t_k = 40) const {
    return build_selection_plan({problem_.topk_indices, std::nullopt, t_k, heads});
  }

  void expect_refused(const SelectionPlan& plan, ErrorCode code, const std::string& sentence,
                      Mode mode = Mode::kDefault) const {
    Runtime runtime = reference_runtime();
    runtime.mode = mode;
    const AttentionResult result = empty_result(problem_, Backend::kReference);
    AttentionForwardArgs forward = forward_args(problem_, result);
    AttentionBackwardArgs backward = backward_args(problem_, result);
    forward.plan = backward.plan = &plan;
    expect_error([&] { attention_forward(forward, runtime); }, code,
                 "attention_forward: " + sentence);
    expect_error([&] { attention_backward(backward, runtime); }, code,
                 "attention_backward: " + sentence);
    for (const HostTensor* output : {&result.out, &result.lse, &result.grad_q, &result.grad_kv}) {
      EXPECT_TRUE(std::isnan(output->get(0)));
    }
  }

  AttentionProblem problem_ = random_attention({}, 371);
};

constexpr auto kWanted =
    "plan must be built for T_q = 3, K = 24, T_k = 40 and groups of 8 rows, got one for ";

TEST_F(AttentionWithPlan, OfOtherSizesIsRefused) {
  SelectionPlan plan = plan_for(4);
  plan.query_rows = 4;
  expect_refused(plan, ErrorCode::kValue,
                 std::string(kWanted) + "T_q = 4, K = 24, T_k = 40 and groups of 8 rows");
  plan = plan_for(4);
  plan.topk = 23;
  expect_refused(plan, ErrorCode::kValue,
                 std::string(kWanted) + "T_q = 3, K = 23, T_k = 40 and groups of 8 rows");
  expect_refused(plan_for(4, 41), ErrorCode::kValue,
                 std::string(kWanted) + "T_q = 3, K = 24, T_k = 41 and groups of 8 rows");
}

TEST_F(AttentionWithPlan, OfOtherHeadCountsIsRefusedWhereTheGroupDiffers) {
  expect_refused(plan_for(9), ErrorCode::kValue,
                 std::string(kWanted) + "T_q = 3, K = 24, T_k = 40 and groups of 4 rows");
  expect_refused(plan_for(64), ErrorCode::kValue,
                 std::string(kWanted) + "T_q = 3, K = 24, T_k = 40 and groups of 1 rows",
                 Mode::kInvariant);
}

TEST_F(AttentionWithPlan, WithoutItsMemoryIsRefused) {
  SelectionPlan plan = plan_for(4);
  const std::size_t bytes = plan.bytes();
  const std::string wanted = "plan.storage must be uint8 [" + std::to_string(bytes) + "], got ";
  TensorView view = plan.storage;
  view.shape[0] -= 64;
  plan.storage = Tensor(view, nullptr);
  expect_refused(plan, ErrorCode::kValue, wanted + "uint8 [" + std::to_string(bytes - 64) + "]");
  view.shape[0] += 64;
  view.dtype = DType::kInt8;
  plan.storage = Tensor(view, nullptr);
  expect_refused(plan, ErrorCode::kType, wanted + "int8 [" + std::to_string(bytes) + "]");
  view.dtype = DType::kUInt8;
  view.device = {DeviceKind::kCuda, 0};
  plan.storage = Tensor(view, nullptr);
  expect_refused(plan, ErrorCode::kValue, "plan.storage must be on cpu as q is, got cuda:0");
  view.device = {};
  view.data = reinterpret_cast<void*>(std::uintptr_t{0x1008});
  plan.storage = Tensor(view, nullptr);
  expect_refused(plan, ErrorCode::kValue,
                 "plan.storage must lie at a multiple of 16 bytes, got 0x1008");
  view.data = nullptr;
  plan.storage = Tensor(view, nullptr);
  expect_refused(
      plan, ErrorCode::kValue,
      "plan.storage must point to " + std::to_string(bytes) + " elements, got a null pointer");
}

TEST_F(AttentionWithPlan, ServesEveryHeadCountOfItsGroup) {
  const SelectionPlan built = plan_for(8);  // H is 4
  SelectionPlan plan = built;
  plan.storage = Tensor(built.storage.view(), nullptr);  // memory that the caller holds
  const AttentionResult result = empty_result(problem_, Backend::kReference);
  AttentionForwardArgs args = forward_args(problem_, result);
  args.plan = &plan;
  attention_forward(args, reference_runtime());
  EXPECT_TRUE(same_forward_bits(result, run_forward(problem_, reference_runtime())));
}

class AttentionOnHostWithPlan : public Attention {};
INSTANTIATE_TEST_SUITE_P(Every, AttentionOnHostWithPlan, ::testing::ValuesIn(host_engines()),
                         engine_name);

TEST_P(AttentionOnHostWithPlan, HasTheBitsOfTheCallWithout) {
  const AttentionProblem problem = random_attention({.t_q = 9, .t_k = 60}, 372);
  const SelectionPlan plan = build_selection_plan({problem.topk_indices, std::nullopt, 60, 4});
  const AttentionResult result = empty_result(problem, GetParam().backend);
  AttentionForwardArgs forward = forward_args(problem, result);
  AttentionBackwardArgs backward = backward_args(problem, result);
  forward.plan = backward.plan = &plan;
  attention_forward(forward, runtime());
  attention_backward(backward, runtime());
  EXPECT_TRUE(same_result_bits(result, run_attention(problem, runtime())));
}

}  // namespace
}  // namespace flashdsa::test
