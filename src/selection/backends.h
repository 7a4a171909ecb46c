#pragma once

#include <string>
#include <vector>

#include "flashdsa/runtime.h"
#include "selection/params.h"

namespace flashdsa::selection {

/// Each backend's functions. `refusal` returns "" when the backend takes the call, else the reason.
namespace reference {
std::string refusal(const CompactParams& params);
void compact_and_sort(const CompactParams& params, const Runtime& runtime);
std::string refusal(const PlanParams& params);
void build_plan(const PlanParams& params, const Runtime& runtime);
}  // namespace reference

namespace cpu {
std::string refusal(const CompactParams& params);
void compact_and_sort(const CompactParams& params, const Runtime& runtime);
}  // namespace cpu

namespace sm90 {
std::string refusal(const CompactParams& params);
void compact_and_sort(const CompactParams& params, const Runtime& runtime);
std::string refusal(const PlanParams& params);
void build_plan(const PlanParams& params, const Runtime& runtime);
}  // namespace sm90

/// Each runs the best backend that takes the call. Throws Error(kUnavailable) when none does.
void dispatch_compact_and_sort(const CompactParams& params, const Runtime& runtime);
void dispatch_build_plan(const PlanParams& params, const Runtime& runtime);

/// The backends that do each operation, best first, whether this build has them or not.
std::vector<Backend> compact_and_sort_backends();
std::vector<Backend> build_plan_backends();

}  // namespace flashdsa::selection
