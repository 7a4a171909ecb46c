#include "core/dispatch.h"

#include <array>

#include "selection/backends.h"

namespace flashdsa::selection {
namespace {

constexpr std::array kCompact = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<CompactParams>{Backend::kSm90, sm90::refusal, sm90::compact_and_sort},
#else
    core::Implementation<CompactParams>{Backend::kSm90},
#endif
    core::Implementation<CompactParams>{Backend::kCpu, cpu::refusal, cpu::compact_and_sort},
    core::Implementation<CompactParams>{Backend::kReference, reference::refusal,
                                        reference::compact_and_sort},
};

// The host has one implementation: its attention walks rows, not plans.
constexpr std::array kBuildPlan = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<PlanParams>{Backend::kSm90, sm90::refusal, sm90::build_plan},
#else
    core::Implementation<PlanParams>{Backend::kSm90},
#endif
    core::Implementation<PlanParams>{Backend::kCpu, reference::refusal, reference::build_plan},
    core::Implementation<PlanParams>{Backend::kReference, reference::refusal,
                                     reference::build_plan},
};

}  // namespace

void dispatch_compact_and_sort(const CompactParams& params, const Runtime& runtime) {
  core::dispatch<CompactParams>("compact_and_sort", kCompact, params, runtime);
}

void dispatch_build_plan(const PlanParams& params, const Runtime& runtime) {
  core::dispatch<PlanParams>("build_selection_plan", kBuildPlan, params, runtime);
}

std::vector<Backend> compact_and_sort_backends() {
  return core::backends_of<CompactParams>(kCompact);
}

std::vector<Backend> build_plan_backends() { return core::backends_of<PlanParams>(kBuildPlan); }

}  // namespace flashdsa::selection
