#include "tests/support/failing_memory.h"

#include <cstdlib>
#include <new>

namespace {

// What operator new of this thread does.
struct Plan {
  bool armed = false;
  bool for_good = false;
  int spared = 0;
  bool failed = false;
};
thread_local Plan plan;

bool next_fails() {
  if (!plan.armed) return false;
  if (plan.spared-- > 0) return false;
  plan.failed = true;
  plan.armed = plan.for_good;
  return true;
}

}  // namespace

// All forms that the delete below meets: with AddressSanitizer those that are left out would come
// from its own heap (std::stable_sort takes its buffer by the nothrow form).
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return next_fails() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

void* operator new(std::size_t bytes) {
  void* data = operator new(bytes, std::nothrow);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}

void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }

namespace flashdsa::test {
namespace {

// Ends with the code of the Error that the call threw; none when it threw none.
std::optional<ErrorCode> outcome(const FallibleCall& call, const Runtime& runtime) {
  try {
    call.run(runtime);
  } catch (const Error& error) {
    return error.code();
  }
  return std::nullopt;
}

void expect_clean_failure(const FallibleCall& call, std::optional<ErrorCode> code, int spared) {
  EXPECT_EQ(code, ErrorCode::kMemory) << "behind " << spared << " others";
  EXPECT_TRUE(call.outputs_untouched()) << "behind " << spared << " others";
}

}  // namespace

FailingNew::FailingNew(int spared, bool for_good) { plan = {true, for_good, spared, false}; }

FailingNew::~FailingNew() { plan.armed = false; }

bool FailingNew::failed() const { return plan.failed; }

void* FailingAllocator::allocate(std::size_t bytes, Device, Stream) noexcept {
  if (spared_-- == 0) return nullptr;
  live_bytes_ += bytes;
  return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}

void FailingAllocator::deallocate(void* data, std::size_t bytes, Device, Stream) noexcept {
  live_bytes_ -= bytes;
  std::free(data);
}

int fail_every_new(const Runtime& runtime, const std::function<FallibleCall()>& make) {
  int failures = 0;
  for (const bool for_good : {false, true}) {
    for (int spared = 0;; ++spared) {
      const FallibleCall call = make();
      Usage usage;
      Runtime on = runtime;
      on.usage = &usage;
      std::optional<ErrorCode> code;
      bool failed = false;
      {
        const FailingNew failing(spared, for_good);
        code = outcome(call, on);
        failed = failing.failed();
      }
      EXPECT_EQ(usage.scratch_bytes, 0u);
      if (!failed) break;
      expect_clean_failure(call, code, spared);
      ++failures;
    }
  }
  return failures;
}

int fail_every_allocation(const Runtime& runtime, const std::function<FallibleCall()>& make) {
  for (int spared = 0;; ++spared) {
    const FallibleCall call = make();
    FailingAllocator allocator(spared);
    Usage usage;
    Runtime on = runtime;
    on.allocator = &allocator;
    on.usage = &usage;
    const std::optional<ErrorCode> code = outcome(call, on);
    EXPECT_EQ(allocator.live_bytes(), 0u) << "behind " << spared << " others";
    EXPECT_EQ(usage.scratch_bytes, 0u);
    if (!allocator.failed()) return spared;
    expect_clean_failure(call, code, spared);
  }
}

}  // namespace flashdsa::test
