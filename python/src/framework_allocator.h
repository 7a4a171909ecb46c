#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "flashdsa/runtime.h"

namespace flashdsa::python {

/// Device memory from the caller's framework. A framework that implements DLPack's exchange
/// interface (PyTorch) leaves its allocator in the call's environment, next to its current stream;
/// memory taken from it is what the framework counts, caches and keeps in the private pool of a
/// graph under capture.
class FrameworkAllocator final : public Allocator {
 public:
  /// Null when the tensors' framework has left none, or for host memory.
  static std::shared_ptr<FrameworkAllocator> of_call(Device device);

  void* allocate(std::size_t bytes, Device device, Stream stream) noexcept override;
  void deallocate(void* data, std::size_t bytes, Device device, Stream stream) noexcept override;

 private:
  std::mutex mutex_;
  std::unordered_map<void*, tvm::ffi::Tensor> blocks_;  // what is in use, by its address
};

}  // namespace flashdsa::python
