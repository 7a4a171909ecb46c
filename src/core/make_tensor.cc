#include "core/make_tensor.h"

#include <fmt/format.h>

#include <memory>

#include "core/device.h"
#include "flashdsa/error.h"

namespace flashdsa::core {

Tensor make_tensor(DType dtype, std::span<const std::int64_t> shape, Device device,
                   const Runtime& runtime) {
  if (device.kind == DeviceKind::kCpu) return Tensor::host(dtype, shape);
  TensorView view = TensorView::contiguous(nullptr, dtype, shape, device);
  const std::size_t bytes = view.bytes();
  if (bytes == 0) return {view, nullptr};
  Allocator& allocator = runtime.allocator != nullptr ? *runtime.allocator : cuda_allocator();
  view.data = allocator.allocate(bytes, device, runtime.stream);
  if (view.data == nullptr) {
    throw Error(ErrorCode::kMemory, fmt::format("tensor: expected {} bytes on {}, got none", bytes,
                                                device_name(device)));
  }
  const Stream stream = runtime.stream;
  return {view, std::shared_ptr<void>(view.data, [&allocator, bytes, device, stream](void* data) {
            allocator.deallocate(data, bytes, device, stream);
          })};
}

}  // namespace flashdsa::core
