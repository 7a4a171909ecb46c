#include "tests/support/engines.h"

#include <fmt/format.h>

#include <algorithm>
#include <ostream>

namespace flashdsa::test {

std::vector<Engine> engines() {
  return {{Backend::kReference},
          {Backend::kCpu, SimdTarget::kBaseline},
          {Backend::kCpu, SimdTarget::kAvx2},
          {Backend::kCpu, SimdTarget::kAvx512},
          {Backend::kCpu, SimdTarget::kAvx512Bf16},
          {Backend::kSm90}};
}

std::vector<Engine> host_engines() {
  std::vector<Engine> result = engines();
  std::erase_if(result, [](const Engine& engine) { return works_on_device(engine.backend); });
  return result;
}

std::vector<Engine> bounded_engines() {
  std::vector<Engine> result = engines();
  std::erase_if(result, [](const Engine& engine) { return engine.backend == Backend::kReference; });
  return result;
}

std::vector<Engine> backend_engines() {
  return {{Backend::kReference}, {Backend::kCpu}, {Backend::kSm90}};
}

bool works_on_device(Backend backend) {
  return backend == Backend::kSm90 || backend == Backend::kSm80;
}

double log_absolute(Backend backend) { return works_on_device(backend) ? 1e-4 : 1e-5; }

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
  return ::testing::PrintToString(info.param);
}

void PrintTo(const Engine& engine, std::ostream* out) {
  *out << backend_name(engine.backend);
  if (engine.simd != SimdTarget::kAuto) *out << '_' << simd_target_name(engine.simd);
}

Runtime reference_runtime() {
  Runtime runtime;
  runtime.backend = Backend::kReference;
  return runtime;
}

}  // namespace flashdsa::test
