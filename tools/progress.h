#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "flashdsa/runtime.h"

namespace flashdsa::tools {

/// Shows on standard error how far the work is, when that is a terminal and the work takes longer
/// than two seconds; gone without a trace when the object is.
class ProgressBar {
 public:
  ProgressBar();
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  /// Begins a piece of work; the operation that does it reports into progress().
  void start(const std::string& stage);

  Progress* progress() { return &progress_; }

 private:
  void watch();
  std::string line();

  Progress progress_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::string stage_;      // guarded by mutex_
  bool finished_ = false;  // guarded by mutex_
  std::thread thread_;     // last: it uses all of the above
};

}  // namespace flashdsa::tools
