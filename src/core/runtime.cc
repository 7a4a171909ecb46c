#include "flashdsa/runtime.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <new>
#include <span>
#include <thread>

#include "core/device.h"
#include "core/make_tensor.h"
#include "core/out_of_memory.h"
#include "flashdsa/error.h"

namespace flashdsa {

std::string_view backend_name(Backend backend) noexcept {
  switch (backend) {
    case Backend::kAuto:
      return "auto";
    case Backend::kReference:
      return "reference";
    case Backend::kCpu:
      return "cpu";
    case Backend::kSm90:
      return "sm90";
    case Backend::kSm80:
      return "sm80";
  }
  return "unknown";
}

std::vector<BackendStatus> backends() try {
  const std::string sm90 = core::sm90_refusal(0);
  return {
      {Backend::kSm90, sm90.empty(), sm90.empty() ? "cuda:0" : sm90},
      {Backend::kSm80, false, "not part of this build"},
      {Backend::kCpu, true,
       fmt::format("{}, {} threads", simd_target_name(simd_targets().front()), hardware_threads())},
      {Backend::kReference, true, "float64, plain loops"},
  };
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("backends");
}

int hardware_threads() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

Tensor copy_to(const TensorView& view, Device device, const Runtime& runtime) try {
  if (!view.is_contiguous()) {
    throw Error(ErrorCode::kValue,
                fmt::format("copy_to: the tensor must be contiguous, got {}", describe(view)));
  }
  const std::span shape(view.shape.data(), static_cast<std::size_t>(view.rank));
  const bool to_host = device.kind == DeviceKind::kCpu;
  const Tensor copy = core::make_tensor(view.dtype, shape, device, runtime);
  if (to_host && view.device.kind == DeviceKind::kCpu) {
    std::copy_n(view.as<std::byte>(), view.bytes(), copy.view().as<std::byte>());
    return copy;
  }
  const Device cuda = to_host ? view.device : device;
  core::cuda_copy(copy.view().data, view.data, view.bytes(), cuda, runtime.stream);
  core::cuda_synchronize(cuda, runtime.stream);
  return copy;
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("copy_to");
}

std::string_view version() noexcept { return FLASHDSA_VERSION; }

std::string_view build_description() noexcept { return FLASHDSA_BUILD_DESCRIPTION; }

}  // namespace flashdsa
