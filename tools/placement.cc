#include "tools/placement.h"

#include <algorithm>

#include "core/device.h"
#include "core/make_tensor.h"
#include "tools/gpu.h"

namespace flashdsa::tools {
namespace {

bool is_on_device(Backend backend) {
  return backend == Backend::kSm90 || backend == Backend::kSm80;
}

}  // namespace

Backend best_backend() {
  const auto statuses = backends();
  return std::find_if(statuses.begin(), statuses.end(),
                      [](const BackendStatus& status) { return status.available; })
      ->backend;
}

Placement::Placement(const Runtime& runtime, bool has_float64) : backend_(runtime.backend) {
  if (backend_ == Backend::kAuto) {
    backend_ = has_float64 ? Backend::kReference : best_backend();
  }
  if (!is_on_device(backend_)) return;
  device_ = {DeviceKind::kCuda, 0};
  stream_ = make_stream(device_);
}

Tensor Placement::place(const Tensor& tensor) const {
  return on_host() ? tensor : copy_to(tensor, device_, copying());
}

Tensor Placement::fetch(const Tensor& tensor) const {
  return on_host() ? tensor : copy_to(tensor, Device{}, copying());
}

void Placement::synchronize() const {
  if (!on_host()) core::cuda_synchronize(device_, stream());
}

Runtime Placement::copying() const {
  Runtime runtime;
  runtime.stream = stream();
  return runtime;
}

Tensor allocate_beside(const TensorView& tensor, DType dtype,
                       std::initializer_list<std::int64_t> shape, const Runtime& runtime) {
  return core::make_tensor(dtype, std::span(shape.begin(), shape.size()), tensor.device, runtime);
}

}  // namespace flashdsa::tools
