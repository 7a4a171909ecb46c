#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "flashdsa/attention.h"
#include "flashdsa/runtime.h"
#include "tools/bench_check.h"
#include "tools/placement.h"
#include "tools/workloads.h"

namespace flashdsa::tools {

/// A workload where its operations run.
struct PlacedWorkload {
  Workload host;  // what the sizes, formulae and checks are taken from
  Placement placement;
  Workload placed;  // the same tensors there
};

/// Whose attention is called: the library's, or a peer's.
struct AttentionCalls {
  std::function<void(const AttentionForwardArgs&, const Runtime&)> forward = attention_forward;
  std::function<void(const AttentionBackwardArgs&, const Runtime&)> backward = attention_backward;
};

/// What forward and backward know of the selection beforehand.
enum class PlanUse : std::uint8_t {
  kNone,    ///< nothing
  kReused,  ///< a plan that was built once
  kBuilt,   ///< every call builds its own
};

std::string plan_use_name(PlanUse use);
PlanUse parse_plan_use(const std::string& text);  ///< throws Error(kValue)

/// One operation on one workload, with its outputs allocated.
struct Operation {
  std::function<void(const Runtime&)> run;         // the whole public call
  std::function<Figure()> check;                   // judges what the last run wrote
  double flop = 0;                                 // over valid slots; 0: nothing to count
  double bytes = 0;                                // read or written at least
  std::optional<double> overlap;                   // of the selection that it uses
  std::optional<std::size_t> plan_bytes;           // of the plan that it makes or uses
  std::function<void(const Runtime&)> build_plan;  // of the plan that it reuses, or null
};

std::span<const std::string_view> operation_names();

/// What the operation reads of a workload.
bool needs_attention(std::string_view operation);
bool needs_indexer(std::string_view operation);

/// Whether there is a choice of PlanUse.
bool takes_plan(std::string_view operation);

/// "" or why the operation does not run on this workload.
std::string refusal(std::string_view operation, const Workload& workload);

/// The workload must outlive the result. `runtime` makes what the operation needs beforehand
/// (memory, the forward's results for the backward).
Operation make_operation(std::string_view name, const PlacedWorkload& workload,
                         const AttentionCalls& calls, PlanUse plan, const Runtime& runtime);

}  // namespace flashdsa::tools
