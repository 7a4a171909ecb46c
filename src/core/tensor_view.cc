#include "flashdsa/tensor_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <limits>
#include <new>

#include "core/out_of_memory.h"
#include "flashdsa/error.h"

namespace flashdsa {
namespace {

bool rank_exists(const TensorView& view) {
  return view.rank >= 0 && view.rank <= TensorView::kMaxRank;
}

}  // namespace

std::size_t dtype_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBool:
    case DType::kUInt8:
    case DType::kInt8:
      return 1;
    case DType::kUInt16:
    case DType::kInt16:
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUInt32:
    case DType::kInt32:
    case DType::kFloat32:
      return 4;
    case DType::kUInt64:
    case DType::kInt64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

std::string_view dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBool:
      return "bool";
    case DType::kUInt8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kUInt16:
      return "uint16";
    case DType::kInt16:
      return "int16";
    case DType::kUInt32:
      return "uint32";
    case DType::kInt32:
      return "int32";
    case DType::kUInt64:
      return "uint64";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

std::string device_name(Device device) try {
  return device.kind == DeviceKind::kCpu ? "cpu" : fmt::format("cuda:{}", device.index);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("device_name");
}

TensorView TensorView::contiguous(void* data, DType dtype, std::span<const std::int64_t> shape,
                                  Device device) try {
  if (shape.size() > kMaxRank) {
    throw Error(ErrorCode::kValue,
                fmt::format("tensor: expected at most {} axes, got {}", kMaxRank, shape.size()));
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  bool fits = true;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    if (shape[axis] < 0) {
      throw Error(ErrorCode::kValue,
                  fmt::format("tensor: expected sizes >= 0, got [{}]", fmt::join(shape, ", ")));
    }
    view.shape[axis] = shape[axis];
    view.strides[axis] = stride;
    fits = fits && !__builtin_mul_overflow(stride, shape[axis], &stride);
  }
  if (!fits || stride > std::numeric_limits<std::int64_t>::max() /
                            static_cast<std::int64_t>(dtype_size(dtype))) {
    throw Error(ErrorCode::kValue,
                fmt::format("tensor: expected less than 2^63 bytes, got {}", describe(view)));
  }
  return view;
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("tensor");
}

TensorView TensorView::contiguous(void* data, DType dtype,
                                  std::initializer_list<std::int64_t> shape, Device device) {
  return contiguous(data, dtype, std::span(shape.begin(), shape.size()), device);
}

std::int64_t TensorView::elements() const noexcept {
  if (!rank_exists(*this)) return 0;
  std::int64_t count = 1;
  for (int axis = 0; axis < rank; ++axis) count *= shape[static_cast<std::size_t>(axis)];
  return count;
}

bool TensorView::is_contiguous() const noexcept {
  if (!rank_exists(*this)) return false;
  if (elements() == 0) return true;
  std::int64_t stride = 1;
  for (int axis = rank; axis-- > 0;) {
    const auto i = static_cast<std::size_t>(axis);
    if (shape[i] > 1 && strides[i] != stride) return false;
    stride *= shape[i];
  }
  return true;
}

std::string describe(const TensorView& view) try {
  if (!rank_exists(view)) return fmt::format("{} of rank {}", dtype_name(view.dtype), view.rank);
  return fmt::format("{} [{}]", dtype_name(view.dtype),
                     fmt::join(view.shape.begin(), view.shape.begin() + view.rank, ", "));
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("describe");
}

Tensor Tensor::host(DType dtype, std::span<const std::int64_t> shape) try {
  constexpr std::size_t kAlignment = 64;
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  const std::size_t bytes = (view.bytes() / kAlignment + 1) * kAlignment;
  view.data = std::aligned_alloc(kAlignment, bytes);
  if (view.data == nullptr) {
    throw Error(ErrorCode::kMemory,
                fmt::format("tensor: expected {} bytes for {}, got none", bytes, describe(view)));
  }
  return {view, std::shared_ptr<void>(view.data, std::free)};
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("tensor");
}

Tensor Tensor::host(DType dtype, std::initializer_list<std::int64_t> shape) {
  return host(dtype, std::span(shape.begin(), shape.size()));
}

}  // namespace flashdsa
