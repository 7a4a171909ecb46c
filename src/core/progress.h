#pragma once

#include <cstdint>

#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// Tells Runtime::progress how far a call is; does nothing without one. `advance` may be called
/// from several threads.
class ProgressReporter {
 public:
  ProgressReporter(const Runtime& runtime, std::int64_t total) : progress_(runtime.progress) {
    if (progress_ == nullptr) return;
    progress_->done.store(0, std::memory_order_relaxed);
    progress_->total.store(total, std::memory_order_relaxed);
  }

  void advance(std::int64_t units = 1) {
    if (progress_ != nullptr) progress_->done.fetch_add(units, std::memory_order_relaxed);
  }

 private:
  Progress* progress_;
};

}  // namespace flashdsa::core
