#include "core/dispatch.h"

#include <array>

#include "indexer/backends.h"

namespace flashdsa::indexer {
namespace {

constexpr std::array kTopk = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<TopkParams>{Backend::kSm90, sm90::refusal, sm90::topk},
#endif
    core::Implementation<TopkParams>{Backend::kCpu, cpu::refusal, cpu::topk},
    core::Implementation<TopkParams>{Backend::kReference, reference::refusal, reference::topk},
};

}  // namespace

void dispatch_topk(const TopkParams& params, const Runtime& runtime) {
  core::dispatch<TopkParams>("indexer_topk", kTopk, params, runtime);
}

}  // namespace flashdsa::indexer
