#include "core/dispatch.h"

#include <array>

#include "selection/backends.h"

namespace flashdsa::selection {
namespace {

constexpr std::array kCompact = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<CompactParams>{Backend::kSm90, sm90::refusal, sm90::compact_and_sort},
#endif
    core::Implementation<CompactParams>{Backend::kCpu, cpu::refusal, cpu::compact_and_sort},
    core::Implementation<CompactParams>{Backend::kReference, reference::refusal,
                                        reference::compact_and_sort},
};

}  // namespace

void dispatch_compact_and_sort(const CompactParams& params, const Runtime& runtime) {
  core::dispatch<CompactParams>("compact_and_sort", kCompact, params, runtime);
}

}  // namespace flashdsa::selection
