// Forward over selection plans: the results are those of the same call without one (SPEC sections 5
// and 8), whatever the plan makes of the rows.

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "attention/sm90/call_plan.h"
#include "tests/attention/fixture.h"
#include "tests/support/cuda/device_test.h"
#include "tests/support/planned_rows.h"

namespace flashdsa::test {
namespace {

using selection::ItemKind;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class PlannedForward : public DeviceTest {
 protected:
  // The plan is built on the device, too.
  AttentionResult planned(const AttentionProblem& problem, Mode mode = Mode::kDefault) const {
    const AttentionResult result = empty_result(problem, Backend::kSm90);
    Mirror mirror(stream());
    Runtime on = runtime(mode);
    on.allocator = &mirror.allocator();
    AttentionForwardArgs args = placed(forward_args(problem, result), mirror);
    const SelectionPlan plan = build_plan(args, on);
    args.plan = &plan;
    attention_forward(args, on);
    mirror.download();
    for (const HostTensor* tensor : {&result.out, &result.lse, &result.max_logits}) {
      EXPECT_TRUE(tensor->bands_intact());
    }
    return result;
  }

  // `spoiled` is `clean` with NaN in a key. A tile of several rows multiplies every key of the item
  // with a weight of each row; the weight of a key that a row did not select is zero, and zero
  // times NaN is NaN.
  void expect_nan_of_only_selecting_rows(const AttentionProblem& clean,
                                         const AttentionProblem& spoiled, std::int64_t key) const {
    const AttentionResult want = run_forward(in_float64(clean), reference_runtime());
    const AttentionResult got = planned(spoiled);
    for (std::int64_t t = 0; t < clean.t_q(); ++t) {
      const auto keys = clean.keys_of_row(t);
      const std::string where = clean.describe() + ", row " + std::to_string(t);
      const auto values = [&](const char* name, const HostTensor& tensor) {
        return values_of(name, tensor.rows(t, 1), where);
      };
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        ASSERT_TRUE(vectors_within(values("out", got.out), values("out", want.out),
                                   kVectorFactor * kOutRmse));
        ASSERT_TRUE(elements_within(values("lse", got.lse), values("lse", want.lse),
                                    log_absolute(Backend::kSm90), kLogRelative));
        ASSERT_TRUE(elements_within(values("max_logits", got.max_logits),
                                    values("max_logits", want.max_logits),
                                    log_absolute(Backend::kSm90), kLogRelative));
      } else {
        for (const HostTensor* tensor : {&got.out, &got.lse, &got.max_logits}) {
          for (const double x : tensor->rows(t, 1).values()) ASSERT_TRUE(std::isnan(x)) << where;
        }
      }
    }
  }
};

TEST_F(PlannedForward, RowsOfEveryKindAreRight) {
  const std::vector<std::int64_t> every = {1, 5, 8, 9, 16, 24, 32, 33, 64, 128};
  for (const std::int64_t head_dim : {576, 512}) {
    for (const std::int64_t heads :
         head_dim == 576 ? every : std::vector<std::int64_t>{5, 32, 64}) {
      const std::int64_t rows = heads > 32 ? 34 : 45;  // not a multiple of G
      const AttentionProblem problem = mixed_rows(
          {.t_q = rows, .t_k = 300, .heads = heads, .topk = 101, .head_dim = head_dim}, 401);
      std::set<ItemKind> alone, together;
      for (const selection::PlanItem& item : items_of(problem)) {
        (item.rows > 1 ? together : alone).insert(item.kind);
      }
      EXPECT_TRUE(alone.count(ItemKind::kSlots) > 0);
      if (heads > 32) {
        EXPECT_TRUE(alone.count(ItemKind::kRange) > 0);
        EXPECT_TRUE(together.empty());
      } else {
        EXPECT_EQ(together, (std::set{ItemKind::kUnion, ItemKind::kRange}));
      }
      const AttentionResult got = planned(problem);
      EXPECT_TRUE(forward_within_spec(problem, got));
      EXPECT_TRUE(same_forward_bits(planned(problem), got)) << problem.describe();
    }
  }
}

TEST_F(PlannedForward, FewRowsAndOddTensorsAreRight) {
  for (const std::int64_t rows : {1, 2, 7, 9, 13}) {
    AttentionProblem problem = mixed_rows({.t_q = rows, .t_k = 260, .heads = 5, .topk = 65}, 402);
    problem.set_lengths(std::vector<std::int32_t>(static_cast<std::size_t>(rows), 50));
    problem.q = problem.q.with_strides({7 * 640, 640, 1});
    EXPECT_TRUE(forward_within_spec(problem, planned(problem)));
    problem.q = problem.q.with_unaligned_memory();
    problem.kv = problem.kv.with_unaligned_memory();
    EXPECT_TRUE(forward_within_spec(problem, planned(problem)));
  }
}

TEST_F(PlannedForward, NanInAKeyReachesOnlyRowsThatSelectedIt) {
  for (const std::int64_t heads : {3, 16, 32, 64}) {
    const AttentionProblem clean =
        mixed_rows({.t_q = 24, .t_k = 300, .heads = heads, .topk = 101}, 403);
    // Of the last of some rows that overlap, and of the middle of a drifting row.
    for (const auto& [row, slot] : {std::pair{7, 90}, std::pair{11, 50}}) {
      const std::int64_t key = clean.keys_of_row(row)[static_cast<std::size_t>(slot)];
      AttentionProblem spoiled = clean;
      spoiled.kv.set({key, 0, 300}, kNan);  // one channel of its value
      expect_nan_of_only_selecting_rows(clean, spoiled, key);
      spoiled.set_key(key, kNan);
      expect_nan_of_only_selecting_rows(clean, spoiled, key);
    }
  }
}

// So many items that a multiprocessor walks several, and repairs some of them.
TEST_F(PlannedForward, HundredsOfItemsAreRight) {
  const AttentionShape shapes[] = {{.t_q = 800, .t_k = 100, .heads = 17, .topk = 40},
                                   {.t_q = 800, .t_k = 300, .heads = 64, .topk = 101}};
  for (const AttentionShape& shape : shapes) {
    const AttentionProblem clean = mixed_rows(shape, 407);
    EXPECT_GT(items_of(clean).size(), 400u);
    AttentionProblem spoiled = clean;
    spoiled.set_key(55, kNan);
    expect_nan_of_only_selecting_rows(clean, spoiled, 55);
    EXPECT_TRUE(same_forward_bits(planned(spoiled), planned(spoiled)));
  }
}

TEST_F(PlannedForward, InvariantModeDoesWithoutThePlan) {
  for (const std::int64_t heads : {5, 32, 64}) {
    const AttentionProblem problem =
        mixed_rows({.t_q = 24, .t_k = 300, .heads = heads, .topk = 101}, 404);
    EXPECT_TRUE(same_forward_bits(planned(problem, Mode::kInvariant),
                                  run_forward(problem, runtime(Mode::kInvariant))));
  }
}

TEST_F(PlannedForward, CallOfManyRowsBuildsAPlan) {
  constexpr std::int64_t kRows = attention::sm90::CallPlan::kLeastRows;
  AttentionShape shape{.t_q = kRows, .t_k = 100, .heads = 8, .topk = 24};
  const AttentionProblem many = mixed_rows(shape, 408);
  const AttentionResult got = run_forward(many, runtime());
  EXPECT_TRUE(forward_within_spec(many, got));
  EXPECT_TRUE(same_forward_bits(got, planned(many)));
  EXPECT_FALSE(same_forward_bits(got, run_forward(many, runtime(Mode::kInvariant))));

  shape.t_q = kRows - 1;
  const AttentionProblem fewer = mixed_rows(shape, 408);
  EXPECT_TRUE(same_forward_bits(run_forward(fewer, runtime()),
                                run_forward(fewer, runtime(Mode::kInvariant))));
}

TEST_F(PlannedForward, GraphBuildsAndWalksThePlanOfItsInputs) {
  const AttentionProblem problems[] = {
      mixed_rows({.t_q = 45, .t_k = 300, .heads = 8, .topk = 101}, 405),
      random_attention({.t_q = 45, .t_k = 300, .heads = 8, .topk = 101}, 406)};
  AttentionProblem problem = problems[0];
  const AttentionResult result = empty_result(problem, Backend::kSm90);
  Mirror mirror(stream());
  AttentionForwardArgs args = placed(forward_args(problem, result), mirror);
  const auto call = [&](const Runtime& on) {
    const SelectionPlan plan = build_plan(args, on);
    args.plan = &plan;
    attention_forward(args, on);
  };
  call(runtime());  // loads the kernels
  stream().wait();
  expect_asynchronous(runtime(), call);
  stream().wait();
  const CapturedGraph graph(stream(), [&] { call(runtime()); });
  for (const AttentionProblem& next : problems) {
    for (std::int64_t i = 0; i < problem.topk_indices.elements(); ++i) {
      problem.topk_indices.set(i, next.topk_indices.get(i));
    }
    mirror.upload();
    graph.replay();
    mirror.download();
    EXPECT_TRUE(same_forward_bits(result, planned(problem)));
  }
}

}  // namespace
}  // namespace flashdsa::test
