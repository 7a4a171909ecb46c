// Whichever memory a build lacks, it ends with Error(kMemory).

#include "tests/metadata/layout.h"
#include "tests/support/expect_error.h"
#include "tests/support/failing_memory.h"

namespace flashdsa::test {
namespace {

// Three documents with padding, some of whose rows are queries: a result with every field.
PackedLayout layout() {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12};
  layout.total_key_tokens = 12;
  layout.query_indices = {2, 3, 4, 5, 6, 7, 8, 9};
  layout.padding_mask = std::vector<std::uint8_t>(8);
  return layout;
}

FallibleCall build_call(const PackedMetadataArgs& args) {
  return {[&args](const Runtime& runtime) { prepare_packed_metadata(args, runtime); },
          [] { return true; }};
}

void expect_memory_errors(const PackedMetadataArgs& args) {
  const auto make = [&] { return build_call(args); };
  EXPECT_GT(fail_every_new({}, make), 0);
  EXPECT_EQ(fail_every_allocation({}, make), 0);
}

TEST(MetadataMemory, FailedAllocationIsAnErrorOfTheLibrary) {
  PackedLayout good = layout();
  PackedMetadataArgs args = good.args();
  for (const bool capture_safe : {false, true}) {
    args.capture_safe = capture_safe;
    expect_memory_errors(args);
  }
}

TEST(MetadataMemory, FailedAllocationOfARefusalIsAnErrorOfTheLibrary) {
  PackedLayout bad = layout();
  bad.cu_seqlens[1] = 0;
  PackedMetadataArgs args = bad.args();
  for (const bool capture_safe : {false, true}) {
    args.capture_safe = capture_safe;
    expect_memory_errors(args);
  }
}

TEST(MetadataMemory, TheSentenceNamesTheOperation) {
  PackedLayout good = layout();
  const PackedMetadataArgs args = good.args();
  const auto build_without_memory = [&] {
    const FailingNew failing(0, false);
    prepare_packed_metadata(args);
  };
  expect_error(build_without_memory, ErrorCode::kMemory, "prepare_packed_metadata: out of memory");
}

}  // namespace
}  // namespace flashdsa::test
