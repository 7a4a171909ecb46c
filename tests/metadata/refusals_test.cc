// What `prepare_packed_metadata` refuses, and in which words. SPEC section 2.

#include <fmt/format.h>

#include <limits>

#include "core/device.h"
#include "tests/metadata/fixture.h"
#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

// Storage 0..3, 4..8, 9..11; real lengths 3, 4, 2; queries 2..9.
PackedLayout good() {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12};
  layout.total_key_tokens = 12;
  layout.query_indices = {{2, 3, 4, 5, 6, 7, 8, 9}};
  layout.padding_mask = std::vector<std::uint8_t>(8);
  layout.max_seqlen = 4;
  return layout;
}

// The same without the optional tensors.
PackedLayout compact() {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.total_key_tokens = 9;
  return layout;
}

class MetadataRefusals : public MetadataTest {
 protected:
  void expect_refused(const PackedMetadataArgs& args, ErrorCode code,
                      const std::string& sentence) const {
    expect_error([&] { return run_placed(args, runtime()); }, code,
                 "prepare_packed_metadata: " + sentence);
  }

  void expect_refused(PackedLayout layout, const std::string& sentence) const {
    expect_refused(layout.args(), ErrorCode::kValue, sentence);
  }
};

INSTANTIATE_TEST_SUITE_P(Every, MetadataRefusals, kMetadataEngines, engine_name);

TEST_P(MetadataRefusals, TheCallThatTheyChangeIsGood) {
  EXPECT_NO_THROW(build(good()));
  EXPECT_NO_THROW(build(compact()));
}

TEST_P(MetadataRefusals, TotalKeyTokensHasARange) {
  for (const std::int64_t total :
       {std::int64_t{0}, std::int64_t{-1}, std::int64_t{2147483647},
        std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
    PackedLayout layout = compact();
    layout.total_key_tokens = total;
    expect_refused(layout,
                   "total_key_tokens must be in 1..2147483646, got " + std::to_string(total));
  }
}

TEST_P(MetadataRefusals, CuSeqlensDtype) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.cu_seqlens.dtype = DType::kInt64;
  expect_refused(args, ErrorCode::kType,
                 "cu_seqlens must be int32 [N+1] with N+1 in 2..2147483646, got int64 [4]");
}

TEST_P(MetadataRefusals, CuSeqlensRank) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.cu_seqlens = TensorView::contiguous(layout.cu_seqlens.data(), DType::kInt32, {2, 2});
  expect_refused(args, ErrorCode::kValue,
                 "cu_seqlens must be int32 [N+1] with N+1 in 2..2147483646, got int32 [2, 2]");
}

TEST_P(MetadataRefusals, CuSeqlensWithoutADocument) {
  PackedLayout layout = compact();
  layout.cu_seqlens = {0};
  expect_refused(layout, "cu_seqlens must be int32 [N+1] with N+1 in 2..2147483646, got int32 [1]");
}

TEST_P(MetadataRefusals, CuSeqlensStride) {
  PackedLayout layout = compact();
  PackedMetadataArgs args = layout.args();
  args.cu_seqlens.shape[0] = 2;
  args.cu_seqlens.strides[0] = 2;
  expect_refused(args, ErrorCode::kValue,
                 "cu_seqlens must be contiguous, got int32 [2] with strides [2]");
}

TEST_P(MetadataRefusals, CuSeqlensNull) {
  PackedLayout layout = compact();
  PackedMetadataArgs args = layout.args();
  args.cu_seqlens.data = nullptr;
  expect_refused(args, ErrorCode::kValue,
                 "cu_seqlens must point to 4 elements, got a null pointer");
}

TEST_P(MetadataRefusals, CuSeqlensStart) {
  PackedLayout layout = good();
  layout.cu_seqlens[0] = 1;
  expect_refused(layout, "cu_seqlens must start at 0, got 1");
}

TEST_P(MetadataRefusals, CuSeqlensNotStrictlyIncreasing) {
  PackedLayout layout = good();
  layout.cu_seqlens[2] = 3;
  expect_refused(layout, "cu_seqlens must be strictly increasing, got 3 before 3 at document 1");
  layout.cu_seqlens[2] = 2;
  expect_refused(layout, "cu_seqlens must be strictly increasing, got 3 before 2 at document 1");
  layout.cu_seqlens[2] = std::numeric_limits<std::int32_t>::min();  // the difference wraps
  expect_refused(layout,
                 "cu_seqlens must be strictly increasing, got 3 before -2147483648 at document 1");
}

TEST_P(MetadataRefusals, PaddedDtype) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.cu_seqlens_padded->dtype = DType::kInt64;
  expect_refused(args, ErrorCode::kType,
                 "cu_seqlens_padded must be int32 [N+1] = [4], got int64 [4]");
}

TEST_P(MetadataRefusals, PaddedOfAnotherCount) {
  PackedLayout layout = good();
  layout.cu_seqlens_padded = {0, 4, 12};
  expect_refused(layout, "cu_seqlens_padded must be int32 [N+1] = [4], got int32 [3]");
}

TEST_P(MetadataRefusals, PaddedStart) {
  PackedLayout layout = good();
  layout.cu_seqlens_padded = {-1, 4, 9, 12};
  expect_refused(layout, "cu_seqlens_padded must start at 0, got -1");
}

TEST_P(MetadataRefusals, PaddedNotStrictlyIncreasing) {
  PackedLayout layout = good();
  layout.cu_seqlens_padded = {0, 4, 4, 12};
  expect_refused(layout,
                 "cu_seqlens_padded must be strictly increasing, got 4 before 4 at document 1");
}

TEST_P(MetadataRefusals, PaddedEnd) {
  PackedLayout layout = good();
  layout.total_key_tokens = 13;
  expect_refused(layout, "cu_seqlens_padded must end at total_key_tokens = 13, got 12");
  layout.total_key_tokens = 11;
  expect_refused(layout, "cu_seqlens_padded must end at total_key_tokens = 11, got 12");
}

TEST_P(MetadataRefusals, CompactStorageEnd) {
  PackedLayout layout = compact();
  layout.total_key_tokens = 10;
  expect_refused(layout, "cu_seqlens must end at total_key_tokens = 10, got 9");
}

TEST_P(MetadataRefusals, PaddedLengthBelowTheRealOne) {
  PackedLayout layout = good();
  layout.cu_seqlens_padded = {0, 4, 7, 12};
  expect_refused(layout,
                 "cu_seqlens_padded must give document 1 at least its real length 4, got 3");
}

TEST_P(MetadataRefusals, MaxSeqlenThatIsNotTheLargest) {
  for (const std::int64_t longest : {0, 3, 5, -4}) {
    PackedLayout layout = good();
    layout.max_seqlen = longest;
    expect_refused(layout,
                   "max_seqlen must be the largest real length 4, got " + std::to_string(longest));
  }
}

TEST_P(MetadataRefusals, QueryDtype) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.query_indices->dtype = DType::kFloat64;
  expect_refused(args, ErrorCode::kType,
                 "query_indices must be int32 or int64 [T_q] with T_q in 1..2147483646, got "
                 "float64 [8]");
}

TEST_P(MetadataRefusals, QueryRank) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.query_indices = TensorView::contiguous(layout.query_indices->data(), DType::kInt64, {8, 1});
  expect_refused(args, ErrorCode::kValue,
                 "query_indices must be int32 or int64 [T_q] with T_q in 1..2147483646, got int64 "
                 "[8, 1]");
}

TEST_P(MetadataRefusals, QueryStride) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.query_indices->shape[0] = 4;
  args.query_indices->strides[0] = 2;
  expect_refused(args, ErrorCode::kValue,
                 "query_indices must be contiguous, got int64 [4] with strides [2]");
}

TEST_P(MetadataRefusals, EmptyQueryListInBothModes) {
  for (const QueryMode mode : {QueryMode::kContiguous, QueryMode::kGeneral}) {
    PackedLayout layout = good();
    layout.padding_mask.reset();
    layout.query_indices->clear();
    layout.query_mode = mode;
    expect_refused(layout,
                   "query_indices must be int32 or int64 [T_q] with T_q in 1..2147483646, got "
                   "int64 [0]");
  }
}

TEST_P(MetadataRefusals, QueryOutsideTheStorage) {
  const auto expect = [&](std::size_t row, std::int64_t g, bool narrow) {
    PackedLayout layout = good();
    layout.query_mode = QueryMode::kGeneral;
    layout.narrow_indices = narrow;
    layout.query_indices->at(row) = g;
    expect_refused(layout, "query_indices must lie in 0..11, got " + std::to_string(g) +
                               " in row " + std::to_string(row));
  };
  for (const bool narrow : {false, true}) {
    expect(0, -1, narrow);
    expect(7, 12, narrow);
    expect(3, std::numeric_limits<std::int32_t>::min(), narrow);
    expect(3, std::numeric_limits<std::int32_t>::max(), narrow);
  }
  expect(3, std::int64_t{1} << 32, false);  // 0 in its lower half
  expect(0, std::numeric_limits<std::int64_t>::min(), false);
  expect(7, std::numeric_limits<std::int64_t>::max(), false);
}

TEST_P(MetadataRefusals, GapInContiguousMode) {
  PackedLayout layout = good();
  layout.query_indices->back() = 10;
  expect_refused(layout,
                 "query_indices must be one increasing interval in contiguous mode, got 10 after 8 "
                 "in row 7");
}

TEST_P(MetadataRefusals, DecreasingQueriesInContiguousMode) {
  PackedLayout layout = good();
  layout.query_indices->at(1) = 1;
  expect_refused(layout,
                 "query_indices must be one increasing interval in contiguous mode, got 1 after 2 "
                 "in row 1");
}

TEST_P(MetadataRefusals, RepeatedOrDecreasingQueriesInGeneralMode) {
  PackedLayout layout = good();
  layout.query_mode = QueryMode::kGeneral;
  layout.query_indices->at(5) = 6;
  expect_refused(layout, "query_indices must be strictly increasing, got 6 after 6 in row 5");
  layout.query_indices->at(5) = 4;
  expect_refused(layout, "query_indices must be strictly increasing, got 4 after 6 in row 5");
}

TEST_P(MetadataRefusals, MaskDtype) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.padding_mask->dtype = DType::kUInt8;
  expect_refused(args, ErrorCode::kType, "padding_mask must be bool [T_q] = [8], got uint8 [8]");
}

TEST_P(MetadataRefusals, MaskOfAnotherShapeThanTheQueries) {
  PackedLayout layout = good();
  layout.padding_mask->resize(12);  // of the storage
  expect_refused(layout, "padding_mask must be bool [T_q] = [8], got bool [12]");
}

TEST_P(MetadataRefusals, MaskOfAnotherShapeThanTheStorage) {
  PackedLayout layout = compact();
  layout.padding_mask = std::vector<std::uint8_t>(8);
  expect_refused(layout, "padding_mask must be bool [T_q] = [9], got bool [8]");
}

TEST_P(MetadataRefusals, EmptyDocumentWithoutTheLenientOption) {
  PackedLayout layout = compact();
  layout.cu_seqlens = {0, 3, 9, 9};
  expect_refused(layout, "cu_seqlens must be strictly increasing, got 9 before 9 at document 2");
}

TEST_P(MetadataRefusals, DecreasingBoundariesWithTheLenientOption) {
  PackedLayout layout = good();
  layout.lenient = true;
  layout.cu_seqlens[2] = 2;
  expect_refused(layout, "cu_seqlens must be increasing, got 3 before 2 at document 1");
  layout.cu_seqlens[2] = 7;
  layout.cu_seqlens_padded = {0, 4, 3, 12};
  expect_refused(layout, "cu_seqlens_padded must be increasing, got 4 before 3 at document 1");
}

TEST_P(MetadataRefusals, RealTokensWithoutStorageWithTheLenientOption) {
  PackedLayout layout = good();
  layout.lenient = true;
  layout.cu_seqlens_padded = {0, 4, 4, 12};
  expect_refused(layout,
                 "cu_seqlens_padded must give document 1 at least its real length 4, got 0");
}

TEST_P(MetadataRefusals, StorageWithoutARow) {
  PackedLayout layout;
  layout.lenient = true;
  layout.cu_seqlens = {0, 0};
  layout.total_key_tokens = 1;
  expect_refused(layout, "cu_seqlens must end at total_key_tokens = 1, got 0");
}

void expect_unavailable(const PackedMetadataArgs& args, Backend backend,
                        const std::string& reasons) {
  Runtime runtime;
  runtime.backend = backend;
  expect_error([&] { return prepare_packed_metadata(args, runtime); }, ErrorCode::kUnavailable,
               fmt::format("prepare_packed_metadata: no backend takes this call with backend {} "
                           "({})",
                           backend_name(backend), reasons));
}

TEST(MetadataDevices, TensorsOnTwoDevicesAreRefused) {
  PackedLayout layout = good();
  PackedMetadataArgs args = layout.args();
  args.padding_mask->device = {DeviceKind::kCuda, 1};
  expect_error([&] { return prepare_packed_metadata(args); }, ErrorCode::kValue,
               "prepare_packed_metadata: padding_mask must be on cpu as cu_seqlens is, got cuda:1");
}

TEST(MetadataDevices, DeviceThatIsNotThereIsUnavailable) {
  constexpr int kNoSuchDevice = 63;
  PackedLayout layout = compact();
  PackedMetadataArgs args = layout.args();
  args.cu_seqlens.device = {DeviceKind::kCuda, kNoSuchDevice};
  args.cu_seqlens.data = reinterpret_cast<void*>(std::uintptr_t{64});  // must not be read
  const std::string hosts =
      "cpu: the tensors are not on the host; reference: the tensors are not on the host";
  const std::string sm90 = fmt::format("sm90: {}; ", core::sm90_refusal(kNoSuchDevice));
  expect_unavailable(args, Backend::kAuto, (kBuildHasCuda ? sm90 : "") + hosts);
}

TEST(MetadataDevices, GpuBackendsDoNotTakeHostTensors) {
  PackedLayout layout = compact();
  expect_unavailable(
      layout.args(), Backend::kSm90,
      kBuildHasCuda ? "sm90: the tensors are not on a CUDA device" : "not part of this build");
  expect_unavailable(layout.args(), Backend::kSm80, "not part of this build");
}

}  // namespace
}  // namespace flashdsa::test
