#include "core/dispatch.h"

#include <array>

#include "attention/backends.h"

namespace flashdsa::attention {
namespace {

constexpr std::array kForward = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<ForwardParams>{
        Backend::kSm90, [](const ForwardParams& p) { return sm90::refusal(p); }, sm90::forward},
#else
    core::Implementation<ForwardParams>{Backend::kSm90},
#endif
    core::Implementation<ForwardParams>{
        Backend::kCpu, [](const ForwardParams& p) { return cpu::refusal(p); }, cpu::forward},
    core::Implementation<ForwardParams>{
        Backend::kReference, [](const ForwardParams& p) { return reference::refusal(p); },
        reference::forward},
};

constexpr std::array kBackward = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<BackwardParams>{
        Backend::kSm90, [](const BackwardParams& p) { return sm90::refusal(p); }, sm90::backward},
#else
    core::Implementation<BackwardParams>{Backend::kSm90},
#endif
    core::Implementation<BackwardParams>{
        Backend::kCpu, [](const BackwardParams& p) { return cpu::refusal(p); }, cpu::backward},
    core::Implementation<BackwardParams>{
        Backend::kReference, [](const BackwardParams& p) { return reference::refusal(p); },
        reference::backward},
};

}  // namespace

void dispatch_forward(const ForwardParams& params, const Runtime& runtime) {
  core::dispatch<ForwardParams>("attention_forward", kForward, params, runtime);
}

void dispatch_backward(const BackwardParams& params, const Runtime& runtime) {
  core::dispatch<BackwardParams>("attention_backward", kBackward, params, runtime);
}

std::vector<Backend> forward_backends() { return core::backends_of<ForwardParams>(kForward); }

std::vector<Backend> backward_backends() { return core::backends_of<BackwardParams>(kBackward); }

}  // namespace flashdsa::attention
