#pragma once

#include <string>
#include <vector>

#include "flashdsa/runtime.h"
#include "metadata/params.h"

namespace flashdsa::metadata {

/// Each backend's functions. `refusal` returns "" when the backend takes the call, else the reason;
/// `build` throws Error(kValue) for bad contents unless the build is capture-safe.
namespace cpu {
std::string refusal(const BuildParams& params);
void build(const BuildParams& params, const Runtime& runtime);
}  // namespace cpu

namespace sm90 {
std::string refusal(const BuildParams& params);
/// False, and no result, when an exact build found bad contents: `cpu::build` of a host copy of the
/// arguments then throws the sentence.
bool build(const BuildParams& params, const Runtime& runtime);
}  // namespace sm90

/// Runs the best backend that takes the call. Throws Error(kUnavailable) when none does.
void dispatch_build(const BuildParams& params, const Runtime& runtime);

/// The backends that do the operation, best first, whether this build has them or not.
std::vector<Backend> build_backends();

}  // namespace flashdsa::metadata
