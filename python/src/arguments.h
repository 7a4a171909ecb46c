#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "flashdsa/tensor_view.h"

namespace flashdsa::python {

using OptionalTensor = tvm::ffi::Optional<tvm::ffi::TensorView>;

/// DLPack's name of an element type and device, and back. `dtype_from` is empty for an element type
/// that the library cannot name.
std::optional<DType> dtype_from(DLDataType dtype);
DLDataType dtype_to(DType dtype);
DLDevice device_to(Device device);

/// Turns the tensors of one call into the library's views, in the order of the call's arguments.
///
/// Bit i of `bfloat16_mask` says that the i-th tensor comes as uint16 and holds BF16 patterns:
/// NumPy has no BF16 of its own and does not hand out ml_dtypes' through DLPack.
class ArgumentReader {
 public:
  ArgumentReader(std::string_view operation, std::int64_t bfloat16_mask)
      : operation_(operation), bfloat16_mask_(bfloat16_mask) {}

  /// Throws Error(kType) for an element type that the library cannot name, Error(kValue) for a
  /// device that is neither the host nor a CUDA device.
  TensorView read(std::string_view name, const tvm::ffi::TensorView& tensor);

  /// The same of an argument that may be absent.
  std::optional<TensorView> read(std::string_view name, const OptionalTensor& tensor);

  /// The same of one that may not. Throws Error(kType) when it is.
  TensorView require(std::string_view name, const OptionalTensor& tensor);

 private:
  DType dtype_of(std::string_view name, DLDataType dtype) const;
  Device device_of(std::string_view name, DLDevice device) const;

  std::string_view operation_;
  std::int64_t bfloat16_mask_;
  int position_ = 0;
};

}  // namespace flashdsa::python
