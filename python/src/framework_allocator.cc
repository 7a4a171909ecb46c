#include "python/src/framework_allocator.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <cstdint>
#include <utility>

#include "python/src/arguments.h"

namespace flashdsa::python {
namespace {

// The error that a failed call has left for its thread; the caller reports the failure itself.
void drop_error() noexcept {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error != nullptr) TVMFFIObjectDecRef(error);
}

}  // namespace

std::shared_ptr<FrameworkAllocator> FrameworkAllocator::of_call(Device device) {
  if (device.kind == DeviceKind::kCpu) return nullptr;
  if (TVMFFIEnvGetDLPackManagedTensorAllocator() == nullptr) return nullptr;
  return std::make_shared<FrameworkAllocator>();
}

void* FrameworkAllocator::allocate(std::size_t bytes, Device device, Stream) noexcept try {
  auto size = static_cast<std::int64_t>(bytes);
  std::int64_t stride = 1;
  DLTensor wanted{nullptr, device_to(device), 1, dtype_to(DType::kUInt8), &size, &stride, 0};
  TVMFFIObjectHandle handle = nullptr;
  if (TVMFFIEnvTensorAlloc(&wanted, &handle) != 0) {
    drop_error();
    return nullptr;
  }
  tvm::ffi::Tensor block(tvm::ffi::detail::ObjectUnsafe::ObjectPtrFromOwned<tvm::ffi::TensorObj>(
      static_cast<TVMFFIObject*>(handle)));
  void* data = static_cast<std::byte*>(block.data_ptr()) + block.byte_offset();
  const std::scoped_lock lock(mutex_);
  blocks_.emplace(data, std::move(block));
  return data;
} catch (...) {
  return nullptr;
}

// The framework orders the memory's next use behind the work of its current stream, which is the
// call's.
void FrameworkAllocator::deallocate(void* data, std::size_t, Device, Stream) noexcept {
  const std::scoped_lock lock(mutex_);
  blocks_.erase(data);
}

}  // namespace flashdsa::python
