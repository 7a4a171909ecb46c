#pragma once

#include <fmt/format.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashdsa/error.h"
#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// One backend's way to do an operation. `refusal` answers "" when it takes the call, else why not.
/// Without `refusal` the entry is left out of this build; with `refusal` and without `run` the
/// backend does not do the operation.
template <typename Params>
struct Implementation {
  Backend backend;
  std::string (*refusal)(const Params&) = nullptr;
  void (*run)(const Params&, const Runtime&) = nullptr;
};

/// The backends that do an operation, be it in other builds or on other machines, best first.
template <typename Params>
std::vector<Backend> backends_of(std::span<const Implementation<Params>> list) {
  std::vector<Backend> result;
  for (const auto& implementation : list) {
    if (!implementation.refusal || implementation.run) result.push_back(implementation.backend);
  }
  return result;
}

/// Runs the first implementation (best first) that the runtime's backend choice allows and that
/// takes the call. Throws Error(kUnavailable) with every reason when none does.
template <typename Params>
void dispatch(std::string_view operation, std::span<const Implementation<Params>> list,
              const Params& params, const Runtime& runtime) {
  std::string reasons;
  for (const auto& implementation : list) {
    if (!implementation.refusal) continue;
    if (runtime.backend != Backend::kAuto && runtime.backend != implementation.backend) continue;
    const std::string reason = implementation.refusal(params);
    if (reason.empty()) {
      implementation.run(params, runtime);
      return;
    }
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ",
                           backend_name(implementation.backend), reason);
  }
  if (reasons.empty()) reasons = "not part of this build";
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: no backend takes this call with backend {} ({})", operation,
                          backend_name(runtime.backend), reasons));
}

}  // namespace flashdsa::core
