#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <memory>

#include "flashdsa/runtime.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa::python {

/// A tensor of the library as one that frameworks take without a copy. `allocator` (may be null) is
/// where its memory came from; it lives as long as the tensor.
tvm::ffi::Tensor share(const Tensor& tensor, std::shared_ptr<Allocator> allocator);

/// Uninitialised host memory for a result, for frameworks that cannot be written into.
tvm::ffi::Tensor host_tensor(DLDataType dtype, const tvm::ffi::Shape& shape);

}  // namespace flashdsa::python
