#pragma once

#include <string>
#include <vector>

#include "attention/params.h"
#include "flashdsa/runtime.h"

namespace flashdsa::attention {

/// Each backend's functions. `refusal` returns "" when the backend takes the call, else the reason;
/// the others compute and may throw Error(kMemory).
namespace reference {
std::string refusal(const CommonParams& params);
void forward(const ForwardParams& params, const Runtime& runtime);
void backward(const BackwardParams& params, const Runtime& runtime);
}  // namespace reference

namespace cpu {
std::string refusal(const CommonParams& params);
void forward(const ForwardParams& params, const Runtime& runtime);
void backward(const BackwardParams& params, const Runtime& runtime);
}  // namespace cpu

namespace sm90 {
std::string refusal(const CommonParams& params);
void forward(const ForwardParams& params, const Runtime& runtime);
void backward(const BackwardParams& params, const Runtime& runtime);
}  // namespace sm90

/// Runs the best backend that takes the call. Throws Error(kUnavailable) when none does.
void dispatch_forward(const ForwardParams& params, const Runtime& runtime);
void dispatch_backward(const BackwardParams& params, const Runtime& runtime);

/// The backends that do each operation, best first, whether this build has them or not.
std::vector<Backend> forward_backends();
std::vector<Backend> backward_backends();

}  // namespace flashdsa::attention
