#include "core/simd/target.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "core/out_of_memory.h"
#include "flashdsa/error.h"

namespace flashdsa {

std::vector<SimdTarget> simd_targets() try {
  std::vector<SimdTarget> targets;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) targets.push_back(SimdTarget::kAvx512Bf16);
  if (avx512) targets.push_back(SimdTarget::kAvx512);
  if (avx2) targets.push_back(SimdTarget::kAvx2);
#endif
  targets.push_back(SimdTarget::kBaseline);
  return targets;
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory("simd_targets");
}

std::string_view simd_target_name(SimdTarget target) noexcept {
  switch (target) {
    case SimdTarget::kAuto:
      return "auto";
    case SimdTarget::kBaseline:
      return "baseline";
    case SimdTarget::kAvx2:
      return "avx2";
    case SimdTarget::kAvx512:
      return "avx512";
    case SimdTarget::kAvx512Bf16:
      return "avx512bf16";
  }
  return "unknown";
}

namespace core::simd {

SimdTarget choose(SimdTarget requested) {
  const auto targets = simd_targets();
  if (requested == SimdTarget::kAuto) return targets.front();
  if (std::find(targets.begin(), targets.end(), requested) != targets.end()) return requested;
  std::string names;
  for (const SimdTarget target : targets) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", simd_target_name(target));
  }
  throw Error(ErrorCode::kUnavailable,
              fmt::format("cpu: simd target {} is not on this CPU, which has {}",
                          simd_target_name(requested), names));
}

}  // namespace core::simd
}  // namespace flashdsa
