#include "core/dispatch.h"

#include <array>
#include <string>

#include "indexer/backends.h"

namespace flashdsa::indexer {
namespace {

constexpr std::array kTopk = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<TopkParams>{
        Backend::kSm90, [](const TopkParams& p) { return sm90::refusal(p); }, sm90::topk},
#else
    core::Implementation<TopkParams>{Backend::kSm90},
#endif
    core::Implementation<TopkParams>{
        Backend::kCpu, [](const TopkParams& p) { return cpu::refusal(p); }, cpu::topk},
    core::Implementation<TopkParams>{Backend::kReference,
                                     [](const TopkParams& p) { return reference::refusal(p); },
                                     reference::topk},
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

void dispatch_topk(const TopkParams& params, const Runtime& runtime) {
  core::dispatch<TopkParams>("indexer_topk", kTopk, params, runtime);
}

void dispatch_backward(const BackwardParams& params, const Runtime& runtime) {
  core::dispatch<BackwardParams>("indexer_backward", kBackward, params, runtime);
}

std::vector<Backend> topk_backends() { return core::backends_of<TopkParams>(kTopk); }

std::vector<Backend> backward_backends() { return core::backends_of<BackwardParams>(kBackward); }

}  // namespace flashdsa::indexer
