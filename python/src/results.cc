#include "python/src/results.h"

#include <span>
#include <utility>

#include "flashdsa/error.h"
#include "python/src/arguments.h"

namespace flashdsa::python {
namespace {

// What tvm-ffi asks of an allocator: here the memory is there already, and goes with its owners.
class Ownership {
 public:
  Ownership(Tensor tensor, std::shared_ptr<Allocator> allocator)
      : allocator_(std::move(allocator)), tensor_(std::move(tensor)) {}

  void AllocData(DLTensor* result) { result->data = tensor_.view().data; }
  void FreeData(DLTensor*) {}

 private:
  std::shared_ptr<Allocator> allocator_;  // outlives tensor_, which returns its memory there
  Tensor tensor_;
};

}  // namespace

tvm::ffi::Tensor share(const Tensor& tensor, std::shared_ptr<Allocator> allocator) {
  const TensorView& view = tensor.view();
  const tvm::ffi::ShapeView shape(view.shape.data(), static_cast<std::size_t>(view.rank));
  return tvm::ffi::Tensor::FromNDAlloc(Ownership(tensor, std::move(allocator)), shape,
                                       dtype_to(view.dtype), device_to(view.device));
}

tvm::ffi::Tensor host_tensor(DLDataType dtype, const tvm::ffi::Shape& shape) {
  const auto known = dtype_from(dtype);
  if (!known) throw Error(ErrorCode::kInternal, "a result of an unknown element type");
  return share(Tensor::host(*known, std::span(shape.data(), shape.size())), nullptr);
}

}  // namespace flashdsa::python
