// What the library says of itself and of the machine.

#include "flashdsa/runtime.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "core/simd/target.h"
#include "tests/support/engines.h"
#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

TEST(Backends, HaveTheNamesOfTheCommandLine) {
  EXPECT_EQ(backend_name(Backend::kAuto), "auto");
  EXPECT_EQ(backend_name(Backend::kReference), "reference");
  EXPECT_EQ(backend_name(Backend::kCpu), "cpu");
  EXPECT_EQ(backend_name(Backend::kSm90), "sm90");
  EXPECT_EQ(backend_name(Backend::kSm80), "sm80");
  EXPECT_EQ(backend_name(static_cast<Backend>(200)), "unknown");
}

TEST(Backends, AreListedBestFirst) {
  std::vector<Backend> order;
  for (const BackendStatus& status : backends()) order.push_back(status.backend);
  EXPECT_EQ(order,
            (std::vector{Backend::kSm90, Backend::kSm80, Backend::kCpu, Backend::kReference}));
}

TEST(Backends, HostBackendsAreAlwaysThere) {
  const auto list = backends();
  EXPECT_TRUE(list[2].available);
  EXPECT_EQ(list[2].detail, std::string(simd_target_name(simd_targets().front())) + ", " +
                                std::to_string(hardware_threads()) + " threads");
  EXPECT_TRUE(list[3].available);
  EXPECT_EQ(list[3].detail, "float64, plain loops");
}

TEST(Backends, EveryEntrySaysWhy) {
  for (const BackendStatus& status : backends()) {
    EXPECT_FALSE(status.detail.empty()) << backend_name(status.backend);
  }
}

TEST(CopyTo, HostCopyHasItsOwnMemory) {
  const Tensor tensor = Tensor::host(DType::kInt32, {2, 3});
  const auto values = tensor.span<std::int32_t>();
  std::iota(values.begin(), values.end(), 40);
  const Tensor copy = copy_to(tensor, {});
  values[0] = -1;
  EXPECT_EQ(describe(copy), "int32 [2, 3]");
  EXPECT_EQ(copy.view().device, Device{});
  const auto copied = copy.span<std::int32_t>();
  EXPECT_EQ(std::vector(copied.begin(), copied.end()), (std::vector{40, 41, 42, 43, 44, 45}));
}

TEST(CopyTo, TakesATensorWithoutElements) {
  EXPECT_EQ(describe(copy_to(TensorView::contiguous(nullptr, DType::kInt64, {3, 0}), {})),
            "int64 [3, 0]");
}

TEST(CopyTo, RefusesAStridedTensor) {
  const Tensor tensor = Tensor::host(DType::kInt32, {2, 3});
  TensorView view = tensor;
  view.strides[0] = 4;
  expect_error([&] { return copy_to(view, {}); }, ErrorCode::kValue,
               "copy_to: the tensor must be contiguous, got int32 [2, 3]");
}

TEST(CopyTo, RefusesARankThatNoTensorHas) {
  TensorView view;
  view.dtype = DType::kInt32;
  view.rank = 9;
  expect_error([&] { return copy_to(view, {}); }, ErrorCode::kValue,
               "copy_to: the tensor must be contiguous, got int32 of rank 9");
}

TEST(CopyTo, NeedsTheDevice) {
  constexpr Device kNoSuchDevice{DeviceKind::kCuda, 63};
  const Tensor host = Tensor::host(DType::kInt32, {2});
  TensorView device = host;
  device.device = kNoSuchDevice;
  if (kBuildHasCuda) {
    expect_error([&] { return copy_to(host, kNoSuchDevice); }, ErrorCode::kMemory,
                 "tensor: expected 8 bytes on cuda:63, got none");
    return;
  }
  constexpr auto kSentence = "cuda: device memory cannot be used (not part of this build)";
  expect_error([&] { return copy_to(host, kNoSuchDevice); }, ErrorCode::kUnavailable, kSentence);
  expect_error([&] { return copy_to(device, {}); }, ErrorCode::kUnavailable, kSentence);
}

// The whole text is what the format reads.
TEST(Version, IsThreeNumbers) {
  const std::string text(version());
  ASSERT_FALSE(text.empty());
  int numbers[3], length = 0;
  std::sscanf(text.c_str(), "%d.%d.%d%n", &numbers[0], &numbers[1], &numbers[2], &length);
  EXPECT_EQ(static_cast<std::size_t>(length), text.size()) << text;
}

TEST(BuildDescription, NamesCompilerAndBuildType) {
  const std::string text(build_description());
  ASSERT_FALSE(text.empty());
  char compiler[32], release[32], type[32];
  int length = 0;
  std::sscanf(text.c_str(), "%31[A-Za-z] %31[0-9.], %31[A-Za-z]%n", compiler, release, type,
              &length);
  EXPECT_EQ(static_cast<std::size_t>(length), text.size()) << text;
}

TEST(SimdTargets, HaveTheirNames) {
  EXPECT_EQ(simd_target_name(SimdTarget::kAuto), "auto");
  EXPECT_EQ(simd_target_name(SimdTarget::kBaseline), "baseline");
  EXPECT_EQ(simd_target_name(SimdTarget::kAvx2), "avx2");
  EXPECT_EQ(simd_target_name(SimdTarget::kAvx512), "avx512");
  EXPECT_EQ(simd_target_name(SimdTarget::kAvx512Bf16), "avx512bf16");
  EXPECT_EQ(simd_target_name(static_cast<SimdTarget>(200)), "unknown");
}

TEST(SimdTargets, AreListedBestFirstAndEndAtTheBaseline) {
  const auto targets = simd_targets();
  ASSERT_FALSE(targets.empty());
  EXPECT_TRUE(std::is_sorted(targets.rbegin(), targets.rend()));
  EXPECT_EQ(std::adjacent_find(targets.begin(), targets.end()), targets.end());
  EXPECT_EQ(targets.back(), SimdTarget::kBaseline);
}

TEST(SimdTargets, AutoIsTheBestAndEachPresentOneIsItself) {
  EXPECT_EQ(core::simd::choose(SimdTarget::kAuto), simd_targets().front());
  for (const SimdTarget target : simd_targets()) EXPECT_EQ(core::simd::choose(target), target);
}

TEST(SimdTargets, AbsentOneIsRefused) {
  std::string present;
  for (const SimdTarget target : simd_targets()) {
    present += (present.empty() ? "" : ", ") + std::string(simd_target_name(target));
  }
  // A number that no set has is absent everywhere; the others where the CPU or build lacks them.
  for (const SimdTarget target : {SimdTarget::kAvx2, SimdTarget::kAvx512, SimdTarget::kAvx512Bf16,
                                  static_cast<SimdTarget>(200)}) {
    const auto targets = simd_targets();
    if (std::find(targets.begin(), targets.end(), target) != targets.end()) continue;
    expect_error([&] { core::simd::choose(target); }, ErrorCode::kUnavailable,
                 "cpu: simd target " + std::string(simd_target_name(target)) +
                     " is not on this CPU, which has " + present);
  }
}

}  // namespace
}  // namespace flashdsa::test
