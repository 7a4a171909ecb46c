// What the core does with a device: copies, memory, the list of backends.

#include "tests/support/cuda/device_test.h"

#include <algorithm>

#include "core/make_tensor.h"
#include "core/scratch.h"

namespace flashdsa::test {
namespace {

class CoreOnDevice : public DeviceTest {};

TEST_F(CoreOnDevice, BackendIsListedWithItsDevice) {
  EXPECT_TRUE(backends()[0].available);
  EXPECT_EQ(backends()[0].detail, "cuda:0");
}

TEST_F(CoreOnDevice, CopyThereAndBackIsTheSame) {
  const Tensor host = Tensor::host(DType::kInt32, {3, 1000});
  for (std::size_t i = 0; i < 3000; ++i)
    host.span<std::int32_t>()[i] = static_cast<std::int32_t>(i);
  for (const Runtime& on : {Runtime{}, runtime()}) {
    const Tensor there = copy_to(host, kFirstDevice, on);
    EXPECT_EQ(there.view().device, kFirstDevice);
    const Tensor moved = copy_to(there, kFirstDevice, on);
    EXPECT_NE(moved.view().data, there.view().data);
    const Tensor back = copy_to(moved, Device{}, on);
    EXPECT_EQ(describe(back), "int32 [3, 1000]");
    EXPECT_TRUE(std::ranges::equal(back.span<std::int32_t>(), host.span<std::int32_t>()));
  }
}

TEST_F(CoreOnDevice, TensorWithoutElementsNeedsNoMemory) {
  const Tensor none =
      copy_to(TensorView::contiguous(nullptr, DType::kInt64, {3, 0}), kFirstDevice, runtime());
  EXPECT_EQ(none.view().data, nullptr);
  EXPECT_EQ(describe(copy_to(none, Device{}, runtime())), "int64 [3, 0]");
}

TEST_F(CoreOnDevice, DefaultMemoryIsAlignedAndUsableOnItsStream) {
  const Runtime on = runtime();
  for (const std::size_t bytes : {1, 63, 64, 65, 100000}) {
    const core::Scratch scratch(on, bytes, kFirstDevice);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(scratch.data()) % 64, 0u);
    check_cuda(cudaMemsetAsync(scratch.data(), 1, bytes, native(stream())), "writing scratch");
  }
  stream().wait();
}

TEST_F(CoreOnDevice, MoreThanTheDeviceHasIsAMemoryError) {
  const Runtime on = runtime();
  expect_error([&] { const core::Scratch scratch(on, std::size_t{1} << 50, kFirstDevice); },
               ErrorCode::kMemory, "scratch: expected 1125899906842624 bytes on cuda:0, got none");
  stream().wait();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // no trace in the caller's error state
}

TEST_F(CoreOnDevice, TensorLivesInTheCallersMemory) {
  ArenaAllocator arena(1 << 16);
  Runtime on = runtime();
  on.allocator = &arena;
  {
    const std::int64_t shape[] = {5, 7};
    const Tensor tensor = core::make_tensor(DType::kFloat32, shape, kFirstDevice, on);
    const Tensor same = tensor;
    EXPECT_EQ(arena.allocations(), 1);
    EXPECT_EQ(arena.returned(), 0);
  }
  EXPECT_EQ(arena.returned(), 1);
}

TEST_F(CoreOnDevice, CurrentDeviceOfTheCallerStays) {
  int before = -1, after = -1;
  check_cuda(cudaGetDevice(&before), "asking for the device");
  const Tensor there = copy_to(Tensor::host(DType::kInt32, {4}), kFirstDevice, runtime());
  check_cuda(cudaGetDevice(&after), "asking for the device");
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace flashdsa::test
