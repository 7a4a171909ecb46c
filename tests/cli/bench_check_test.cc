// The benchmark's checks notice wrong results.

#include "tools/bench_check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>

#include "flashdsa/flashdsa.h"
#include "selection/plan_format.h"
#include "tools/workloads.h"

namespace flashdsa::tools {
namespace {

Workload small_workload() {
  WorkloadRequest request;
  request.name = "single8k";
  request.shape = preset("glm5.2");
  request.shape.heads = 2;
  request.shape.index_heads = 2;
  request.shape.topk = 128;
  request.rows = 6;
  return make_workload(request);
}

class BenchCheck : public ::testing::Test {
 protected:
  BenchCheck()
      : workload(small_workload()),
        indices(*workload.topk_indices),
        length(*workload.topk_length),
        forward{Tensor::host(DType::kBFloat16, {6, 2, 512}), Tensor::host(DType::kFloat32, {6, 2})},
        backward{Tensor::host(DType::kBFloat16, {6, 2, 576}),
                 Tensor::host(DType::kBFloat16, {8192, 1, 576})} {
    AttentionForwardArgs args;
    fill(args);
    args.out = forward.out;
    args.lse = forward.lse;
    attention_forward(args);
    AttentionBackwardArgs back;
    fill(back);
    back.out = forward.out;
    back.lse = forward.lse;
    back.grad_out = *workload.grad_out;
    back.grad_q = backward.grad_q;
    back.grad_kv = backward.grad_kv;
    attention_backward(back);
  }

  void fill(SparseAttentionInputs& inputs) const {
    inputs.q = *workload.q;
    inputs.kv = *workload.kv;
    inputs.topk_indices = indices;
    inputs.topk_length = length;
    inputs.softmax_scale = workload.shape.softmax_scale;
  }

  static void scale(const Tensor& tensor, float factor) {
    for (BFloat16& value : tensor.span<BFloat16>())
      value = BFloat16(factor * static_cast<float>(value));
  }

  Figure judge_forward() const { return check_forward(workload, indices, length, forward, true); }
  Figure judge_backward() const {
    return check_backward(workload, indices, length, forward, backward);
  }

  Workload workload;
  Tensor indices, length;
  ForwardOutputs forward;
  BackwardOutputs backward;
};

TEST_F(BenchCheck, RightResultsPass) {
  EXPECT_TRUE(judge_forward().ok()) << judge_forward().text();
  EXPECT_TRUE(judge_backward().ok()) << judge_backward().text();
  EXPECT_GT(judge_forward().value, 0);
}

TEST_F(BenchCheck, OnePercentOfOutIsNoticed) {
  scale(forward.out, 1.01f);
  EXPECT_FALSE(judge_forward().ok()) << judge_forward().text();
}

TEST_F(BenchCheck, OneVectorOfTheLastRowIsNoticed) {
  const auto last = forward.out.span<BFloat16>().last(512);
  for (BFloat16& value : last) value = BFloat16(1.05f * static_cast<float>(value));
  EXPECT_FALSE(judge_forward().ok()) << judge_forward().text();
}

TEST_F(BenchCheck, LseInBaseTwoIsNoticed) {
  for (float& value : forward.lse.span<float>()) value /= std::log(2.0f);
  EXPECT_FALSE(judge_forward().ok()) << judge_forward().text();
}

TEST_F(BenchCheck, NanIsNoticed) {
  forward.out.span<BFloat16>().back() = BFloat16(std::numeric_limits<float>::quiet_NaN());
  EXPECT_FALSE(judge_forward().ok()) << judge_forward().text();
}

TEST_F(BenchCheck, ThreePercentOfGradQIsNoticed) {
  scale(backward.grad_q, 1.03f);
  EXPECT_FALSE(judge_backward().ok()) << judge_backward().text();
}

TEST_F(BenchCheck, ThreePercentOfGradKvIsNoticed) {
  scale(backward.grad_kv, 1.03f);
  EXPECT_FALSE(judge_backward().ok()) << judge_backward().text();
}

class SelectionCheck : public BenchCheck {
 protected:
  SelectionCheck()
      : chosen(Tensor::host(DType::kInt32, {6, 1, 128})),
        chosen_length(Tensor::host(DType::kInt32, {6})) {
    IndexerTopkArgs args;
    args.index_q = *workload.index_q;
    args.index_k = *workload.index_k;
    args.head_weights = *workload.head_weights;
    args.starts = workload.starts;
    args.causal_lengths = workload.causal_lengths;
    args.topk_indices = chosen;
    args.topk_length = chosen_length;
    indexer_topk(args);
  }

  std::span<std::int32_t> last_row() const { return chosen.span<std::int32_t>().last(128); }
  Figure judge() const { return check_selection(workload, chosen, chosen_length); }

  Tensor chosen, chosen_length;
};

TEST_F(SelectionCheck, RightSelectionPasses) { EXPECT_TRUE(judge().ok()) << judge().text(); }

TEST_F(SelectionCheck, OneWrongKeyIsNoticed) {
  // Key 0 in place of the smallest one chosen, which key 0 does not belong to.
  ASSERT_GT(last_row().front(), 0);
  last_row().front() = 0;
  EXPECT_FALSE(judge().ok()) << judge().text();
}

TEST_F(SelectionCheck, SwappedSlotsAreNoticed) {
  std::swap(last_row()[0], last_row()[1]);
  EXPECT_FALSE(judge().ok());
}

TEST_F(SelectionCheck, WrongLengthIsNoticed) {
  chosen_length.span<std::int32_t>()[0] -= 1;
  EXPECT_FALSE(judge().ok());
}

class IndexerBackwardCheck : public BenchCheck {
 protected:
  IndexerBackwardCheck()
      : grad_scores(Tensor::host(DType::kFloat32, {6, 128})),
        gradients{Tensor::host(DType::kBFloat16, {6, 2, 128}),
                  Tensor::host(DType::kBFloat16, {8192, 128}),
                  Tensor::host(DType::kFloat32, {6, 2})} {
    float grad = 0.1f;  // then a sequence of the logistic map, without a pattern
    for (float& value : grad_scores.span<float>()) {
      grad = 3.9f * grad * (1 - grad);
      value = grad - 0.5f;
    }
    IndexerBackwardArgs args;
    args.index_q = *workload.index_q;
    args.index_k = *workload.index_k;
    args.head_weights = *workload.head_weights;
    args.topk_indices = indices;
    args.topk_length = length.view();
    args.grad_scores = grad_scores;
    args.grad_index_q = gradients.grad_index_q;
    args.grad_index_k = gradients.grad_index_k;
    args.grad_head_weights = gradients.grad_head_weights;
    indexer_backward(args);
  }

  Figure judge() const {
    return check_indexer_backward(workload, indices, length, grad_scores, gradients);
  }

  Tensor grad_scores;
  IndexerBackwardOutputs gradients;
};

TEST_F(IndexerBackwardCheck, RightResultsPass) {
  EXPECT_TRUE(judge().ok()) << judge().text();
  EXPECT_GT(judge().value, 0);
}

TEST_F(IndexerBackwardCheck, ThreePercentOfGradIndexQIsNoticed) {
  scale(gradients.grad_index_q, 1.03f);
  EXPECT_FALSE(judge().ok()) << judge().text();
}

TEST_F(IndexerBackwardCheck, ThreePercentOfGradIndexKIsNoticed) {
  scale(gradients.grad_index_k, 1.03f);
  EXPECT_FALSE(judge().ok()) << judge().text();
}

TEST_F(IndexerBackwardCheck, ThreePercentOfGradHeadWeightsIsNoticed) {
  for (float& value : gradients.grad_head_weights.span<float>()) value *= 1.03f;
  EXPECT_FALSE(judge().ok()) << judge().text();
}

TEST_F(BenchCheck, MetadataOfAnotherRowIsNoticed) {
  PackedMetadata metadata;
  metadata.starts = workload.starts;
  metadata.causal_lengths = Tensor::host(DType::kInt32, {6});
  std::ranges::copy(workload.causal_lengths.span<std::int32_t>(),
                    metadata.causal_lengths.span<std::int32_t>().begin());
  EXPECT_TRUE(check_metadata(workload, metadata).ok());
  metadata.causal_lengths.span<std::int32_t>()[3] += 1;
  EXPECT_EQ(check_metadata(workload, metadata).value, 1);
}

TEST(Figure, TheWorstIsNearestToItsBound) {
  const Figure small{"a", 1, 10}, large{"b", 2, 4}, broken{"c", 2, 1};
  const Figure nan{"d", std::numeric_limits<double>::quiet_NaN(), 1};
  EXPECT_EQ(worst(small, large).name, "b");
  EXPECT_EQ(worst(broken, large).name, "c");
  EXPECT_EQ(worst(large, nan).name, "d");
  EXPECT_EQ(worst(nan, large).name, "d");
  EXPECT_NE(broken.text().find("FAIL"), std::string::npos);
}

// The plan of a workload's own selection.
SelectionPlan plan_of(const Workload& workload, std::int64_t heads) {
  SelectionPlanArgs args;
  args.topk_indices = *workload.topk_indices;
  args.topk_length = workload.topk_length->view();
  args.total_key_tokens = workload.t_k;
  args.heads = heads;
  return build_selection_plan(args);
}

// Whether the check notices a word of the plan that became another.
bool notices(const Workload& workload, const SelectionPlan& plan, const void* word,
             std::int32_t difference) {
  auto& there = *static_cast<std::int32_t*>(const_cast<void*>(word));
  there += difference;
  const bool noticed = !check_plan(workload, plan).ok();
  there -= difference;
  return noticed;
}

TEST_F(BenchCheck, WrongPlansAreNoticed) {
  const auto view_of_plan = [](const SelectionPlan& plan) {
    return selection::plan_view(plan.storage.view().data, {plan.query_rows, plan.topk, plan.group});
  };
  for (const std::int64_t heads : {8, 64}) {
    const SelectionPlan plan = plan_of(workload, heads);
    const selection::PlanView view = view_of_plan(plan);
    ASSERT_TRUE(check_plan(workload, plan).ok()) << check_plan(workload, plan).text();
    ASSERT_EQ(view.items[0].kind,
              heads == 8 ? selection::ItemKind::kUnion : selection::ItemKind::kSlots);
    EXPECT_TRUE(notices(workload, plan, view.item_count, -1));
    EXPECT_TRUE(notices(workload, plan, &view.items[0].keys, -1));
    EXPECT_TRUE(notices(workload, plan, &view.items[0].first_row, 1));
    if (heads == 64) continue;
    EXPECT_TRUE(notices(workload, plan, view.lists + 3, 1));
    EXPECT_TRUE(notices(workload, plan, view.masks, 1));
  }
  // One document of 8192 rows, of which the first ones see less than K keys.
  WorkloadRequest request;
  request.name = "single8k";
  request.shape = workload.shape;
  const Workload whole = make_workload(request);
  const SelectionPlan plan = plan_of(whole, 8);
  const selection::PlanView view = view_of_plan(plan);
  ASSERT_EQ(view.items[0].kind, selection::ItemKind::kRange);
  EXPECT_TRUE(check_plan(whole, plan).ok());
  EXPECT_TRUE(notices(whole, plan, view.row_first + 1, 1));
  EXPECT_TRUE(notices(whole, plan, view.row_keys + 1, 1));
}

}  // namespace
}  // namespace flashdsa::tools
