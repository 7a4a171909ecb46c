#include "python/src/arguments.h"

#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <string>

#include "flashdsa/error.h"

namespace flashdsa::python {
namespace {

constexpr std::string_view kKnownTypes =
    "a bool, an integer, a float16, bfloat16, float32 or float64";

std::string sentence(std::string_view operation, std::string_view name, std::string_view expected,
                     std::string_view got) {
  std::string text(operation);
  text.append(": ").append(name).append(" must be ").append(expected).append(", got ").append(got);
  return text;
}

// One row of the table of element types.
struct TypePair {
  DType ours;
  std::uint8_t code;
  std::uint8_t bits;
};

constexpr TypePair kTypes[] = {
    {DType::kBool, kDLBool, 8},        {DType::kUInt8, kDLUInt, 8},
    {DType::kInt8, kDLInt, 8},         {DType::kUInt16, kDLUInt, 16},
    {DType::kInt16, kDLInt, 16},       {DType::kUInt32, kDLUInt, 32},
    {DType::kInt32, kDLInt, 32},       {DType::kUInt64, kDLUInt, 64},
    {DType::kInt64, kDLInt, 64},       {DType::kFloat16, kDLFloat, 16},
    {DType::kBFloat16, kDLBfloat, 16}, {DType::kFloat32, kDLFloat, 32},
    {DType::kFloat64, kDLFloat, 64},
};

}  // namespace

std::optional<DType> dtype_from(DLDataType dtype) {
  for (const TypePair& pair : kTypes) {
    if (dtype.code == pair.code && dtype.bits == pair.bits && dtype.lanes == 1) return pair.ours;
  }
  return std::nullopt;
}

DLDataType dtype_to(DType dtype) {
  for (const TypePair& pair : kTypes) {
    if (dtype == pair.ours) return {pair.code, pair.bits, 1};
  }
  throw Error(ErrorCode::kInternal, "the table of element types lacks one");
}

DLDevice device_to(Device device) {
  return {device.kind == DeviceKind::kCuda ? kDLCUDA : kDLCPU, device.index};
}

DType ArgumentReader::dtype_of(std::string_view name, DLDataType dtype) const {
  if (((bfloat16_mask_ >> position_) & 1) != 0) return DType::kBFloat16;
  if (const auto known = dtype_from(dtype)) return *known;
  const std::string got = dtype.code == kDLComplex
                              ? "complex" + std::to_string(dtype.bits)
                              : std::string(tvm::ffi::DLDataTypeToString(dtype));
  throw Error(ErrorCode::kType, sentence(operation_, name, kKnownTypes, got));
}

Device ArgumentReader::device_of(std::string_view name, DLDevice device) const {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:  // pinned host memory
      return {DeviceKind::kCpu, 0};
    case kDLCUDA:
    case kDLCUDAManaged:
      return {DeviceKind::kCuda, device.device_id};
    default:
      throw Error(ErrorCode::kValue,
                  sentence(operation_, name, "in host memory or on a CUDA device",
                           "DLPack device type " + std::to_string(device.device_type)));
  }
}

TensorView ArgumentReader::read(std::string_view name, const tvm::ffi::TensorView& tensor) {
  TensorView view;
  view.dtype = dtype_of(name, tensor.dtype());
  view.device = device_of(name, tensor.device());
  ++position_;
  view.data = static_cast<std::byte*>(tensor.data_ptr()) + tensor.byte_offset();
  view.rank = tensor.ndim();
  // A view of more axes than the library knows keeps its rank, by which it is refused.
  const int axes = std::min(view.rank, TensorView::kMaxRank);
  std::copy_n(tensor.shape().data(), axes, view.shape.begin());
  std::copy_n(tensor.strides().data(), axes, view.strides.begin());
  return view;
}

std::optional<TensorView> ArgumentReader::read(std::string_view name,
                                               const OptionalTensor& tensor) {
  if (tensor.has_value()) return read(name, *tensor);
  ++position_;
  return std::nullopt;
}

TensorView ArgumentReader::require(std::string_view name, const OptionalTensor& tensor) {
  if (tensor.has_value()) return read(name, *tensor);
  throw Error(ErrorCode::kType, sentence(operation_, name, "a tensor", "None"));
}

}  // namespace flashdsa::python
