#include "tests/support/engines.h"

#include <fmt/format.h>

#include <algorithm>

namespace flashdsa::test {

std::vector<Engine> engines() {
  return {{Backend::kReference, SimdTarget::kAuto},
          {Backend::kCpu, SimdTarget::kBaseline},
          {Backend::kCpu, SimdTarget::kAvx2},
          {Backend::kCpu, SimdTarget::kAvx512},
          {Backend::kCpu, SimdTarget::kAvx512Bf16}};
}

std::string engine_refusal(const Engine& engine) {
  for (const BackendStatus& status : backends()) {
    if (status.backend == engine.backend && !status.available) return status.detail;
  }
  const auto targets = simd_targets();
  if (engine.simd != SimdTarget::kAuto &&
      std::find(targets.begin(), targets.end(), engine.simd) == targets.end()) {
    return fmt::format("this CPU or build has no {}", simd_target_name(engine.simd));
  }
  return "";
}

std::string engine_name(const ::testing::TestParamInfo<Engine>& info) {
  const Engine& engine = info.param;
  if (engine.simd == SimdTarget::kAuto) return std::string(backend_name(engine.backend));
  return fmt::format("{}_{}", backend_name(engine.backend), simd_target_name(engine.simd));
}

Runtime reference_runtime() {
  Runtime runtime;
  runtime.backend = Backend::kReference;
  return runtime;
}

}  // namespace flashdsa::test
