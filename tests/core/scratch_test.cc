// Scratch memory: who gives it, who gets it back, what is counted.

#include "core/scratch.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "tests/support/expect_error.h"

#ifdef __SANITIZE_ADDRESS__
// The sanitizer ends the program at a request that no machine could meet; here it is to fail, as it
// does without the sanitizer.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
#endif

namespace flashdsa::test {
namespace {

using core::Carver;
using core::Scratch;
using core::WorkerScratch;

struct Call {
  void* data;
  std::size_t bytes;
  Device device;
  void* stream;

  friend bool operator==(const Call&, const Call&) = default;
};

class RecordingAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, Stream stream) noexcept override {
    void* data = std::malloc(bytes);
    allocated.push_back({data, bytes, device, stream.handle});
    return data;
  }
  void deallocate(void* data, std::size_t bytes, Device device, Stream stream) noexcept override {
    returned.push_back({data, bytes, device, stream.handle});
    std::free(data);
  }

  std::vector<Call> allocated;
  std::vector<Call> returned;
};

class EmptyAllocator final : public Allocator {
 public:
  void* allocate(std::size_t, Device, Stream) noexcept override { return nullptr; }
  void deallocate(void*, std::size_t, Device, Stream) noexcept override { ++returned; }

  int returned = 0;
};

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 64 == 0; }

TEST(Scratch, DefaultMemoryIsAlignedAndWritable) {
  const Runtime runtime;
  for (const std::size_t bytes : {1, 63, 64, 65, 100000}) {
    const Scratch scratch(runtime, bytes);
    ASSERT_NE(scratch.data(), nullptr);
    EXPECT_TRUE(is_aligned(scratch.data())) << bytes;
    std::memset(scratch.data(), 1, bytes);
  }
}

TEST(Scratch, OfNoBytesAsksForNothing) {
  RecordingAllocator allocator;
  Usage usage;
  Runtime runtime;
  runtime.allocator = &allocator;
  runtime.usage = &usage;
  {
    const Scratch scratch(runtime, 0);
    EXPECT_EQ(scratch.data(), nullptr);
  }
  EXPECT_TRUE(allocator.allocated.empty());
  EXPECT_TRUE(allocator.returned.empty());
  EXPECT_EQ(usage.peak_scratch_bytes, 0u);
}

TEST(Scratch, CallersAllocatorGetsBackWhatItGave) {
  RecordingAllocator allocator;
  int stream = 0;
  Runtime runtime;
  runtime.allocator = &allocator;
  runtime.stream = {&stream};
  const Device device{DeviceKind::kCuda, 2};
  {
    const Scratch first(runtime, 100), second(runtime, 7, device);
    ASSERT_EQ(allocator.allocated.size(), 2u);
    EXPECT_EQ(first.data(), allocator.allocated[0].data);
    EXPECT_EQ(second.data(), allocator.allocated[1].data);
    EXPECT_TRUE(allocator.returned.empty());
  }
  EXPECT_EQ(allocator.allocated[0], (Call{allocator.allocated[0].data, 100, Device{}, &stream}));
  EXPECT_EQ(allocator.allocated[1], (Call{allocator.allocated[1].data, 7, device, &stream}));
  ASSERT_EQ(allocator.returned.size(), 2u);
  EXPECT_EQ(allocator.returned[0], allocator.allocated[1]);
  EXPECT_EQ(allocator.returned[1], allocator.allocated[0]);
}

TEST(Scratch, FailingAllocatorIsAnErrorThatNamesTheBytes) {
  EmptyAllocator allocator;
  Usage usage;
  Runtime runtime;
  runtime.allocator = &allocator;
  runtime.usage = &usage;
  expect_error([&] { const Scratch scratch(runtime, 12345); }, ErrorCode::kMemory,
               "scratch: expected 12345 bytes on cpu, got none");
  expect_error([&] { const Scratch scratch(runtime, 1, {DeviceKind::kCuda, 1}); },
               ErrorCode::kMemory, "scratch: expected 1 bytes on cuda:1, got none");
  EXPECT_EQ(usage.scratch_bytes, 0u);
  EXPECT_EQ(usage.peak_scratch_bytes, 0u);
  EXPECT_EQ(allocator.returned, 0);
}

TEST(Scratch, MoreThanTheMachineHasIsAnError) {
  const Runtime runtime;
  expect_error([&] { const Scratch scratch(runtime, std::size_t{1} << 60); }, ErrorCode::kMemory,
               "scratch: expected 1152921504606846976 bytes on cpu, got none");
  // Rounded up to whole lines this number of bytes would wrap to none.
  expect_error([&] { const Scratch scratch(runtime, std::numeric_limits<std::size_t>::max()); },
               ErrorCode::kMemory, "scratch: expected 18446744073709551615 bytes on cpu, got none");
}

TEST(Usage, CountsWhatIsHeldAndTheMostThatWasHeld) {
  Usage usage;
  Runtime runtime;
  runtime.usage = &usage;
  {
    const Scratch first(runtime, 100);
    EXPECT_EQ(usage.scratch_bytes, 100u);
    {
      const Scratch second(runtime, 1000);
      EXPECT_EQ(usage.scratch_bytes, 1100u);
    }
    EXPECT_EQ(usage.scratch_bytes, 100u);
    EXPECT_EQ(usage.peak_scratch_bytes, 1100u);
    const Scratch third(runtime, 200);
    EXPECT_EQ(usage.scratch_bytes, 300u);
  }
  EXPECT_EQ(usage.scratch_bytes, 0u);
  EXPECT_EQ(usage.peak_scratch_bytes, 1100u);
}

TEST(Usage, CountsScratchOfSeveralThreads) {
  Usage usage;
  Runtime runtime;
  runtime.usage = &usage;
  const Scratch held(runtime, 5000);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int repeat = 0; repeat < 2000; ++repeat) const Scratch scratch(runtime, 64);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(usage.scratch_bytes, 5000u);
  EXPECT_GE(usage.peak_scratch_bytes, 5064u);
  EXPECT_LE(usage.peak_scratch_bytes, 5256u);
}

TEST(Carver, PiecesAreAlignedAndDisjoint) {
  alignas(64) std::byte memory[1024];
  Carver carver(memory);
  const auto* first = carver.take<char>(1);
  const auto* second = carver.take<float>(17);
  const auto* third = carver.take<double>(8);
  const auto* fourth = carver.take<char>(64);
  EXPECT_EQ(static_cast<const void*>(first), memory);
  EXPECT_EQ(static_cast<const void*>(second), memory + 64);
  EXPECT_EQ(static_cast<const void*>(third), memory + 64 + 128);
  EXPECT_EQ(static_cast<const void*>(fourth), memory + 64 + 128 + 64);
  EXPECT_EQ(carver.bytes(), 64u + 128 + 64 + 64);
}

TEST(Carver, PieceOfNothingTakesNothing) {
  alignas(64) std::byte memory[64];
  Carver carver(memory);
  carver.take<float>(0);
  EXPECT_EQ(carver.bytes(), 0u);
  EXPECT_EQ(static_cast<void*>(carver.take<float>(1)), memory);
}

TEST(Carver, CountingPassNeedsNoMemory) {
  Carver counter;
  EXPECT_EQ(counter.take<float>(17), nullptr);
  EXPECT_EQ(counter.take<char>(1), nullptr);
  EXPECT_EQ(counter.bytes(), 128u + 64);
}

TEST(WorkerScratch, PiecesAreAlignedAndDisjoint) {
  Usage usage;
  Runtime runtime;
  runtime.usage = &usage;
  struct Sizes {
    std::size_t first, second;
  };
  for (const Sizes sizes : {Sizes{1, 1}, Sizes{64, 64}, Sizes{65, 100}, Sizes{0, 3}, Sizes{3, 0}}) {
    constexpr int kWorkers = 5;
    const WorkerScratch scratch(runtime, kWorkers, sizes.first, sizes.second);
    // Each piece gets a value of its own; all are read when all are written.
    for (int worker = 0; worker < kWorkers; ++worker) {
      EXPECT_TRUE(is_aligned(scratch.first(worker)));
      EXPECT_TRUE(is_aligned(scratch.second(worker)));
      std::memset(scratch.first(worker), 2 * worker, sizes.first);
      std::memset(scratch.second(worker), 2 * worker + 1, sizes.second);
    }
    for (int worker = 0; worker < kWorkers; ++worker) {
      const auto* first = static_cast<const unsigned char*>(scratch.first(worker));
      const auto* second = static_cast<const unsigned char*>(scratch.second(worker));
      for (std::size_t i = 0; i < sizes.first; ++i) ASSERT_EQ(first[i], 2 * worker);
      for (std::size_t i = 0; i < sizes.second; ++i) ASSERT_EQ(second[i], 2 * worker + 1);
    }
  }
  EXPECT_EQ(usage.scratch_bytes, 0u);
  EXPECT_EQ(usage.peak_scratch_bytes, 5u * (128 + 128));
}

}  // namespace
}  // namespace flashdsa::test
