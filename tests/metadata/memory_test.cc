// Whichever allocation fails, the call ends with Error(kMemory).

#include <cstdlib>
#include <new>

#include "tests/metadata/layout.h"
#include "tests/support/expect_error.h"

namespace {

// Allocations of this thread until one fails; below 0 none does.
thread_local int allocations_left = -1;

}  // namespace

void* operator new(std::size_t bytes) {
  const bool fails = allocations_left == 0;
  if (allocations_left >= 0) --allocations_left;
  void* data = fails ? nullptr : std::malloc(bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace flashdsa::test {
namespace {

TEST(MetadataMemory, FailedAllocationIsAnErrorOfTheLibrary) {
  PackedLayout layout;
  layout.cu_seqlens = {0, 3, 7, 9};
  layout.cu_seqlens_padded = {0, 4, 9, 12};
  layout.total_key_tokens = 12;
  layout.query_indices = {{2, 3, 4, 5, 6, 7, 8, 9}};
  const PackedMetadataArgs args = layout.args();
  int failures = 0;
  for (bool succeeded = false; !succeeded; ++failures) {
    ASSERT_LT(failures, 1000);
    allocations_left = failures;
    try {
      prepare_packed_metadata(args);
      succeeded = true;
      allocations_left = -1;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kMemory);
      EXPECT_STREQ(error.what(), "prepare_packed_metadata: out of memory");
    }
  }
  EXPECT_GT(failures, 8);  // eight tensors at least
}

}  // namespace
}  // namespace flashdsa::test
