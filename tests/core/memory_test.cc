// What the public functions that are no operation do without memory.

#include "core/out_of_memory.h"
#include "tests/support/expect_error.h"
#include "tests/support/failing_memory.h"

namespace flashdsa::test {
namespace {

template <typename Call>
int memory_failures(const Call& call) {
  return fail_every_new(
      {}, [&] { return FallibleCall{[&](const Runtime&) { call(); }, [] { return true; }}; });
}

TEST(Memory, EveryFunctionWithoutItThrowsAnErrorOfTheLibrary) {
  const Tensor tensor = Tensor::host(DType::kInt32, {200, 300, 400});
  const std::vector<std::int64_t> shape = {1000, 2000, 3000}, negative = {4000, -1000000, 2000};
  TensorView strided = tensor;
  strided.strides[0] = 5;
  const Device far{DeviceKind::kCuda, -1234567890};
  EXPECT_GT(memory_failures([&] { Tensor::host(DType::kBool, shape); }), 0);
  EXPECT_GT(memory_failures([&] { TensorView::contiguous(nullptr, DType::kBool, negative); }), 0);
  EXPECT_GT(memory_failures([&] { describe(tensor); }), 0);
  EXPECT_GT(memory_failures([&] { device_name(far); }), 0);
  EXPECT_GT(memory_failures([&] { copy_to(tensor, {}); }), 0);
  EXPECT_GT(memory_failures([&] { copy_to(strided, {}); }), 0);
  EXPECT_GT(memory_failures([] { backends(); }), 0);
  EXPECT_GT(memory_failures([] { operations(); }), 0);
  EXPECT_GT(memory_failures([] { simd_targets(); }), 0);
}

TEST(Memory, TheSentenceNamesTheOperationIfThereIsMemoryForIt) {
  expect_error([] { core::throw_out_of_memory("a_long_name_of_an_operation"); }, ErrorCode::kMemory,
               "a_long_name_of_an_operation: out of memory");
  const auto throw_without_memory = [] {
    const FailingNew failing(0, true);
    core::throw_out_of_memory("a_long_name_of_an_operation");
  };
  expect_error(throw_without_memory, ErrorCode::kMemory, "out of memory");
}

}  // namespace
}  // namespace flashdsa::test
