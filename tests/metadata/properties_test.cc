// Random layouts against the definition, and laws between calls.

#include <algorithm>

#include "tests/metadata/fixture.h"
#include "tests/support/property.h"

namespace flashdsa::test {
namespace {

class MetadataProperty : public MetadataTest {};
INSTANTIATE_TEST_SUITE_P(Every, MetadataProperty, kMetadataEngines, engine_name);

// Up to six documents of up to five tokens with up to three rows of padding.
PackedLayout draw_documents() {
  PackedLayout layout;
  layout.lenient = *rc::gen::arbitrary<bool>();
  const bool has_padding = *rc::gen::arbitrary<bool>();
  const int documents = *rc::gen::inRange(1, 7);
  std::vector<std::int32_t> cu = {0}, padded = {0};
  for (int d = 0; d < documents; ++d) {
    const std::int32_t real = *rc::gen::inRange(layout.lenient ? 0 : 1, 6);
    const std::int32_t extra = has_padding ? *rc::gen::inRange(0, 4) : 0;
    cu.push_back(cu.back() + real);
    padded.push_back(padded.back() + real + extra);
  }
  if (padded.back() == 0) {  // the storage has at least one row
    cu.push_back(1);
    padded.push_back(1);
  }
  layout.cu_seqlens = cu;
  layout.total_key_tokens = padded.back();
  if (has_padding) layout.cu_seqlens_padded = padded;
  if (*rc::gen::arbitrary<bool>()) {
    layout.max_seqlen = 0;
    for (std::size_t d = 1; d < cu.size(); ++d) {
      layout.max_seqlen = std::max<std::int64_t>(*layout.max_seqlen, cu[d] - cu[d - 1]);
    }
  }
  return layout;
}

// No list, one interval, or any ascending list.
void draw_queries(PackedLayout& layout) {
  const std::int64_t total = layout.total_key_tokens;
  layout.query_mode = *rc::gen::arbitrary<bool>() ? QueryMode::kGeneral : QueryMode::kContiguous;
  layout.narrow_indices = *rc::gen::arbitrary<bool>();
  if (*rc::gen::inRange(0, 4) == 0) return;
  const auto first = *rc::gen::inRange<std::int64_t>(0, total);
  const auto end = *rc::gen::inRange<std::int64_t>(first + 1, total + 1);
  const bool with_gaps = layout.query_mode == QueryMode::kGeneral;
  layout.query_indices.emplace();
  for (std::int64_t g = first; g < end; ++g) {
    if (!with_gaps || *rc::gen::arbitrary<bool>()) layout.query_indices->push_back(g);
  }
  if (layout.query_indices->empty()) layout.query_indices->push_back(first);
}

void draw_mask(PackedLayout& layout) {
  if (*rc::gen::arbitrary<bool>()) return;
  const std::size_t rows = layout.query_indices ? layout.query_indices->size()
                                                : static_cast<std::size_t>(layout.total_key_tokens);
  layout.padding_mask.emplace();
  for (std::size_t t = 0; t < rows; ++t) {
    layout.padding_mask->push_back(*rc::gen::arbitrary<bool>() ? 1 : 0);
  }
}

PackedLayout draw_layout() {
  PackedLayout layout = draw_documents();
  draw_queries(layout);
  draw_mask(layout);
  return layout;
}

TEST_P(MetadataProperty, IsTheDefinition) {
  check_property(is_on_device() ? 500 : 5000, 11, [&] {
    const PackedLayout layout = draw_layout();
    RC_LOG() << text(layout) << '\n';
    RC_ASSERT(text(build(layout)) == text(by_definition(layout)));
  });
}

TEST_P(MetadataProperty, RowDoesNotDependOnTheOtherRows) {
  check_property(is_on_device() ? 100 : 1000, 12, [&] {
    PackedLayout layout = draw_layout();
    if (!layout.query_indices) return;
    RC_LOG() << text(layout) << '\n';
    const MetadataFields together = build(layout);
    for (std::size_t t = 0; t < together.starts.size(); ++t) {
      PackedLayout alone = layout;
      alone.query_indices = {{layout.query_indices->at(t)}};
      if (layout.padding_mask) alone.padding_mask = {{layout.padding_mask->at(t)}};
      const MetadataFields single = build(alone);
      RC_ASSERT(single.starts[0] == together.starts[t]);
      RC_ASSERT(single.causal_lengths[0] == together.causal_lengths[t]);
      RC_ASSERT(single.query_valid[0] == together.query_valid[t]);
    }
  });
}

TEST_P(MetadataProperty, DocumentWithoutStorageChangesNothing) {
  check_property(is_on_device() ? 100 : 1000, 13, [&] {
    PackedLayout layout = draw_layout();
    layout.lenient = true;
    const MetadataFields before = build(layout);
    const auto place = *rc::gen::inRange<std::size_t>(0, layout.cu_seqlens.size());
    const auto repeat = [&](std::vector<std::int32_t>& boundaries) {
      const auto at = boundaries.begin() + static_cast<std::ptrdiff_t>(place);
      boundaries.insert(at, *at);
    };
    repeat(layout.cu_seqlens);
    if (layout.cu_seqlens_padded) repeat(*layout.cu_seqlens_padded);
    RC_LOG() << text(layout) << '\n';
    RC_ASSERT(text(build(layout)) == text(before));
  });
}

}  // namespace
}  // namespace flashdsa::test
