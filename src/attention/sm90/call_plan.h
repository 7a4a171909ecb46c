#pragma once

#include <cstdint>
#include <optional>

#include "attention/params.h"
#include "flashdsa/runtime.h"
#include "flashdsa/selection.h"

namespace flashdsa::attention::sm90 {

/// The plan that a call walks: the caller's, or one that is built for the call.
class CallPlan {
 public:
  /// Fewer rows gain less by a plan than the launches that build it take.
  static constexpr std::int64_t kLeastRows = 2048;

  /// Queues the building where the caller has no plan, `walks_groups` says that the mode lets rows
  /// share a tile, the heads leave room for several rows in one, and there are kLeastRows.
  CallPlan(const CommonParams& params, bool walks_groups, const Runtime& runtime);

  /// Null: rows stand alone.
  const selection::PlanView* get() const { return view_ ? &*view_ : nullptr; }

 private:
  SelectionPlan own_;
  std::optional<selection::PlanView> view_;
};

}  // namespace flashdsa::attention::sm90
