// Capture-safe builds: the same rows in tensors sized by capacity, bad contents as a status.

#include <algorithm>

#include "tests/metadata/fixture.h"
#include "tests/support/expect_error.h"
#include "tests/support/property.h"

namespace flashdsa::test {
namespace {

using Numbers = std::vector<std::int64_t>;

// Storage 0..3, 4..8, 9..11; real lengths 3, 4, 2; queries 2..6.
PackedLayout example() {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12};
  layout.total_key_tokens = 12;
  layout.query_indices = {{2, 3, 4, 5, 6}};
  layout.max_seqlen = 4;
  return layout;
}

class CaptureSafeMetadata : public MetadataTest {
 protected:
  PackedMetadata build_capture_safe(PackedLayout layout, bool key_sources = true) const {
    PackedMetadataArgs args = layout.args();
    args.capture_safe = true;
    args.key_sources = key_sources;
    return run_placed(args, runtime());
  }
};

INSTANTIATE_TEST_SUITE_P(Every, CaptureSafeMetadata, kMetadataEngines, engine_name);

MetadataStatus status_of(const PackedMetadata& metadata) {
  EXPECT_TRUE(metadata.status.has_value());
  EXPECT_EQ(describe(*metadata.status), "int32 [1]");
  return static_cast<MetadataStatus>(metadata.status->span<std::int32_t>()[0]);
}

TEST_P(CaptureSafeMetadata, TensorsHaveTheirCapacityAndTailsRepeat) {
  const PackedMetadata got = build_capture_safe(example());
  const MetadataFields want = {
      .starts = {0, 0, 4, 4, 4},
      .causal_lengths = {3, 0, 1, 2, 3},
      .query_valid = {1, 0, 1, 1, 1},
      .valid_row_indices = std::nullopt,
      .segment_cu_q = {0, 2, 5, 5},
      .segment_cu_k = {0, 4, 7, 7},
      .q_causal_offsets = {2, 0, 0},
      .key_source_indices = Numbers{0, 1, 2, 3, 4, 5, 6, -1, -1, -1, -1, -1},
      .max_seqlen_q = 5,
      .max_seqlen_k = 12,
      .total_key_tokens = 12,
      .all_rows_nonempty = false,
  };
  EXPECT_EQ(text(fields_of(got)), text(want));
  EXPECT_EQ(status_of(got), MetadataStatus::kGood);
}

TEST_P(CaptureSafeMetadata, KeySourcesMayBeLeftOut) {
  const PackedMetadata got = build_capture_safe(example(), false);
  EXPECT_FALSE(got.key_source_indices.has_value());
  EXPECT_EQ(status_of(got), MetadataStatus::kGood);
}

TEST_P(CaptureSafeMetadata, KeySourcesAreAbsentWhenAllRowsAreQueries) {
  PackedLayout layout = example();
  layout.query_indices.reset();
  EXPECT_FALSE(build_capture_safe(layout).key_source_indices.has_value());
}

TEST_P(CaptureSafeMetadata, ExactBuildHasNoStatusAndIgnoresKeySources) {
  PackedLayout layout = example();
  PackedMetadataArgs args = layout.args();
  args.key_sources = false;
  const PackedMetadata got = run_placed(args, runtime());
  EXPECT_FALSE(got.status.has_value());
  EXPECT_TRUE(got.key_source_indices.has_value());
}

// Bad contents: the status, and every row empty in tensors of the same shapes.
void expect_status(const PackedMetadata& got, const PackedLayout& layout, MetadataStatus status) {
  EXPECT_EQ(status_of(got), status) << text(layout);
  const MetadataFields fields = fields_of(got);
  const std::size_t rows = layout.query_indices->size();
  const std::size_t documents = layout.cu_seqlens.size() - 1;
  EXPECT_EQ(fields.starts.size(), rows);
  EXPECT_EQ(fields.causal_lengths, Numbers(rows, 0));
  EXPECT_EQ(fields.query_valid, Numbers(rows, 0));
  EXPECT_EQ(fields.segment_cu_q, Numbers(documents + 1, 0));
  EXPECT_EQ(fields.segment_cu_k, Numbers(documents + 1, 0));
  EXPECT_EQ(fields.q_causal_offsets, Numbers(documents, 0));
  EXPECT_EQ(*fields.key_source_indices,
            Numbers(static_cast<std::size_t>(layout.total_key_tokens), -1));
}

TEST_P(CaptureSafeMetadata, EveryBrokenRuleHasItsStatus) {
  const auto expect = [&](MetadataStatus status, const auto& change) {
    PackedLayout layout = example();
    change(layout);
    expect_status(build_capture_safe(layout), layout, status);
  };
  expect(MetadataStatus::kCuSeqlensStart, [](auto& x) { x.cu_seqlens = {1, 3, 7, 9}; });
  expect(MetadataStatus::kCuSeqlensOrder, [](auto& x) { x.cu_seqlens = {0, 3, 3, 9}; });
  expect(MetadataStatus::kPaddedStart, [](auto& x) { x.cu_seqlens_padded = {-1, 4, 9, 12}; });
  expect(MetadataStatus::kPaddedOrder, [](auto& x) { x.cu_seqlens_padded = {0, 4, 4, 12}; });
  expect(MetadataStatus::kPaddedEnd, [](auto& x) { x.total_key_tokens = 13; });
  expect(MetadataStatus::kPaddedBelowReal, [](auto& x) { x.cu_seqlens_padded = {0, 4, 7, 12}; });
  expect(MetadataStatus::kMaxSeqlen, [](auto& x) { x.max_seqlen = 5; });
  expect(MetadataStatus::kPositionOutside, [](auto& x) { x.query_indices->back() = 12; });
  expect(MetadataStatus::kPositionOutside, [](auto& x) { x.query_indices->front() = -1; });
  expect(MetadataStatus::kPositionGap, [](auto& x) { x.query_indices->back() = 7; });
  expect(MetadataStatus::kPositionOrder, [](auto& x) {
    x.query_mode = QueryMode::kGeneral;
    x.query_indices->back() = 5;
  });
}

TEST_P(CaptureSafeMetadata, StatusIsTheFirstBrokenRule) {
  PackedLayout layout = example();
  layout.query_indices = {{7, 5, 99}};
  expect_status(build_capture_safe(layout), layout, MetadataStatus::kPositionOutside);
  layout.max_seqlen = 1;
  expect_status(build_capture_safe(layout), layout, MetadataStatus::kMaxSeqlen);
  layout.cu_seqlens_padded = {0, 2, 9, 12};
  expect_status(build_capture_safe(layout), layout, MetadataStatus::kPaddedBelowReal);
  layout.cu_seqlens[0] = 2;
  expect_status(build_capture_safe(layout), layout, MetadataStatus::kCuSeqlensStart);
}

TEST(MetadataStatus, NumbersAreThoseOfTheHeader) {
  const MetadataStatus order[] = {MetadataStatus::kGood,
                                  MetadataStatus::kCuSeqlensStart,
                                  MetadataStatus::kCuSeqlensOrder,
                                  MetadataStatus::kPaddedStart,
                                  MetadataStatus::kPaddedOrder,
                                  MetadataStatus::kPaddedEnd,
                                  MetadataStatus::kPaddedBelowReal,
                                  MetadataStatus::kMaxSeqlen,
                                  MetadataStatus::kPositionOutside,
                                  MetadataStatus::kPositionGap,
                                  MetadataStatus::kPositionOrder};
  for (int i = 0; i <= 10; ++i) EXPECT_EQ(static_cast<int>(order[i]), i);
}

TEST_P(CaptureSafeMetadata, WrongTypesAndShapesStillThrow) {
  PackedLayout layout = example();
  layout.padding_mask = std::vector<std::uint8_t>(4);
  expect_error([&] { return build_capture_safe(layout); }, ErrorCode::kValue,
               "prepare_packed_metadata: padding_mask must be bool [T_q] = [5], got bool [4]");
}

TEST_P(CaptureSafeMetadata, TailOfRepeatedBoundariesIsTheLenientAnswer) {
  PackedLayout layout = example();
  layout.cu_seqlens = {0, 3, 7, 9, 9, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12, 12, 12};
  layout.lenient = true;
  const MetadataFields got = fields_of(build_capture_safe(layout));
  EXPECT_EQ(got.causal_lengths, (Numbers{3, 0, 1, 2, 3}));
  EXPECT_EQ(got.segment_cu_q, (Numbers{0, 2, 5, 5, 5, 5}));
  EXPECT_EQ(got.q_causal_offsets, (Numbers{2, 0, 0, 0, 0}));
}

// The offsets with which a build of capacity `entries` has to end.
Numbers stretched(Numbers numbers, std::size_t entries, std::int64_t tail) {
  numbers.resize(entries, tail);
  return numbers;
}

TEST_P(CaptureSafeMetadata, RowsAreThoseOfTheExactBuild) {
  check_property(is_on_device() ? 100 : 1000, 21, [&] {
    PackedLayout layout;
    layout.cu_seqlens = {0};
    layout.cu_seqlens_padded = {0};
    const int documents = *rc::gen::inRange(1, 6);
    for (int d = 0; d < documents; ++d) {
      const int real = *rc::gen::inRange(1, 5);
      layout.cu_seqlens.push_back(layout.cu_seqlens.back() + real);
      layout.cu_seqlens_padded->push_back(layout.cu_seqlens_padded->back() + real +
                                          *rc::gen::inRange(0, 3));
    }
    const std::int64_t total = layout.total_key_tokens = layout.cu_seqlens_padded->back();
    const auto first = *rc::gen::inRange<std::int64_t>(0, total);
    const auto end = *rc::gen::inRange<std::int64_t>(first + 1, total + 1);
    layout.query_indices.emplace();
    for (std::int64_t g = first; g < end; ++g) layout.query_indices->push_back(g);

    const MetadataFields exact = by_definition(layout);
    const MetadataFields got = fields_of(build_capture_safe(layout));
    const std::size_t capacity = layout.cu_seqlens.size() - 1;
    MetadataFields want = exact;
    want.valid_row_indices.reset();
    want.segment_cu_q = stretched(exact.segment_cu_q, capacity + 1, exact.segment_cu_q.back());
    want.segment_cu_k = stretched(exact.segment_cu_k, capacity + 1, exact.segment_cu_k.back());
    want.q_causal_offsets = stretched(exact.q_causal_offsets, capacity, 0);
    if (exact.key_source_indices) {
      want.key_source_indices =
          stretched(*exact.key_source_indices, static_cast<std::size_t>(total), -1);
    }
    want.max_seqlen_q = end - first;
    want.max_seqlen_k = total;
    want.all_rows_nonempty = false;
    RC_LOG() << text(layout) << '\n';
    RC_ASSERT(text(got) == text(want));
  });
}

}  // namespace
}  // namespace flashdsa::test
