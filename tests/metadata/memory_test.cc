// Whichever allocation that grows with the call fails, the call ends with Error(kMemory).

#include <cstdlib>
#include <new>

#include "tests/metadata/layout.h"
#include "tests/support/expect_error.h"

namespace {

constexpr std::size_t kLargeBytes = 1000;

// Large allocations of this thread until one fails; below 0 none does.
thread_local int large_allocations_left = -1;

bool next_fails(std::size_t bytes) {
  if (bytes < kLargeBytes || large_allocations_left < 0) return false;
  return large_allocations_left-- == 0;
}

}  // namespace

void* operator new(std::size_t bytes) {
  void* data = next_fails(bytes) ? nullptr : std::malloc(bytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace flashdsa::test {
namespace {

TEST(MetadataMemory, FailedAllocationIsAnErrorOfTheLibrary) {
  PackedLayout layout;
  for (std::int32_t d = 0; d <= 1000; ++d) layout.cu_seqlens.push_back(d);
  layout.total_key_tokens = 1000;
  const PackedMetadataArgs args = layout.args();
  int failures = 0;
  for (bool succeeded = false; !succeeded;) {
    ASSERT_LT(failures, 1000);
    large_allocations_left = failures;
    try {
      prepare_packed_metadata(args);
      succeeded = true;
    } catch (const Error& error) {
      ++failures;
      EXPECT_EQ(error.code(), ErrorCode::kMemory);
      EXPECT_STREQ(error.what(), "prepare_packed_metadata: out of memory");
    }
    large_allocations_left = -1;
  }
  EXPECT_GE(failures, 3);  // both lists of boundaries and the segments
}

}  // namespace
}  // namespace flashdsa::test
