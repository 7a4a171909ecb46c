// Canonical index rows (SPEC section 4): values worked by hand, laws, hostile indices.

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <vector>

#include "core/device.h"
#include "flashdsa/selection.h"
#include "tests/support/compare.h"
#include "tests/support/engines.h"
#include "tests/support/expect_error.h"
#include "tests/support/host_tensor.h"
#include "tests/support/mapped_memory.h"
#include "tests/support/placement.h"
#include "tests/support/property.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kMostKeys = 2147483646;

using Row = std::vector<std::int32_t>;
using Rows = std::vector<Row>;

HostTensor tensor_of(const Rows& rows, std::int64_t width) {
  HostTensor tensor(DType::kInt32, {static_cast<std::int64_t>(rows.size()), width});
  std::int64_t place = 0;
  for (const Row& row : rows) {
    for (const std::int32_t index : row) tensor.set(place++, index);
  }
  return tensor;
}

Row numbers_of(const HostTensor& tensor) {
  Row result;
  for (const double value : tensor.values()) result.push_back(static_cast<std::int32_t>(value));
  return result;
}

struct Canonical {
  HostTensor sorted_indices;
  HostTensor lengths;
};

// A call whose outputs lie between guard bands and hold sentinels before it.
Canonical canonical(const HostTensor& indices, std::int64_t key_count, const Runtime& runtime) {
  Canonical result{HostTensor(DType::kInt32, indices.shape()),
                   HostTensor(DType::kInt32, {indices.size(0)})};
  run_placed(CompactAndSortArgs{indices, key_count, result.sorted_indices, result.lengths},
             runtime);
  EXPECT_TRUE(result.sorted_indices.bands_intact());
  EXPECT_TRUE(result.lengths.bands_intact());
  EXPECT_TRUE(indices.bands_intact());
  return result;
}

void expect_same(const Canonical& got, const Canonical& want) {
  EXPECT_TRUE(same_bits(got.sorted_indices, want.sorted_indices));
  EXPECT_TRUE(same_bits(got.lengths, want.lengths));
}

// Rows of valid, too large, negative and repeated indices.
HostTensor random_indices(std::int64_t rows, std::int64_t width, std::int64_t key_count,
                          std::uint64_t seed) {
  Random random(seed);
  HostTensor indices(DType::kInt32, {rows, width});
  random.fill_integers(indices, -key_count / 3, key_count + key_count / 3);
  return indices;
}

class CompactAndSort : public EngineTest {
 protected:
  // One row in, one row out.
  void expect_row(const Row& slots, std::int64_t key_count, const Row& want,
                  std::int32_t want_length) const {
    const auto width = static_cast<std::int64_t>(slots.size());
    const Canonical got = canonical(tensor_of({slots}, width), key_count, runtime());
    EXPECT_EQ(numbers_of(got.sorted_indices), want);
    EXPECT_EQ(numbers_of(got.lengths), Row{want_length});
  }
};

INSTANTIATE_TEST_SUITE_P(Every, CompactAndSort, ::testing::ValuesIn(backend_engines()),
                         engine_name);

class CompactAndSortOnHost : public CompactAndSort {};
INSTANTIATE_TEST_SUITE_P(Every, CompactAndSortOnHost,
                         ::testing::Values(Engine{Backend::kReference}, Engine{Backend::kCpu}),
                         engine_name);

TEST_P(CompactAndSort, SortsAndFillsUp) {
  expect_row({5, -1, 2, 9, -1, 0}, 10, {0, 2, 5, 9, -1, -1}, 4);
}

TEST_P(CompactAndSort, RowThatIsCanonicalStaysAsItIs) {
  expect_row({0, 2, 5, 9, -1, -1}, 10, {0, 2, 5, 9, -1, -1}, 4);
  expect_row({3, 4, 5}, 10, {3, 4, 5}, 3);
}

TEST_P(CompactAndSort, HolesInAnAscendingRowAreClosed) {
  expect_row({-1, 1, -1, 3, 12, 5}, 10, {1, 3, 5, -1, -1, -1}, 3);
}

TEST_P(CompactAndSort, DescendingRowIsReversed) { expect_row({7, 6, 4, 1}, 8, {1, 4, 6, 7}, 4); }

TEST_P(CompactAndSort, OnlyTheLastSlotIsOutOfOrder) {
  expect_row({1, 2, 3, 0}, 8, {0, 1, 2, 3}, 4);
}

TEST_P(CompactAndSort, DuplicatesAreKept) {
  expect_row({4, 2, 4, -1, 4, 2}, 5, {2, 2, 4, 4, 4, -1}, 5);
  expect_row({3, 3, 3}, 5, {3, 3, 3}, 3);
}

TEST_P(CompactAndSort, BoundsOfTheStorage) {
  expect_row({10, 9, 0, -1, 11, -2}, 10, {0, 9, -1, -1, -1, -1}, 2);
}

TEST_P(CompactAndSort, HostileIndicesAreNotValid) {
  expect_row({kLowest, 3, kHighest, kLowest + 1, kHighest - 1, 10, -10}, 10,
             {3, -1, -1, -1, -1, -1, -1}, 1);
  expect_row({kLowest, kHighest}, 10, {-1, -1}, 0);
}

TEST_P(CompactAndSort, LargestStorageTakesEveryIndexButTheLast) {
  expect_row({kHighest, kHighest - 1, kHighest - 2, kLowest, 0}, kMostKeys,
             {0, kHighest - 2, -1, -1, -1}, 2);
}

TEST_P(CompactAndSort, WithoutKeysNothingIsValid) {
  expect_row({0, 1, -1, kHighest}, 0, {-1, -1, -1, -1}, 0);
}

TEST_P(CompactAndSort, OneSlot) {
  expect_row({4}, 5, {4}, 1);
  expect_row({5}, 5, {-1}, 0);
  expect_row({-1}, 5, {-1}, 0);
  const Canonical got = canonical(tensor_of({{3}, {-7}, {0}}, 1), 5, runtime());
  EXPECT_EQ(numbers_of(got.sorted_indices), (Row{3, -1, 0}));
  EXPECT_EQ(numbers_of(got.lengths), (Row{1, 0, 1}));
}

TEST_P(CompactAndSort, WidestRow) {
  Row slots, want;
  for (std::int32_t i = 0; i < 2048; ++i) slots.push_back((i * 1237) % 2048);  // a permutation
  for (std::int32_t i = 0; i < 2048; ++i) want.push_back(i);
  expect_row(slots, 2048, want, 2048);
}

TEST_P(CompactAndSort, NoRowsAreAValidCall) {
  const Canonical got = canonical(HostTensor(DType::kInt32, {0, 7}), 5, runtime());
  EXPECT_EQ(got.lengths.elements(), 0);
  run_placed(CompactAndSortArgs{TensorView::contiguous(nullptr, DType::kInt32, {0, 7}), 5,
                                TensorView::contiguous(nullptr, DType::kInt32, {0, 7}),
                                TensorView::contiguous(nullptr, DType::kInt32, {0})},
             runtime());
}

TEST_P(CompactAndSort, RowsDoNotMix) {
  const Canonical got = canonical(tensor_of({{2, 1}, {-1, -1}, {0, 9}, {1, 1}}, 2), 5, runtime());
  EXPECT_EQ(numbers_of(got.sorted_indices), (Row{1, 2, -1, -1, 0, -1, 1, 1}));
  EXPECT_EQ(numbers_of(got.lengths), (Row{2, 0, 1, 2}));
}

TEST_P(CompactAndSort, RowAloneIsTheRowInTheBatch) {
  const HostTensor indices = random_indices(35, 19, 40, 2);
  const Canonical together = canonical(indices, 40, runtime());
  for (std::int64_t t = 0; t < 35; ++t) {
    const Canonical alone = canonical(indices.rows(t, 1), 40, runtime());
    expect_same(alone, {together.sorted_indices.rows(t, 1), together.lengths.rows(t, 1)});
  }
}

TEST_P(CompactAndSort, AgainGivesTheSame) {
  const Canonical once = canonical(random_indices(33, 64, 50, 3), 50, runtime());
  expect_same(canonical(once.sorted_indices, 50, runtime()), once);
}

TEST_P(CompactAndSort, InPlaceGivesTheSame) {
  for (const std::int64_t rows : {1, 15, 16, 17, 50}) {
    const HostTensor indices = random_indices(rows, 33, 40, 4);
    const Canonical want = canonical(indices, 40, runtime());
    Canonical got{indices, HostTensor(DType::kInt32, {rows})};
    run_placed(CompactAndSortArgs{got.sorted_indices, 40, got.sorted_indices, got.lengths},
               runtime());
    expect_same(got, want);
    EXPECT_TRUE(got.sorted_indices.bands_intact());
  }
}

TEST_P(CompactAndSort, InputIsNotWritten) {
  const HostTensor indices = random_indices(20, 9, 12, 5);
  const HostTensor before = indices;
  canonical(indices, 12, runtime());
  EXPECT_TRUE(same_bits(indices, before));
}

TEST_P(CompactAndSort, StridedRowsGiveTheSame) {
  const HostTensor indices = random_indices(21, 13, 30, 6);
  const Canonical want = canonical(indices, 30, runtime());
  expect_same(canonical(indices.with_strides({29, 1}), 30, runtime()), want);
  expect_same(canonical(indices.with_unaligned_memory(), 30, runtime()), want);
}

TEST_P(CompactAndSort, OneRowMayStandForAll) {
  const HostTensor row = tensor_of({{4, -1, 2}}, 3);
  TensorView indices = row;
  indices.shape[0] = 40;
  indices.strides[0] = 0;
  HostTensor sorted_indices(DType::kInt32, {40, 3}), lengths(DType::kInt32, {40});
  run_placed(CompactAndSortArgs{indices, 5, sorted_indices, lengths}, runtime());
  for (std::int64_t t = 0; t < 40; ++t) {
    EXPECT_EQ(numbers_of(sorted_indices.rows(t, 1)), (Row{2, 4, -1}));
    EXPECT_EQ(lengths.get({t}), 2);
  }
}

TEST_P(CompactAndSort, NothingOutsideTheRowsIsRead) {
  for (const std::int64_t width : {1, 3, 7, 8, 9, 64}) {
    const HostTensor indices = random_indices(5, width, 20, 7);
    const PageGuardedTensor guarded(indices);
    HostTensor sorted_indices(DType::kInt32, {5, width}), lengths(DType::kInt32, {5});
    run_placed(CompactAndSortArgs{guarded, 20, sorted_indices, lengths}, runtime());
    expect_same({sorted_indices, lengths}, canonical(indices, 20, runtime()));
  }
}

TEST_P(CompactAndSortOnHost, AnyThreadCountGivesTheSame) {
  const HostTensor indices = random_indices(100, 50, 60, 8);
  const Canonical want = canonical(indices, 60, runtime());
  for (const int threads : {1, 2, 3, 8, 64}) {
    Runtime with_threads = runtime();
    with_threads.threads = threads;
    expect_same(canonical(indices, 60, with_threads), want);
  }
}

TEST_P(CompactAndSort, IsTheSortedFilteredRow) {
  const Runtime on = runtime();
  check_property(2000, 9, [&] {
    const auto width = *rc::gen::inRange<std::size_t>(1, 40);
    const auto key_count = *rc::gen::inRange(0, 30);
    const auto rows = *rc::gen::container<Rows>(
        *rc::gen::inRange<std::size_t>(0, 40),
        rc::gen::container<Row>(width, rc::gen::weightedOneOf<std::int32_t>(
                                           {{8, rc::gen::inRange(-3, 33)},
                                            {1, rc::gen::element(kLowest, kHighest, -1)}})));
    const Canonical got =
        canonical(tensor_of(rows, static_cast<std::int64_t>(width)), key_count, on);
    Row want, lengths;
    for (Row row : rows) {
      std::erase_if(row, [&](std::int32_t i) { return i < 0 || i >= key_count; });
      std::sort(row.begin(), row.end());
      lengths.push_back(static_cast<std::int32_t>(row.size()));
      row.resize(width, -1);
      want.insert(want.end(), row.begin(), row.end());
    }
    RC_ASSERT(numbers_of(got.sorted_indices) == want);
    RC_ASSERT(numbers_of(got.lengths) == lengths);
  });
}

TEST_P(CompactAndSort, CheckingModeNamesTheRowAndTheSlot) {
  Runtime checking = runtime();
  checking.check = true;
  const auto expect = [&](std::int32_t index, std::int64_t key_count, const std::string& sentence) {
    const HostTensor indices = tensor_of({{0, -1, 0}, {0, 0, index}}, 3);
    HostTensor sorted_indices(DType::kInt32, {2, 3}), lengths(DType::kInt32, {2});
    expect_error(
        [&] {
          run_placed(CompactAndSortArgs{indices, key_count, sorted_indices, lengths}, checking);
        },
        ErrorCode::kData, "compact_and_sort: indices row 1 must hold " + sentence);
    EXPECT_TRUE(sorted_indices.untouched());
    EXPECT_TRUE(lengths.untouched());
  };
  expect(5, 5, "-1..4 in slot 2, got 5");
  expect(-2, 5, "-1..4 in slot 2, got -2");
  expect(kLowest, 5, "-1..4 in slot 2, got -2147483648");
  expect(kHighest, kMostKeys, "-1..2147483645 in slot 2, got 2147483647");
}

TEST_P(CompactAndSort, CheckingModeTakesHolesAndGoodIndices) {
  Runtime checking = runtime();
  checking.check = true;
  const HostTensor indices = tensor_of({{4, -1, 0}, {-1, -1, -1}}, 3);
  expect_same(canonical(indices, 5, checking), canonical(indices, 5, runtime()));
  const HostTensor holes = tensor_of({{-1, -1}}, 2);
  EXPECT_EQ(numbers_of(canonical(holes, 0, checking).lengths), Row{0});
}

// Two rows of three slots, every refusal changes one thing.
struct GoodCall {
  HostTensor indices = tensor_of({{2, 1, 0}, {0, -1, 1}}, 3);
  HostTensor sorted_indices{DType::kInt32, {2, 3}};
  HostTensor lengths{DType::kInt32, {2}};

  CompactAndSortArgs args() const { return {indices, 3, sorted_indices, lengths}; }

  void expect_refused(const CompactAndSortArgs& args, ErrorCode code, const std::string& sentence,
                      const Runtime& runtime = {}) const {
    expect_error([&] { compact_and_sort(args, runtime); }, code, "compact_and_sort: " + sentence);
    EXPECT_TRUE(sorted_indices.untouched());
    EXPECT_TRUE(lengths.untouched());
  }
};

TEST(CompactAndSortRefusals, TheCallThatTheyChangeIsGood) {
  const GoodCall call;
  compact_and_sort(call.args());
  EXPECT_EQ(numbers_of(call.lengths), (Row{3, 2}));
}

TEST(CompactAndSortRefusals, IndicesDtypeRankAndWidth) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.indices.dtype = DType::kInt64;
  call.expect_refused(args, ErrorCode::kType,
                      "indices must be int32 [T, K] with T in 0..2147483646, K in 1..2048, got "
                      "int64 [2, 3]");
  args.indices = TensorView::contiguous(args.indices.data, DType::kInt32, {2, 1, 3});
  call.expect_refused(args, ErrorCode::kValue,
                      "indices must be int32 [T, K] with T in 0..2147483646, K in 1..2048, got "
                      "int32 [2, 1, 3]");
  for (const std::int64_t width : {0, 2049}) {
    args.indices = TensorView::contiguous(args.indices.data, DType::kInt32, {1, width});
    call.expect_refused(args, ErrorCode::kValue,
                        "indices must be int32 [T, K] with T in 0..2147483646, K in 1..2048, got "
                        "int32 [1, " +
                            std::to_string(width) + "]");
  }
}

TEST(CompactAndSortRefusals, IndicesStrides) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.indices.strides = {1, 2};
  call.expect_refused(args, ErrorCode::kValue,
                      "indices must be contiguous in its last axis and have no negative stride, "
                      "got int32 [2, 3] with strides [1, 2]");
  args.indices.strides = {-3, 1};
  call.expect_refused(args, ErrorCode::kValue,
                      "indices must be contiguous in its last axis and have no negative stride, "
                      "got int32 [2, 3] with strides [-3, 1]");
}

TEST(CompactAndSortRefusals, NullPointers) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.indices.data = nullptr;
  call.expect_refused(args, ErrorCode::kValue,
                      "indices must point to 6 elements, got a null pointer");
  args = call.args();
  args.sorted_indices.data = nullptr;
  call.expect_refused(args, ErrorCode::kValue,
                      "sorted_indices must point to 6 elements, got a null pointer");
  args = call.args();
  args.lengths.data = nullptr;
  call.expect_refused(args, ErrorCode::kValue,
                      "lengths must point to 2 elements, got a null pointer");
}

TEST(CompactAndSortRefusals, SortedIndices) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.sorted_indices.dtype = DType::kUInt32;
  call.expect_refused(args, ErrorCode::kType,
                      "sorted_indices must be int32 [T, K] = [2, 3], got uint32 [2, 3]");
  args.sorted_indices =
      TensorView::contiguous(call.sorted_indices.view().data, DType::kInt32, {2, 2});
  call.expect_refused(args, ErrorCode::kValue,
                      "sorted_indices must be int32 [T, K] = [2, 3], got int32 [2, 2]");
  args = call.args();
  args.sorted_indices.strides = {4, 1};
  call.expect_refused(args, ErrorCode::kValue,
                      "sorted_indices must be contiguous, got int32 [2, 3] with strides [4, 1]");
}

TEST(CompactAndSortRefusals, Lengths) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.lengths.dtype = DType::kInt64;
  call.expect_refused(args, ErrorCode::kType, "lengths must be int32 [T] = [2], got int64 [2]");
  args = call.args();
  args.lengths.shape[0] = 3;
  call.expect_refused(args, ErrorCode::kValue, "lengths must be int32 [T] = [2], got int32 [3]");
  args = call.args();
  args.lengths.strides[0] = 2;
  call.expect_refused(args, ErrorCode::kValue,
                      "lengths must be contiguous, got int32 [2] with strides [2]");
}

TEST(CompactAndSortRefusals, KeyCount) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  for (const std::int64_t key_count :
       {std::int64_t{-1}, kMostKeys + 1, std::numeric_limits<std::int64_t>::max()}) {
    args.key_count = key_count;
    call.expect_refused(args, ErrorCode::kValue,
                        "key_count must be in 0..2147483646, got " + std::to_string(key_count));
  }
}

TEST(CompactAndSortRefusals, Overlap) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.lengths.data = args.sorted_indices.as<std::int32_t>() + 5;
  call.expect_refused(args, ErrorCode::kValue,
                      "sorted_indices must not overlap lengths, got memory that both use");
  args = call.args();
  args.lengths.data = args.indices.data;
  call.expect_refused(args, ErrorCode::kValue,
                      "lengths must not overlap indices, got memory that both use");
}

TEST(CompactAndSortRefusals, InPlaceNeedsTheSameMemory) {
  std::array<std::int32_t, 12> memory{};
  HostTensor lengths(DType::kInt32, {2});
  const TensorView low = TensorView::contiguous(memory.data(), DType::kInt32, {2, 3});
  const TensorView high = TensorView::contiguous(memory.data() + 1, DType::kInt32, {2, 3});
  TensorView spread = low;
  spread.strides[0] = 6;
  constexpr auto kSentence =
      "compact_and_sort: sorted_indices must not overlap indices, got memory that both use";
  for (const auto& [indices, sorted] :
       {std::pair(low, high), std::pair(high, low), std::pair(spread, low)}) {
    expect_error([&] { compact_and_sort({indices, 3, sorted, lengths}); }, ErrorCode::kValue,
                 kSentence);
  }
}

TEST(CompactAndSortRefusals, TwoDevices) {
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  args.lengths.device = {DeviceKind::kCuda, 0};
  call.expect_refused(args, ErrorCode::kValue, "lengths must be on cpu as indices is, got cuda:0");
}

TEST(CompactAndSortRefusals, DeviceThatIsNotThere) {
  constexpr int kNoSuchDevice = 63;
  const GoodCall call;
  CompactAndSortArgs args = call.args();
  for (TensorView* view : {&args.indices, &args.sorted_indices, &args.lengths}) {
    view->device = {DeviceKind::kCuda, kNoSuchDevice};
  }
  const std::string hosts =
      "cpu: the tensors are not on the host; reference: the tensors are not on the host";
  const std::string sm90 = "sm90: " + core::sm90_refusal(kNoSuchDevice) + "; ";
  for (const bool check : {false, true}) {
    Runtime runtime;
    runtime.check = check;
    call.expect_refused(args, ErrorCode::kUnavailable,
                        "no backend takes this call with backend auto (" +
                            (kBuildHasCuda ? sm90 : "") + hosts + ")",
                        runtime);
  }
}

TEST(CompactAndSortRefusals, HostTensorsOnAGpuBackend) {
  const GoodCall call;
  Runtime runtime;
  runtime.backend = Backend::kSm90;
  call.expect_refused(call.args(), ErrorCode::kUnavailable,
                      std::string("no backend takes this call with backend sm90 (") +
                          (kBuildHasCuda ? "sm90: the tensors are not on a CUDA device"
                                         : "not part of this build") +
                          ")",
                      runtime);
}

}  // namespace
}  // namespace flashdsa::test
