#include "core/scratch.h"

#include <fmt/format.h>

#include <cstdlib>
#include <limits>

#include "core/device.h"
#include "flashdsa/error.h"

namespace flashdsa::core {
namespace {

class HostAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, Stream) noexcept override {
    if (device.kind != DeviceKind::kCpu) return nullptr;
    if (bytes > std::numeric_limits<std::size_t>::max() - Carver::kAlignment) return nullptr;
    const std::size_t rounded = (bytes + Carver::kAlignment - 1) / Carver::kAlignment;
    return std::aligned_alloc(Carver::kAlignment, rounded * Carver::kAlignment);
  }
  void deallocate(void* data, std::size_t, Device, Stream) noexcept override { std::free(data); }
};

Allocator& allocator_of(const Runtime& runtime, Device device) {
  static HostAllocator host;  // has no state
  if (runtime.allocator != nullptr) return *runtime.allocator;
  return device.kind == DeviceKind::kCuda ? cuda_allocator() : static_cast<Allocator&>(host);
}

void count(Usage* usage, std::size_t bytes) {
  if (usage == nullptr) return;
  const std::size_t now = usage->scratch_bytes.fetch_add(bytes) + bytes;
  std::size_t peak = usage->peak_scratch_bytes.load();
  while (peak < now && !usage->peak_scratch_bytes.compare_exchange_weak(peak, now)) {
  }
}

}  // namespace

Scratch::Scratch(const Runtime& runtime, std::size_t bytes, Device device)
    : runtime_(runtime), bytes_(bytes), device_(device), data_(nullptr) {
  if (bytes_ == 0) return;
  data_ = allocator_of(runtime_, device_).allocate(bytes_, device_, runtime_.stream);
  if (data_ == nullptr) {
    throw Error(ErrorCode::kMemory, fmt::format("scratch: expected {} bytes on {}, got none",
                                                bytes_, device_name(device_)));
  }
  count(runtime_.usage, bytes_);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  allocator_of(runtime_, device_).deallocate(data_, bytes_, device_, runtime_.stream);
  if (runtime_.usage != nullptr) runtime_.usage->scratch_bytes.fetch_sub(bytes_);
}

}  // namespace flashdsa::core
