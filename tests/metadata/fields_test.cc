// The fields of packed metadata (SPEC section 2): values worked by hand.

#include <gtest/gtest.h>

#include <numeric>

#include "tests/metadata/fixture.h"

namespace flashdsa::test {
namespace {

constexpr std::int64_t kMostRows = 2147483646;  // 2^31 - 2

using Numbers = std::vector<std::int64_t>;

Numbers interval(std::int64_t first, std::int64_t last) {
  Numbers numbers(static_cast<std::size_t>(last - first + 1));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Documents of 3, 4 and 2 tokens, each with one row of padding behind it.
PackedLayout example() {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12};
  layout.total_key_tokens = 12;
  return layout;
}

class Metadata : public MetadataTest {};
INSTANTIATE_TEST_SUITE_P(Every, Metadata, kMetadataEngines, engine_name);

TEST_P(Metadata, WorkedExampleOfTheSpecification) {
  PackedLayout layout = example();
  layout.query_indices = interval(2, 9);
  layout.max_seqlen = 4;
  const MetadataFields want = {
      .starts = {0, 0, 4, 4, 4, 4, 4, 9},
      .causal_lengths = {3, 0, 1, 2, 3, 4, 0, 1},
      .query_valid = {1, 0, 1, 1, 1, 1, 0, 1},
      .valid_row_indices = Numbers{0, 2, 3, 4, 5, 7},
      .segment_cu_q = {0, 2, 7, 8},
      .segment_cu_k = {0, 4, 9, 10},
      .q_causal_offsets = {2, 0, 0},
      .key_source_indices = interval(0, 9),
      .max_seqlen_q = 5,
      .max_seqlen_k = 5,
      .total_key_tokens = 12,
      .all_rows_nonempty = false,
  };
  for (const bool narrow : {false, true}) {
    for (const QueryMode mode : {QueryMode::kContiguous, QueryMode::kGeneral}) {
      layout.narrow_indices = narrow;
      layout.query_mode = mode;
      EXPECT_EQ(text(build(layout)), text(want));
    }
  }
}

TEST_P(Metadata, WithoutQueriesEveryRowIsOne) {
  const MetadataFields want = {
      .starts = {0, 0, 0, 0, 4, 4, 4, 4, 4, 9, 9, 9},
      .causal_lengths = {1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 0},
      .query_valid = {1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0},
      .valid_row_indices = Numbers{0, 1, 2, 4, 5, 6, 7, 9, 10},
      .segment_cu_q = {0, 4, 9, 12},
      .segment_cu_k = {0, 4, 9, 12},
      .q_causal_offsets = {0, 0, 0},
      .key_source_indices = std::nullopt,
      .max_seqlen_q = 5,
      .max_seqlen_k = 5,
      .total_key_tokens = 12,
      .all_rows_nonempty = false,
  };
  EXPECT_EQ(text(build(example())), text(want));
  PackedLayout listed = example();
  listed.query_indices = interval(0, 11);  // the same said with a list
  EXPECT_EQ(text(build(listed)), text(want));
}

TEST_P(Metadata, WithoutPaddingStorageIsCompact) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 2, 3};
  layout.total_key_tokens = 3;
  const MetadataFields want = {
      .starts = {0, 0, 2},
      .causal_lengths = {1, 2, 1},
      .query_valid = {1, 1, 1},
      .valid_row_indices = std::nullopt,
      .segment_cu_q = {0, 2, 3},
      .segment_cu_k = {0, 2, 3},
      .q_causal_offsets = {0, 0},
      .key_source_indices = std::nullopt,
      .max_seqlen_q = 2,
      .max_seqlen_k = 2,
      .total_key_tokens = 3,
      .all_rows_nonempty = true,
  };
  EXPECT_EQ(text(build(layout)), text(want));
}

TEST_P(Metadata, OneRowIsAValidCall) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 64, 128};
  layout.total_key_tokens = 128;
  layout.query_indices = Numbers{100};
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.starts, Numbers{64});
  EXPECT_EQ(got.causal_lengths, Numbers{37});  // keys 64..100
  EXPECT_EQ(got.q_causal_offsets, Numbers{36});
  EXPECT_EQ(got.segment_cu_k, (Numbers{0, 37}));
  EXPECT_EQ(*got.key_source_indices, interval(64, 100));
}

TEST_P(Metadata, SliceSeesItsDocumentsFromTheirStart) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 100, 160};
  layout.total_key_tokens = 160;
  layout.query_indices = interval(80, 159);
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.causal_lengths[10], 91);
  EXPECT_EQ(got.causal_lengths[20], 1);
  EXPECT_EQ(got.segment_cu_q, (Numbers{0, 20, 80}));
  EXPECT_EQ(got.segment_cu_k, (Numbers{0, 100, 160}));
  EXPECT_EQ(got.q_causal_offsets, (Numbers{80, 0}));
  EXPECT_EQ(got.max_seqlen_q, 60);
  EXPECT_EQ(got.max_seqlen_k, 100);
}

TEST_P(Metadata, PrefixesOfAMiddleSliceAreRepacked) {
  PackedLayout layout = example();
  layout.query_indices = interval(6, 9);
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.segment_cu_q, (Numbers{0, 3, 4}));
  EXPECT_EQ(got.segment_cu_k, (Numbers{0, 5, 6}));
  EXPECT_EQ(got.q_causal_offsets, (Numbers{2, 0}));
  EXPECT_EQ(*got.key_source_indices, (Numbers{4, 5, 6, 7, 8, 9}));
}

TEST_P(Metadata, GapInsideADocumentDoesNotSplitARun) {
  PackedLayout layout = example();
  layout.query_mode = QueryMode::kGeneral;
  layout.query_indices = Numbers{1, 4, 7, 10, 11};
  const MetadataFields want = {
      .starts = {0, 4, 4, 9, 9},
      .causal_lengths = {2, 1, 4, 2, 0},
      .query_valid = {1, 1, 1, 1, 0},
      .valid_row_indices = Numbers{0, 1, 2, 3},
      .segment_cu_q = {0, 1, 3, 5},
      .segment_cu_k = {0, 2, 6, 9},
      .q_causal_offsets = {1, 0, 1},
      .key_source_indices = Numbers{0, 1, 4, 5, 6, 7, 9, 10, 11},
      .max_seqlen_q = 2,
      .max_seqlen_k = 4,
      .total_key_tokens = 12,
      .all_rows_nonempty = false,
  };
  for (const bool narrow : {false, true}) {
    layout.narrow_indices = narrow;
    EXPECT_EQ(text(build(layout)), text(want));
  }
}

TEST_P(Metadata, GeneralModeMayPassOverWholeDocuments) {
  PackedLayout layout = example();
  layout.query_mode = QueryMode::kGeneral;
  layout.query_indices = Numbers{2, 9};
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.starts, (Numbers{0, 9}));
  EXPECT_EQ(got.segment_cu_q, (Numbers{0, 1, 2}));
  EXPECT_EQ(*got.key_source_indices, (Numbers{0, 1, 2, 9}));
}

TEST_P(Metadata, ZigzagShardSeesWhatTheWholeSees) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 5, 16};
  layout.total_key_tokens = 16;
  const MetadataFields whole = build(layout);
  layout.query_mode = QueryMode::kGeneral;
  layout.query_indices = Numbers{0, 1, 2, 3, 12, 13, 14, 15};  // first and last of four chunks
  const MetadataFields shard = build(layout);
  for (std::size_t t = 0; t < shard.starts.size(); ++t) {
    const auto g = static_cast<std::size_t>((*layout.query_indices)[t]);
    EXPECT_EQ(shard.starts[t], whole.starts[g]);
    EXPECT_EQ(shard.causal_lengths[t], whole.causal_lengths[g]);
  }
}

TEST_P(Metadata, MaskOutranksTheLengths) {
  PackedLayout layout;  // one document that absorbed its two rows of padding
  layout.cu_seqlens = {0, 5};
  layout.total_key_tokens = 5;
  layout.padding_mask = {0, 0, 0, 1, 1};
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.causal_lengths, (Numbers{1, 2, 3, 0, 0}));
  EXPECT_EQ(got.query_valid, (Numbers{1, 1, 1, 0, 0}));
  EXPECT_EQ(*got.valid_row_indices, (Numbers{0, 1, 2}));
  EXPECT_FALSE(got.all_rows_nonempty);
  EXPECT_EQ(got.segment_cu_k, (Numbers{0, 5}));
}

TEST_P(Metadata, MaskedRowInTheMiddleLeavesTheOthersAlone) {
  PackedLayout layout = example();
  const MetadataFields unmasked = build(layout);
  layout.padding_mask = std::vector<std::uint8_t>(12);
  (*layout.padding_mask)[5] = 1;
  MetadataFields want = unmasked;
  want.causal_lengths[5] = want.query_valid[5] = 0;
  want.valid_row_indices = Numbers{0, 1, 2, 4, 6, 7, 9, 10};
  EXPECT_EQ(text(build(layout)), text(want));  // its key still counts for the rows behind it
}

TEST_P(Metadata, MaskCannotMakePaddingReal) {
  PackedLayout layout = example();
  layout.padding_mask = std::vector<std::uint8_t>(12);
  EXPECT_EQ(text(build(layout)), text(build(example())));
}

TEST_P(Metadata, MaskIsOfLocalRows) {
  PackedLayout layout = example();
  layout.query_indices = interval(4, 6);
  layout.padding_mask = {0, 1, 0};
  EXPECT_EQ(build(layout).causal_lengths, (Numbers{1, 0, 3}));
}

TEST_P(Metadata, EveryByteButZeroIsPadding) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 5};
  layout.total_key_tokens = 5;
  layout.padding_mask = {0, 1, 2, 128, 255};
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.query_valid, (Numbers{1, 0, 0, 0, 0}));
  EXPECT_EQ(got.causal_lengths, (Numbers{1, 0, 0, 0, 0}));
}

TEST_P(Metadata, AllRowsMaskedGiveAnEmptyListOfValidRows) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 2};
  layout.total_key_tokens = 2;
  layout.padding_mask = {1, 1};
  const MetadataFields got = build(layout);
  ASSERT_TRUE(got.valid_row_indices.has_value());
  EXPECT_TRUE(got.valid_row_indices->empty());
  EXPECT_EQ(got.causal_lengths, (Numbers{0, 0}));
}

TEST_P(Metadata, LastPositionOfTheLargestStorage) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 2147483644, 2147483645};
  layout.cu_seqlens_padded = {0, 2147483644, 2147483646};
  layout.total_key_tokens = kMostRows;
  layout.max_seqlen = 2147483644;
  layout.query_mode = QueryMode::kGeneral;
  for (const bool narrow : {false, true}) {
    layout.narrow_indices = narrow;
    layout.query_indices = Numbers{0, kMostRows - 2, kMostRows - 1};
    const MetadataFields want = {
        .starts = {0, kMostRows - 2, kMostRows - 2},
        .causal_lengths = {1, 1, 0},
        .query_valid = {1, 1, 0},
        .valid_row_indices = Numbers{0, 1},
        .segment_cu_q = {0, 1, 3},
        .segment_cu_k = {0, 1, 3},
        .q_causal_offsets = {0, 0},
        .key_source_indices = Numbers{0, kMostRows - 2, kMostRows - 1},
        .max_seqlen_q = 2,
        .max_seqlen_k = 2,
        .total_key_tokens = kMostRows,
        .all_rows_nonempty = false,
    };
    EXPECT_EQ(text(build(layout)), text(want));
  }
}

TEST_P(Metadata, CallDoesNotChangeItsArguments) {
  PackedLayout layout = example();
  layout.query_indices = interval(2, 9);
  layout.padding_mask = std::vector<std::uint8_t>(8, 1);
  const PackedLayout before = layout;
  run_placed(layout.args(), runtime());
  EXPECT_EQ(text(layout), text(before));
}

TEST(MetadataBackends, HostBackendsGiveTheSame) {
  PackedLayout layout = example();
  layout.query_indices = interval(2, 9);
  for (const Backend backend : {Backend::kAuto, Backend::kCpu, Backend::kReference}) {
    Runtime runtime;
    runtime.backend = backend;
    EXPECT_EQ(text(build(layout, runtime)), text(by_definition(layout)));
  }
}

class LenientMetadata : public MetadataTest {};
INSTANTIATE_TEST_SUITE_P(Every, LenientMetadata, kMetadataEngines, engine_name);

PackedLayout lenient(std::vector<std::int32_t> cu, std::vector<std::int32_t> padded) {
  PackedLayout layout;
  layout.total_key_tokens = padded.back();
  layout.cu_seqlens = std::move(cu);
  layout.cu_seqlens_padded = std::move(padded);
  layout.lenient = true;
  return layout;
}

TEST_P(LenientMetadata, EmptyDocumentsInFrontMiddleAndTail) {
  // Real lengths 0 3 0 0 2 0 in storage 0 4 0 2 2 0.
  const PackedLayout layout = lenient({0, 0, 3, 3, 3, 5, 5}, {0, 0, 4, 4, 6, 8, 8});
  const MetadataFields want = {
      .starts = {0, 0, 0, 0, 4, 4, 6, 6},
      .causal_lengths = {1, 2, 3, 0, 0, 0, 1, 2},
      .query_valid = {1, 1, 1, 0, 0, 0, 1, 1},
      .valid_row_indices = Numbers{0, 1, 2, 6, 7},
      .segment_cu_q = {0, 4, 6, 8},
      .segment_cu_k = {0, 4, 6, 8},
      .q_causal_offsets = {0, 0, 0},
      .key_source_indices = std::nullopt,
      .max_seqlen_q = 4,
      .max_seqlen_k = 4,
      .total_key_tokens = 8,
      .all_rows_nonempty = false,
  };
  EXPECT_EQ(text(build(layout)), text(want));
}

TEST_P(LenientMetadata, DocumentWithoutStorageChangesNothing) {
  const MetadataFields want = build(lenient({0, 3, 5}, {0, 4, 8}));
  EXPECT_EQ(text(build(lenient({0, 0, 3, 5}, {0, 0, 4, 8}))), text(want));
  EXPECT_EQ(text(build(lenient({0, 3, 3, 3, 5}, {0, 4, 4, 4, 8}))), text(want));
  EXPECT_EQ(text(build(lenient({0, 3, 5, 5, 5, 5}, {0, 4, 8, 8, 8, 8}))), text(want));
}

TEST_P(LenientMetadata, TailOfRepeatedBoundariesNeedsNoPaddedLayout) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 5, 5, 5};
  layout.total_key_tokens = 5;
  layout.lenient = true;
  layout.max_seqlen = 3;
  EXPECT_EQ(build(layout).causal_lengths, (Numbers{1, 2, 3, 1, 2}));
}

TEST_P(LenientMetadata, StorageOfAnEmptyDocumentIsAllPadding) {
  const MetadataFields got = build(lenient({0, 0, 2, 2}, {0, 3, 5, 6}));
  EXPECT_EQ(got.starts, (Numbers{0, 0, 0, 3, 3, 5}));
  EXPECT_EQ(got.causal_lengths, (Numbers{0, 0, 0, 1, 2, 0}));
  EXPECT_EQ(*got.valid_row_indices, (Numbers{3, 4}));
  EXPECT_EQ(got.segment_cu_q, (Numbers{0, 3, 5, 6}));
}

TEST_P(LenientMetadata, AllDocumentsMayBeEmpty) {
  PackedLayout layout = lenient({0, 0, 0}, {0, 2, 3});
  layout.max_seqlen = 0;
  const MetadataFields got = build(layout);
  EXPECT_EQ(got.causal_lengths, (Numbers{0, 0, 0}));
  EXPECT_TRUE(got.valid_row_indices->empty());
  EXPECT_EQ(got.segment_cu_q, (Numbers{0, 2, 3}));
}

TEST_P(LenientMetadata, IsTheStrictAnswerWhereStrictIsAllowed) {
  PackedLayout layout = example();
  layout.lenient = true;
  EXPECT_EQ(text(build(layout)), text(build(example())));
}

}  // namespace
}  // namespace flashdsa::test
