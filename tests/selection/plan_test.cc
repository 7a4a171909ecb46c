// The selection plan: worked by hand, and its rules on selections of every sort.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/engines.h"
#include "tests/support/expect_error.h"
#include "tests/support/placement.h"
#include "tests/support/selection_plan.h"

namespace flashdsa::test {
namespace {

constexpr std::int64_t kHeads[] = {1, 8, 9, 16, 17, 32, 33, 128};
constexpr std::int64_t kGroups[] = {8, 8, 4, 4, 2, 2, 1, 1};

// Keys first .. first + count - 1.
std::vector<std::int32_t> range(std::int32_t first, std::int32_t count) {
  std::vector<std::int32_t> result(static_cast<std::size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

class PlanTest : public EngineTest {
 protected:
  std::string plan_text(const Selection& selection, std::int64_t heads) const {
    return text(plan_of(selection, heads, runtime()));
  }

  void expect_rules(const Selection& selection) const {
    for (const std::int64_t heads : {8, 16, 32, 64}) {
      EXPECT_EQ(plan_text(selection, heads), expected_text(selection, heads)) << heads << " heads";
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Every, PlanTest, ::testing::ValuesIn(backend_engines()), engine_name);

TEST_P(PlanTest, NeighboursThatShareKeysAreOneUnion) {
  // 5 keys of 4 + 4 are 62.5 %: few enough for two rows.
  EXPECT_EQ(plan_text({{{1, 3, 5, 9}, {3, 5, 7, 9}}, 4, 10, {}}, 32),
            "rows 0..1 union of 5 keys: 0 {1 3 5 9} 1 {3 5 7 9}\n");
}

TEST_P(PlanTest, RowsThatShareTooFewKeysStayAlone) {
  // 7 keys of 4 + 4 are 87.5 %.
  EXPECT_EQ(plan_text({{{1, 3, 5, 9}, {0, 2, 7, 9}}, 4, 10, {}}, 32),
            "rows 0..0 slots up to 4\nrows 1..1 slots up to 4\n");
}

TEST_P(PlanTest, UnionMayBeAsLargeAsTheLimit) {
  // Two rows of 50 keys: 81 % are 81, that is 19 keys in common.
  for (const std::int32_t shared : {19, 18}) {
    Selection selection{{range(0, 50), range(0, shared)}, 50, 500, {}};
    for (std::int32_t i = shared; i < 50; ++i) selection.rows[1].push_back(100 + 2 * i);
    const std::string got = plan_text(selection, 32);
    EXPECT_EQ(got.starts_with("rows 0..1 union of 81 keys"), shared == 19) << got;
  }
  // Four of 25: 64 % are 64. Eight of 25: 58 % are 116.
  for (const auto& [heads, rows, most] : {std::tuple(16, 4, 64), std::tuple(8, 8, 116)}) {
    for (const int distinct : {most, most + 1}) {
      Selection selection{{}, 25, 1000, {}};
      for (std::int32_t t = 0; t < rows; ++t) {
        selection.rows.emplace_back();
        for (std::int32_t i = 25 * t; i < 25 * (t + 1); ++i) {
          selection.rows.back().push_back(3 * (i % distinct));
        }
        std::ranges::sort(selection.rows.back());
      }
      const std::string got = plan_text(selection, heads);
      EXPECT_EQ(got.starts_with("rows 0.." + std::to_string(rows - 1) + " union of " +
                                std::to_string(most) + " keys"),
                distinct == most)
          << got;
    }
  }
}

TEST_P(PlanTest, CausalRowsAreOneRange) {
  EXPECT_EQ(plan_text({{{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}}, 4, 4, {}}, 16),
            "rows 0..3 range 0..3: 0 {0..0} 1 {0..1} 2 {0..2} 3 {0..3}\n");
}

TEST_P(PlanTest, RowsWithoutKeysJoinARange) {
  EXPECT_EQ(plan_text({{{}, range(5, 4), {}, range(6, 4)}, 4, 10, {}}, 16),
            "rows 0..3 range 5..9: 0 {} 1 {5..8} 2 {} 3 {6..9}\n");
}

TEST_P(PlanTest, RowsWithoutKeysJoinAUnion) {
  EXPECT_EQ(plan_text({{{}, {1, 3}, {1, 3}, {1, 3}}, 2, 9, {}}, 16),
            "rows 0..3 union of 2 keys: 0 {} 1 {1 3} 2 {1 3} 3 {1 3}\n");
}

TEST_P(PlanTest, GroupWithoutKeysIsSingleRows) {
  for (const std::int64_t heads : {32, 64}) {
    EXPECT_EQ(plan_text({{{}, {}}, 4, 9, {}}, heads),
              "rows 0..0 slots up to 0\nrows 1..1 slots up to 0\n");
  }
}

TEST_P(PlanTest, RangesFarApartAreAUnionWhereThatIsSmall) {
  // The last row begins a new document.
  Selection selection{{}, 6, 1000, {}};
  for (int t = 0; t < 3; ++t) selection.rows.push_back(range(10, 6));
  selection.rows.push_back({900});
  EXPECT_EQ(plan_text(selection, 16),
            "rows 0..3 union of 7 keys: 0 {10 11 12 13 14 15} 1 {10 11 12 13 14 15} 2 {10 11 12 "
            "13 14 15} 3 {900}\n");
}

TEST_P(PlanTest, BorderOfTwoDocumentsSplitsTheGroup) {
  Selection selection{{}, 9, 1000, {}};
  for (std::int32_t t = 0; t < 5; ++t) selection.rows.push_back(range(100, 5 + t));
  for (std::int32_t t = 0; t < 3; ++t) selection.rows.push_back(range(500, 7 + t));
  EXPECT_EQ(plan_text(selection, 8),
            "rows 0..7 union of 18 keys: 0 {100 101 102 103 104} 1 {100 101 102 103 104 105} 2 "
            "{100 101 102 103 104 105 106} 3 {100 101 102 103 104 105 106 107} 4 {100 101 102 103 "
            "104 105 106 107 108} 5 {500 501 502 503 504 505 506} 6 {500 501 502 503 504 505 506 "
            "507} 7 {500 501 502 503 504 505 506 507 508}\n");
  EXPECT_EQ(plan_text(selection, 32),
            "rows 0..1 range 100..105: 0 {100..104} 1 {100..105}\n"
            "rows 2..3 range 100..107: 2 {100..106} 3 {100..107}\n"
            "rows 4..4 range 100..108: 4 {100..108}\n"
            "rows 5..5 range 500..506: 5 {500..506}\n"
            "rows 6..7 range 500..508: 6 {500..507} 7 {500..508}\n");
}

TEST_P(PlanTest, RowsOutOfOrderStandAloneAndTheOthersGoOn) {
  const std::vector<std::int32_t> plain{2, 4, 6, 8}, unsorted{2, 6, 4, 8}, twice{2, 4, 4, 8},
      hole{2, -1, 6, 8}, outside{2, 4, 50, 8};
  for (const auto& row : {unsorted, twice, hole, outside}) {
    EXPECT_EQ(plan_text({{plain, plain, plain, plain, row, plain, plain, plain}, 4, 9, {}}, 8),
              "rows 0..3 union of 4 keys: 0 {2 4 6 8} 1 {2 4 6 8} 2 {2 4 6 8} 3 {2 4 6 8}\n"
              "rows 4..4 slots up to 4\n"
              "rows 5..5 slots up to 4\n"
              "rows 6..7 union of 4 keys: 6 {2 4 6 8} 7 {2 4 6 8}\n");
  }
}

TEST_P(PlanTest, SlotsBehindTheLastKeyDoNotCount) {
  EXPECT_EQ(plan_text({{{4, 2, -1, -1}, {-1, 3, 9, -1}}, 4, 9, {}}, 64),
            "rows 0..0 slots up to 2\nrows 1..1 slots up to 2\n");
}

TEST_P(PlanTest, LengthsCutTheRows) {
  EXPECT_EQ(plan_text({{{1, 2, 7, 3}, {1, 2, 7, 3}}, 4, 9, {{2, 7}}}, 32),
            "rows 0..0 range 1..2: 0 {1..2}\nrows 1..1 slots up to 4\n");
  const std::vector<std::int32_t> row{1, 2, 7, 3};
  EXPECT_EQ(plan_text({{row, row, row, row}, 4, 9, {{-5, 3, 3, 3}}}, 16),
            "rows 0..3 union of 3 keys: 0 {} 1 {1 2 7} 2 {1 2 7} 3 {1 2 7}\n");
}

TEST_P(PlanTest, RangesAreFoundForSingleRows) {
  EXPECT_EQ(plan_text({{{3}, {3, 4, 5}, {3, 5}, {3, 5, 4}, {}}, 3, 9, {}}, 64),
            "rows 0..0 range 3..3: 0 {3..3}\n"
            "rows 1..1 range 3..5: 1 {3..5}\n"
            "rows 2..2 slots up to 2\n"
            "rows 3..3 slots up to 3\n"
            "rows 4..4 slots up to 0\n");
}

// First and last key and their number say "range", the keys between do not.
TEST_P(PlanTest, RowThatOnlyLooksLikeARange) {
  for (const std::int64_t heads : {8, 64}) {
    EXPECT_EQ(plan_text({{{3, 3, 5, 6}}, 4, 9, {}}, heads), "rows 0..0 slots up to 4\n");
    EXPECT_EQ(plan_text({{{3, -1, 5, 6}}, 4, 9, {}}, heads), "rows 0..0 slots up to 4\n");
  }
}

TEST_P(PlanTest, LastGroupMayBeShort) {
  for (std::int64_t t_q = 1; t_q <= 9; ++t_q) {
    Selection selection{{}, 40, 1000, {}};
    for (std::int64_t t = 0; t < t_q; ++t) {
      selection.rows.push_back(range(7, 40));
      selection.rows.back().back() = 900;
    }
    expect_rules(selection);
  }
}

TEST_P(PlanTest, NoRowsAreAPlanWithoutItems) {
  for (const std::int64_t heads : kHeads) EXPECT_EQ(plan_text({{}, 5, 9, {}}, heads), "");
}

TEST_P(PlanTest, NoKeysAreRowsWithoutKeys) {
  EXPECT_EQ(plan_text({{{0, 1}, {2}}, 2, 0, {}}, 8),
            "rows 0..0 slots up to 0\nrows 1..1 slots up to 0\n");
}

TEST_P(PlanTest, FollowsTheRulesOnSelectionsOfEverySort) {
  std::string all;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    const auto i = static_cast<std::int64_t>(seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Selection selection =
        mixed_selection(1 + i * 7 % 45, 1 + i * 13 % 67, 1 + i * i % 190, seed);
    expect_rules(selection);
    all += expected_text(selection, 8);
  }
  for (const char* kind : {"union of", "range", "slots up to"}) {  // the selections have them all
    EXPECT_NE(all.find(kind), std::string::npos) << kind;
  }
}

TEST_P(PlanTest, FollowsTheRulesOnWideRows) {
  for (const std::int64_t topk : {511, 1024, 2047, 2048}) {
    SCOPED_TRACE(topk);
    expect_rules(drifting_selection(11, topk, 4 * topk, 71));
    expect_rules(mixed_selection(19, topk, 3000, 72));
  }
}

// A window of the device's builder holds 32768 keys.
TEST_P(PlanTest, FollowsTheRulesOnKeysFarApart) {
  expect_rules(drifting_selection(9, 1500, 100000, 73));
  Selection selection = drifting_selection(8, 64, 2147483646, 74);
  for (auto& row : selection.rows) row.front() = 0, row.back() = 2147483645;
  for (auto& row : selection.rows) {  // two clusters with nothing between them
    for (std::size_t i = 1; i + 1 < row.size(); ++i) {
      row[i] = static_cast<std::int32_t>(i < 32 ? 1000 + i : 40000 + i);
    }
    row.back() = 70000;
  }
  selection.rows[3].back() = 69999;
  expect_rules(selection);
}

TEST_P(PlanTest, StridedAndUnalignedIndicesGiveTheSame) {
  for (const std::int64_t topk : {64, 67}) {
    const Selection selection = drifting_selection(13, topk, 300, 75);
    const HostTensor indices = selection.indices();
    for (const std::int64_t heads : {8, 64}) {
      const std::string want = plan_text(selection, heads);
      for (const HostTensor& other :
           {indices.with_strides({topk + 4, topk, 1}), indices.with_strides({topk + 1, 1, 1}),
            indices.with_unaligned_memory()}) {
        EXPECT_EQ(text(run_placed(SelectionPlanArgs{other, {}, selection.t_k, heads}, runtime())),
                  want);
      }
    }
  }
}

TEST_P(PlanTest, AgainGivesTheSameBits) {
  const Selection selection = mixed_selection(70, 130, 400, 76);
  for (const std::int64_t heads : {8, 16, 32, 64}) {
    const SelectionPlan first = plan_of(selection, heads, runtime());
    const selection::PlanView want = view_of(first);
    for (int turn = 0; turn < 3; ++turn) {
      const SelectionPlan again = plan_of(selection, heads, runtime());
      EXPECT_EQ(text(again), text(first));
      const selection::PlanView got = view_of(again);
      ASSERT_EQ(*got.item_count, *want.item_count);
      EXPECT_EQ(std::memcmp(got.items, want.items,
                            static_cast<std::size_t>(*want.item_count) * sizeof(*want.items)),
                0);
    }
  }
}

TEST_P(PlanTest, SaysWhatItWasBuiltFor) {
  const Selection selection = drifting_selection(13, 33, 90, 77);
  for (std::size_t i = 0; i < std::size(kHeads); ++i) {
    const SelectionPlan plan = plan_of(selection, kHeads[i], runtime());
    EXPECT_EQ(plan.query_rows, 13);
    EXPECT_EQ(plan.topk, 33);
    EXPECT_EQ(plan.total_key_tokens, 90);
    EXPECT_EQ(plan.group, kGroups[i]);
    const auto rounded = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    std::size_t bytes = rounded(4) + rounded(13 * 32) + 2 * rounded(13 * 4);
    if (plan.group > 1) {
      bytes += rounded(13 * 33 * 4) + rounded(13 * static_cast<std::size_t>(plan.group) * 2 * 4);
    }
    EXPECT_EQ(plan.bytes(), bytes);
  }
}

TEST_P(PlanTest, CheckingModeNamesTheRow) {
  Runtime checking = runtime();
  checking.check = true;
  const Selection outside{{{0, 1}, {2, 5}}, 2, 5, {}}, length{{{0, 1}, {2, 4}}, 2, 5, {{2, 3}}};
  expect_error([&] { plan_of(outside, 8, checking); }, ErrorCode::kData,
               "build_selection_plan: topk_indices row 1 must hold -1..4 in slot 1, got 5");
  expect_error([&] { plan_of(length, 8, checking); }, ErrorCode::kData,
               "build_selection_plan: topk_length row 1 must hold 0..2, got 3");
}

// Two rows of three slots, every refusal changes one thing.
struct GoodCall {
  HostTensor indices = Selection{{{0, 1, 2}, {1, 2}}, 3, 5, {}}.indices();
  HostTensor lengths = *Selection{{{}, {}}, 3, 5, {{3, 2}}}.topk_length();

  SelectionPlanArgs args() const { return {indices, lengths.view(), 5, 8}; }
};

void expect_refused(const SelectionPlanArgs& args, ErrorCode code, const std::string& sentence,
                    const Runtime& runtime = {}) {
  expect_error([&] { build_selection_plan(args, runtime); }, code,
               "build_selection_plan: " + sentence);
}

TEST(PlanRefusals, TheCallThatTheyChangeIsGood) {
  const GoodCall call;
  EXPECT_EQ(build_selection_plan(call.args()).query_rows, 2);
}

TEST(PlanRefusals, Indices) {
  const GoodCall call;
  SelectionPlanArgs args = call.args();
  args.topk_indices.dtype = DType::kInt64;
  const std::string want =
      "topk_indices must be int32 [T_q, 1, K] with T_q in 0..2147483646, K in 1..2048, got ";
  expect_refused(args, ErrorCode::kType, want + "int64 [2, 1, 3]");
  args.topk_indices = TensorView::contiguous(args.topk_indices.data, DType::kInt32, {2, 3});
  expect_refused(args, ErrorCode::kValue, want + "int32 [2, 3]");
  args.topk_indices = TensorView::contiguous(args.topk_indices.data, DType::kInt32, {1, 1, 2049});
  expect_refused(args, ErrorCode::kValue, want + "int32 [1, 1, 2049]");
  args = call.args();
  args.topk_indices.strides = {3, 3, 2};
  expect_refused(args, ErrorCode::kValue,
                 "topk_indices must be contiguous in its last axis and have no negative stride, "
                 "got int32 [2, 1, 3] with strides [3, 3, 2]");
}

TEST(PlanRefusals, Lengths) {
  const GoodCall call;
  SelectionPlanArgs args = call.args();
  args.topk_length->shape[0] = 1;
  expect_refused(args, ErrorCode::kValue, "topk_length must be int32 [T_q] = [2], got int32 [1]");
  args = call.args();
  args.topk_length->device = {DeviceKind::kCuda, 0};
  expect_refused(args, ErrorCode::kValue,
                 "topk_length must be on cpu as topk_indices is, got cuda:0");
}

TEST(PlanRefusals, Numbers) {
  const GoodCall call;
  for (const std::int64_t heads : {0, 129}) {
    SelectionPlanArgs args = call.args();
    args.heads = heads;
    expect_refused(args, ErrorCode::kValue,
                   "heads must be in 1..128, got " + std::to_string(heads));
  }
  for (const std::int64_t keys : {std::int64_t{-1}, std::int64_t{2147483647}}) {
    SelectionPlanArgs args = call.args();
    args.total_key_tokens = keys;
    expect_refused(args, ErrorCode::kValue,
                   "total_key_tokens must be in 0..2147483646, got " + std::to_string(keys));
  }
}

TEST(PlanRefusals, HostTensorsOnAGpuBackend) {
  Runtime runtime;
  runtime.backend = Backend::kSm90;
  expect_refused(GoodCall().args(), ErrorCode::kUnavailable,
                 std::string("no backend takes this call with backend sm90 (") +
                     (kBuildHasCuda ? "sm90: the tensors are not on a CUDA device"
                                    : "not part of this build") +
                     ")",
                 runtime);
}

}  // namespace
}  // namespace flashdsa::test
