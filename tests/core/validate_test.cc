// The sentences of the validator, word for word, and which tensors it lets pass.

#include "core/validate.h"

#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

#include "core/check_data.h"
#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

using core::ArgSpec;
using core::Dim;
using core::Layout;
using core::Role;
using core::Validator;

const Dim kRows{"T_q", 0, 1000};
const Dim kTopk{"K", 1, 2048};
const Dim kHeadDim{"D", 512, 576, 64};

std::array<std::int32_t, 4096> memory;  // what the views point to; nothing reads or writes it

TensorView view_of(DType dtype, std::initializer_list<std::int64_t> shape, std::size_t offset = 0) {
  return TensorView::contiguous(memory.data() + offset, dtype, shape);
}

TensorView with_strides(TensorView view, std::initializer_list<std::int64_t> strides) {
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

// A validator that has bound T_q to 8.
Validator with_rows_bound() {
  static const TensorView rows = view_of(DType::kInt32, {8});
  Validator validator("op");
  validator.check({"starts", &rows, {DType::kInt32}, {kRows}});
  return validator;
}

void expect_refusal(Validator validator, const ArgSpec& spec, ErrorCode code,
                    const std::string& sentence) {
  expect_error([&] { validator.check(spec); }, code, sentence);
}

TEST(Validator, NamesTheDtype) {
  const TensorView view = view_of(DType::kInt64, {8});
  expect_refusal(Validator("op"), {"lengths", &view, {DType::kInt32}, {8}}, ErrorCode::kType,
                 "op: lengths must be int32 [8], got int64 [8]");
}

TEST(Validator, ListsTheDtypesToChooseFrom) {
  const TensorView view = view_of(DType::kFloat16, {8});
  expect_refusal(Validator("op"), {"head_weights", &view, {DType::kFloat32, DType::kBFloat16}, {8}},
                 ErrorCode::kType,
                 "op: head_weights must be float32 or bfloat16 [8], got float16 [8]");
}

TEST(Validator, EveryListedDtypePasses) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const TensorView view = view_of(dtype, {8});
    Validator("op").check({"w", &view, {DType::kFloat32, DType::kBFloat16}, {8}});
  }
}

TEST(Validator, NamesTheRank) {
  const TensorView view = view_of(DType::kInt32, {8, 3});
  expect_refusal(Validator("op"), {"topk_indices", &view, {DType::kInt32}, {kRows, 1, kTopk}},
                 ErrorCode::kValue,
                 "op: topk_indices must be int32 [T_q, 1, K] with T_q in 0..1000, K in 1..2048, "
                 "got int32 [8, 3]");
}

TEST(Validator, SizeMismatchShowsSymbolsAndBoundValues) {
  const TensorView view = view_of(DType::kInt32, {7});
  expect_refusal(with_rows_bound(), {"lengths", &view, {DType::kInt32}, {kRows}}, ErrorCode::kValue,
                 "op: lengths must be int32 [T_q] = [8], got int32 [7]");
}

TEST(Validator, MixesFixedBoundAndFreeSizes) {
  const TensorView view = view_of(DType::kInt32, {8, 2, 4});
  expect_refusal(with_rows_bound(), {"topk_indices", &view, {DType::kInt32}, {kRows, 1, kTopk}},
                 ErrorCode::kValue,
                 "op: topk_indices must be int32 [T_q, 1, K] = [8, 1, K] with K in 1..2048, got "
                 "int32 [8, 2, 4]");
}

TEST(Validator, DtypeSentenceShowsBoundValuesToo) {
  Validator validator = with_rows_bound();
  const TensorView width = view_of(DType::kInt32, {8, 3});
  validator.check({"scores", &width, {DType::kInt32}, {kRows, kTopk}});
  const TensorView view = view_of(DType::kInt64, {8, 2048});
  expect_refusal(validator, {"topk_indices", &view, {DType::kInt32}, {kRows, 1, kTopk}},
                 ErrorCode::kType,
                 "op: topk_indices must be int32 [T_q, 1, K] = [8, 1, 3], got int64 [8, 2048]");
}

TEST(Validator, RangeHoldsAtBothEnds) {
  for (const std::int64_t size : {0, 1, 2048, 2049}) {
    const TensorView view = view_of(DType::kInt32, {size});
    const ArgSpec spec{"slots", &view, {DType::kInt32}, {kTopk}};
    if (size >= 1 && size <= 2048) {
      Validator validator("op");
      validator.check(spec);
      EXPECT_EQ(validator.size("K"), size);
    } else {
      expect_refusal(Validator("op"), spec, ErrorCode::kValue,
                     "op: slots must be int32 [K] with K in 1..2048, got int32 [" +
                         std::to_string(size) + "]");
    }
  }
}

TEST(Validator, SteppedSizeIsOneOfTwo) {
  for (const std::int64_t size : {512, 576}) {
    const TensorView view = view_of(DType::kInt32, {size});
    Validator("op").check({"q", &view, {DType::kInt32}, {kHeadDim}});
  }
  for (const std::int64_t size : {448, 544, 575, 640}) {
    const TensorView view = view_of(DType::kInt32, {size});
    expect_refusal(
        Validator("op"), {"q", &view, {DType::kInt32}, {kHeadDim}}, ErrorCode::kValue,
        "op: q must be int32 [D] with D 512 or 576, got int32 [" + std::to_string(size) + "]");
  }
}

TEST(Validator, RefusedTensorBindsNothing) {
  Validator validator("op");
  const TensorView wrong = view_of(DType::kInt32, {9, 3000});
  expect_refusal(validator, {"a", &wrong, {DType::kInt32}, {kRows, kTopk}}, ErrorCode::kValue,
                 "op: a must be int32 [T_q, K] with T_q in 0..1000, K in 1..2048, got int32 [9, "
                 "3000]");
  EXPECT_THROW(validator.check({"a", &wrong, {DType::kInt32}, {kRows, kTopk}}), Error);
  const TensorView right = view_of(DType::kInt32, {5});
  validator.check({"b", &right, {DType::kInt32}, {kRows}});
  EXPECT_EQ(validator.size("T_q"), 5);
}

TEST(Validator, ContiguousArgumentMayHaveNoGaps) {
  const TensorView view = with_strides(view_of(DType::kInt32, {2, 3}), {4, 1});
  expect_refusal(Validator("op"), {"out", &view, {DType::kInt32}, {2, 3}}, ErrorCode::kValue,
                 "op: out must be contiguous, got int32 [2, 3] with strides [4, 1]");
}

TEST(Validator, InnerContiguousArgumentMayHaveAnyOuterStrides) {
  const ArgSpec spec{"q", nullptr, {DType::kInt32}, {2, 3, 4}, Layout::kInnerContiguous};
  for (const auto& strides : {std::initializer_list<std::int64_t>{12, 4, 1},
                              std::initializer_list<std::int64_t>{4, 8, 1},     // heads first
                              std::initializer_list<std::int64_t>{100, 7, 1},   // gaps
                              std::initializer_list<std::int64_t>{0, 0, 1}}) {  // broadcast
    const TensorView view = with_strides(view_of(DType::kInt32, {2, 3, 4}), strides);
    ArgSpec strided = spec;
    strided.tensor = &view;
    Validator("op").check(strided);
  }
}

TEST(Validator, InnerContiguousArgumentRefusesOtherInnerAndNegativeStrides) {
  const TensorView gaps = with_strides(view_of(DType::kInt32, {2, 3}), {6, 2});
  expect_refusal(Validator("op"), {"q", &gaps, {DType::kInt32}, {2, 3}, Layout::kInnerContiguous},
                 ErrorCode::kValue,
                 "op: q must be contiguous in its last axis and have no negative stride, got int32 "
                 "[2, 3] with strides [6, 2]");
  const TensorView reversed = with_strides(view_of(DType::kInt32, {2, 3}), {-3, 1});
  expect_refusal(Validator("op"),
                 {"q", &reversed, {DType::kInt32}, {2, 3}, Layout::kInnerContiguous},
                 ErrorCode::kValue,
                 "op: q must be contiguous in its last axis and have no negative stride, got int32 "
                 "[2, 3] with strides [-3, 1]");
}

TEST(Validator, StridesOfSizeOneAndEmptyTensorsDoNotMatter) {
  for (const Layout layout : {Layout::kContiguous, Layout::kInnerContiguous}) {
    const TensorView one = with_strides(view_of(DType::kInt32, {1, 1}), {-9, 5});
    Validator("op").check({"q", &one, {DType::kInt32}, {1, 1}, layout});
    const TensorView empty = with_strides(view_of(DType::kInt32, {0, 3}), {-9, 5});
    Validator("op").check({"q", &empty, {DType::kInt32}, {0, 3}, layout});
  }
}

TEST(Validator, NamesTheDeviceAndWhoSetIt) {
  TensorView view = view_of(DType::kInt32, {8});
  view.device = {DeviceKind::kCuda, 1};
  expect_refusal(with_rows_bound(), {"lengths", &view, {DType::kInt32}, {kRows}}, ErrorCode::kValue,
                 "op: lengths must be on cpu as starts is, got cuda:1");
}

TEST(Validator, TwoDevicesOfOneKindDiffer) {
  TensorView first = view_of(DType::kInt32, {8}), second = first;
  first.device = {DeviceKind::kCuda, 0};
  second.device = {DeviceKind::kCuda, 1};
  Validator validator("op");
  validator.check({"q", &first, {DType::kInt32}, {kRows}});
  expect_refusal(validator, {"kv", &second, {DType::kInt32}, {kRows}}, ErrorCode::kValue,
                 "op: kv must be on cuda:0 as q is, got cuda:1");
}

TEST(Validator, NullPointerNeedsAnEmptyTensor) {
  const TensorView view = TensorView::contiguous(nullptr, DType::kInt32, {2, 3});
  expect_refusal(Validator("op"), {"kv", &view, {DType::kInt32}, {2, 3}}, ErrorCode::kValue,
                 "op: kv must point to 6 elements, got a null pointer");
  const TensorView empty = TensorView::contiguous(nullptr, DType::kInt32, {0, 3});
  Validator("op").check({"kv", &empty, {DType::kInt32}, {0, 3}});
}

TEST(Validator, AbsentArgumentPassesAndBindsNothing) {
  Validator validator("op");
  validator.check({"attn_sink", nullptr, {DType::kFloat32}, {kRows}});
  const TensorView view = view_of(DType::kInt32, {6});
  validator.check({"lengths", &view, {DType::kInt32}, {kRows}});
  EXPECT_EQ(validator.size("T_q"), 6);
}

TEST(Validator, ChecksTheTableInItsOrder) {
  const TensorView first = view_of(DType::kInt32, {6}), second = view_of(DType::kInt32, {7});
  const auto check = [&] {
    Validator("op").check({{"a", &first, {DType::kInt32}, {kRows}},
                           {"b", &second, {DType::kInt32}, {kRows}},
                           {"c", &second, {DType::kInt64}, {kRows}}});
  };
  expect_error(check, ErrorCode::kValue, "op: b must be int32 [T_q] = [6], got int32 [7]");
}

TEST(Validator, RefuseNamesTheOperation) {
  expect_error([] { Validator("op").refuse("scale must be positive, got 0"); }, ErrorCode::kValue,
               "op: scale must be positive, got 0");
}

TEST(Validator, UnboundSymbolIsABrokenInvariantWithFileAndLine) {
  try {
    Validator("op").size("T_q");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    const std::string sentence = error.what();
    const std::size_t file = sentence.find("core/validate.cc:");
    ASSERT_NE(file, std::string::npos) << sentence;
    int line = 0, length = 0;
    std::sscanf(sentence.c_str() + file, "core/validate.cc:%d:%n", &line, &length);
    EXPECT_GT(line, 0) << sentence;
    EXPECT_EQ(sentence.substr(file + static_cast<std::size_t>(length)),
              " op asked for the unbound size T_q");
  }
}

// An output and an input of 8 elements each, `distance` elements apart.
void check_distance(std::size_t distance, std::string_view output = {},
                    std::string_view input = {}) {
  const TensorView in = view_of(DType::kInt32, {8}, 100);
  const TensorView out = view_of(DType::kInt32, {8}, 100 + distance);
  Validator validator("op");
  validator.check({{"in", &in, {DType::kInt32}, {8}},
                   {"out", &out, {DType::kInt32}, {8}, Layout::kContiguous, Role::kOutput}});
  validator.check_outputs_disjoint(output, input);
}

TEST(Overlap, OutputMayTouchButNotOverlapAnInput) {
  check_distance(8);
  check_distance(static_cast<std::size_t>(-8));
  for (const int distance : {-7, -1, 0, 1, 7}) {
    expect_error([&] { check_distance(static_cast<std::size_t>(distance)); }, ErrorCode::kValue,
                 "op: out must not overlap in, got memory that both use");
  }
}

TEST(Overlap, NamedPairMayBeTheSameMemoryExactly) {
  check_distance(0, "out", "in");
  for (const int distance : {-7, -1, 1, 7}) {
    expect_error([&] { check_distance(static_cast<std::size_t>(distance), "out", "in"); },
                 ErrorCode::kValue, "op: out must not overlap in, got memory that both use");
  }
}

TEST(Overlap, AnotherPairMayNot) {
  for (const auto& [output, input] : {std::pair("out", "other"), std::pair("other", "in")}) {
    expect_error([&] { check_distance(0, output, input); }, ErrorCode::kValue,
                 "op: out must not overlap in, got memory that both use");
  }
}

TEST(Overlap, OutputsMayNotOverlapEachOther) {
  const TensorView out = view_of(DType::kInt32, {8}), lse = view_of(DType::kInt32, {8}, 7);
  Validator validator("op");
  validator.check({{"out", &out, {DType::kInt32}, {8}, Layout::kContiguous, Role::kOutput},
                   {"lse", &lse, {DType::kInt32}, {8}, Layout::kContiguous, Role::kOutput}});
  expect_error([&] { validator.check_outputs_disjoint(); }, ErrorCode::kValue,
               "op: out must not overlap lse, got memory that both use");
}

TEST(Overlap, InputsMayOverlap) {
  const TensorView q = view_of(DType::kInt32, {8}), kv = view_of(DType::kInt32, {8}, 4);
  Validator validator("op");
  validator.check({{"q", &q, {DType::kInt32}, {8}}, {"kv", &kv, {DType::kInt32}, {8}}});
  validator.check_outputs_disjoint();
}

TEST(Overlap, StridedInputReachesToItsLastElement) {
  const TensorView in = with_strides(view_of(DType::kInt32, {3, 2}), {10, 1});  // 0 .. 21
  for (const std::size_t offset : {21u, 22u}) {
    const TensorView out = view_of(DType::kInt32, {4}, offset);
    Validator validator("op");
    validator.check({{"in", &in, {DType::kInt32}, {3, 2}, Layout::kInnerContiguous},
                     {"out", &out, {DType::kInt32}, {4}, Layout::kContiguous, Role::kOutput}});
    if (offset == 22) {
      validator.check_outputs_disjoint();
    } else {
      expect_error([&] { validator.check_outputs_disjoint(); }, ErrorCode::kValue,
                   "op: out must not overlap in, got memory that both use");
    }
  }
}

TEST(Overlap, TensorWithoutElementsOverlapsNothing) {
  const TensorView in = view_of(DType::kInt32, {8});
  const TensorView inside = view_of(DType::kInt32, {0}, 4);
  const TensorView out = view_of(DType::kInt32, {8}, 8);
  const TensorView inside_out = view_of(DType::kInt32, {0}, 12);
  Validator validator("op");
  validator.check({{"in", &in, {DType::kInt32}, {8}},
                   {"inside_out", &inside_out, {DType::kInt32}, {0}},
                   {"inside", &inside, {DType::kInt32}, {0}, Layout::kContiguous, Role::kOutput},
                   {"out", &out, {DType::kInt32}, {8}, Layout::kContiguous, Role::kOutput}});
  validator.check_outputs_disjoint();
}

TEST(OptionalView, IsNullWithoutATensor) {
  EXPECT_EQ(core::optional_view(std::nullopt), nullptr);
  const std::optional<TensorView> view = view_of(DType::kInt32, {1});
  EXPECT_EQ(core::optional_view(view), &*view);
}

TEST(CheckData, NamesTensorRowExpectationAndValue) {
  expect_error(
      [] {
        core::check_data(false, "op", "topk_length", 3, [] { return std::string("0..7"); }, 8);
      },
      ErrorCode::kData, "op: topk_length row 3 must hold 0..7, got 8");
}

TEST(CheckData, FormatsNothingWhenTheDataIsGood) {
  core::check_data(
      true, "op", "topk_length", 3,
      []() -> std::string { throw std::logic_error("must not be called"); }, 8);
}

}  // namespace
}  // namespace flashdsa::test
