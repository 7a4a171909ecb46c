#include "flashdsa/runtime.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <thread>

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

std::vector<BackendStatus> backends() {
  return {
      {Backend::kSm90, false, "not part of this build"},
      {Backend::kSm80, false, "not part of this build"},
      {Backend::kCpu, true,
       fmt::format("{}, {} threads", simd_target_name(simd_targets().front()), hardware_threads())},
      {Backend::kReference, true, "float64, plain loops"},
  };
}

int hardware_threads() noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

std::string_view version() noexcept { return FLASHDSA_VERSION; }

std::string_view build_description() noexcept { return FLASHDSA_BUILD_DESCRIPTION; }

}  // namespace flashdsa
