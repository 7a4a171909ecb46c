// Views and tensors: what shapes, strides and dtypes mean.

#include "flashdsa/tensor_view.h"

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/support/expect_error.h"

namespace flashdsa::test {
namespace {

TEST(DTypes, HaveTheNamesAndSizesOfNumPy) {
  struct Row {
    DType dtype;
    const char* name;
    std::size_t size;
  };
  const Row table[] = {
      {DType::kBool, "bool", 1},         {DType::kUInt8, "uint8", 1},
      {DType::kInt8, "int8", 1},         {DType::kUInt16, "uint16", 2},
      {DType::kInt16, "int16", 2},       {DType::kUInt32, "uint32", 4},
      {DType::kInt32, "int32", 4},       {DType::kUInt64, "uint64", 8},
      {DType::kInt64, "int64", 8},       {DType::kFloat16, "float16", 2},
      {DType::kBFloat16, "bfloat16", 2}, {DType::kFloat32, "float32", 4},
      {DType::kFloat64, "float64", 8},
  };
  for (const Row& row : table) {
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(dtype_size(row.dtype), row.size) << row.name;
  }
}

TEST(Devices, AreNamedAsPyTorchNamesThem) {
  EXPECT_EQ(device_name({}), "cpu");
  EXPECT_EQ(device_name({DeviceKind::kCpu, 0}), "cpu");
  EXPECT_EQ(device_name({DeviceKind::kCuda, 0}), "cuda:0");
  EXPECT_EQ(device_name({DeviceKind::kCuda, 7}), "cuda:7");
}

TEST(TensorView, ContiguousStridesAreRowMajor) {
  std::int32_t data[24];
  const TensorView view = TensorView::contiguous(data, DType::kInt32, {2, 3, 4});
  EXPECT_EQ(view.data, data);
  EXPECT_EQ(view.dtype, DType::kInt32);
  EXPECT_EQ(view.device, Device{});
  ASSERT_EQ(view.rank, 3);
  EXPECT_EQ(view.shape[0], 2);
  EXPECT_EQ(view.shape[1], 3);
  EXPECT_EQ(view.shape[2], 4);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(view.elements(), 24);
  EXPECT_EQ(view.bytes(), 96u);
  EXPECT_EQ(view.as<std::int32_t>(), data);
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorView, ScalarHasOneElement) {
  const TensorView view =
      TensorView::contiguous(nullptr, DType::kFloat64, std::span<const std::int64_t>{});
  EXPECT_EQ(view.rank, 0);
  EXPECT_EQ(view.elements(), 1);
  EXPECT_EQ(view.bytes(), 8u);
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorView, KeepsItsDevice) {
  const Device device{DeviceKind::kCuda, 3};
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::kInt32, {1}, device).device, device);
}

TEST(TensorView, CountsPastTwoToTheThirtyTwo) {
  const TensorView view =
      TensorView::contiguous(nullptr, DType::kBFloat16, {std::int64_t{1} << 31, 128, 576});
  EXPECT_EQ(view.strides[0], 73728);
  EXPECT_EQ(view.elements(), 158329674399744);
  EXPECT_EQ(view.bytes(), 316659348799488u);
}

TEST(TensorView, TakesEightAxesAndNoMore) {
  const std::vector<std::int64_t> eight(8, 2);
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::kInt8, eight).elements(), 256);
  const std::vector<std::int64_t> nine(9, 1);
  expect_error([&] { return TensorView::contiguous(nullptr, DType::kInt8, nine); },
               ErrorCode::kValue, "tensor: expected at most 8 axes, got 9");
}

TEST(TensorView, RefusesNegativeSizes) {
  expect_error([] { return TensorView::contiguous(nullptr, DType::kInt8, {4, -1, 2}); },
               ErrorCode::kValue, "tensor: expected sizes >= 0, got [4, -1, 2]");
}

TEST(TensorView, RefusesMoreBytesThanAnAddressCounts) {
  constexpr std::int64_t kBig = std::int64_t{1} << 40;
  expect_error([] { return TensorView::contiguous(nullptr, DType::kInt8, {kBig, kBig}); },
               ErrorCode::kValue,
               "tensor: expected less than 2^63 bytes, got int8 [1099511627776, 1099511627776]");
  constexpr std::int64_t kWords = std::int64_t{1} << 60;  // 2^63 bytes of float64
  expect_error([] { return TensorView::contiguous(nullptr, DType::kFloat64, {kWords}); },
               ErrorCode::kValue,
               "tensor: expected less than 2^63 bytes, got float64 [1152921504606846976]");
  EXPECT_EQ(TensorView::contiguous(nullptr, DType::kFloat64, {kWords - 1}).bytes(),
            9223372036854775800u);
}

TensorView strided(std::initializer_list<std::int64_t> shape,
                   std::initializer_list<std::int64_t> strides) {
  TensorView view = TensorView::contiguous(nullptr, DType::kInt32, shape);
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

TEST(TensorView, IsContiguousLooksAtEveryAxis) {
  EXPECT_TRUE(strided({2, 3, 4}, {12, 4, 1}).is_contiguous());
  EXPECT_FALSE(strided({2, 3, 4}, {12, 4, 2}).is_contiguous());
  EXPECT_FALSE(strided({2, 3, 4}, {12, 5, 1}).is_contiguous());
  EXPECT_FALSE(strided({2, 3, 4}, {13, 4, 1}).is_contiguous());
  EXPECT_FALSE(strided({2, 3}, {1, 2}).is_contiguous());   // transposed
  EXPECT_FALSE(strided({2, 3}, {0, 1}).is_contiguous());   // broadcast
  EXPECT_FALSE(strided({2, 3}, {-3, 1}).is_contiguous());  // reversed
}

TEST(TensorView, StrideOfAnAxisOfSizeOneDoesNotMatter) {
  EXPECT_TRUE(strided({1, 3}, {77, 1}).is_contiguous());
  EXPECT_TRUE(strided({3, 1}, {1, 77}).is_contiguous());
  EXPECT_TRUE(strided({2, 1, 3}, {3, -5, 1}).is_contiguous());
  EXPECT_TRUE(strided({1, 1}, {0, 0}).is_contiguous());
  EXPECT_FALSE(strided({2, 1, 3}, {4, 3, 1}).is_contiguous());
}

TEST(TensorView, StridesOfATensorWithoutElementsDoNotMatter) {
  EXPECT_TRUE(strided({3, 0}, {77, 5}).is_contiguous());
  EXPECT_TRUE(strided({0, 3}, {77, 5}).is_contiguous());
  EXPECT_TRUE(strided({2, 0, 3}, {1, 1, 9}).is_contiguous());
  EXPECT_EQ(strided({2, 0, 3}, {1, 1, 9}).elements(), 0);
}

TEST(Describe, PrintsDtypeAndShape) {
  EXPECT_EQ(describe(strided({8, 64, 576}, {1, 1, 1})), "int32 [8, 64, 576]");
  EXPECT_EQ(describe(TensorView::contiguous(nullptr, DType::kBFloat16, {0})), "bfloat16 [0]");
  EXPECT_EQ(describe(TensorView::contiguous(nullptr, DType::kBool, std::span<std::int64_t>{})),
            "bool []");
}

TEST(Describe, NamesARankThatNoTensorHas) {
  TensorView view = strided({8, 64, 576}, {1, 1, 1});
  for (const int rank : {-1, 9, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    view.rank = rank;
    EXPECT_EQ(describe(view), "int32 of rank " + std::to_string(rank));
    EXPECT_EQ(view.elements(), 0);
    EXPECT_EQ(view.bytes(), 0u);
    EXPECT_FALSE(view.is_contiguous());
  }
}

TEST(Tensor, HostMemoryIsAlignedAndWritable) {
  for (const std::int64_t size : {1, 3, 64, 65, 1000}) {
    const Tensor tensor = Tensor::host(DType::kInt32, {2, size});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.view().data) % 64, 0u) << size;
    EXPECT_TRUE(tensor.view().is_contiguous());
    EXPECT_EQ(tensor.view().device, Device{});
    const auto span = tensor.span<std::int32_t>();
    ASSERT_EQ(span.size(), static_cast<std::size_t>(2 * size));
    for (std::int32_t& value : span) value = 7;
    EXPECT_EQ(span.back(), 7);
  }
}

TEST(Tensor, WithoutElementsIsAValidTensor) {
  const Tensor tensor = Tensor::host(DType::kInt64, {0});
  EXPECT_EQ(tensor.view().rank, 1);
  EXPECT_EQ(tensor.view().elements(), 0);
  EXPECT_TRUE(tensor.span<std::int64_t>().empty());
  EXPECT_EQ(Tensor().view().elements(), 1);  // a default view is a scalar without memory
  EXPECT_EQ(Tensor().view().data, nullptr);
}

TEST(Tensor, CopiesShareTheMemory) {
  Tensor copy;
  {
    const Tensor tensor = Tensor::host(DType::kInt32, {2});
    tensor.span<std::int32_t>()[1] = 41;
    copy = tensor;
    copy.span<std::int32_t>()[1] += 1;
    EXPECT_EQ(tensor.span<std::int32_t>()[1], 42);
  }
  EXPECT_EQ(copy.span<std::int32_t>()[1], 42);  // outlives the object it was copied from
}

TEST(Tensor, IsUsableAsItsView) {
  const Tensor tensor = Tensor::host(DType::kBool, {5});
  const TensorView& view = tensor;
  EXPECT_EQ(&view, &tensor.view());
  EXPECT_EQ(describe(tensor), "bool [5]");
  EXPECT_EQ(describe(Tensor::host(DType::kBool, {6})), "bool [6]");
}

// A view of a temporary would outlive its memory.
static_assert(std::is_convertible_v<Tensor&, TensorView>);
static_assert(std::is_convertible_v<const Tensor&, TensorView>);
static_assert(!std::is_convertible_v<Tensor, TensorView>);
static_assert(!std::is_convertible_v<const Tensor, TensorView>);
static_assert(std::is_assignable_v<std::optional<TensorView>&, const Tensor&>);
static_assert(!std::is_assignable_v<std::optional<TensorView>&, Tensor>);

TEST(Tensor, RefusesWhatTheMachineCannotHold) {
  constexpr std::int64_t kSize = std::int64_t{1} << 58;  // an exabyte and more
  expect_error([] { return Tensor::host(DType::kFloat32, {kSize}); }, ErrorCode::kMemory,
               "tensor: expected 1152921504606847040 bytes for float32 [288230376151711744], got "
               "none");
  expect_error([] { return Tensor::host(DType::kFloat32, {3, -2}); }, ErrorCode::kValue,
               "tensor: expected sizes >= 0, got [3, -2]");
}

}  // namespace
}  // namespace flashdsa::test
