#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace flashdsa::tools {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kPeriod = std::chrono::milliseconds(100);
constexpr int kBarWidth = 40;
constexpr auto kEraseLine = "\r\x1b[K";

}  // namespace

ProgressBar::ProgressBar() {
  if (isatty(STDERR_FILENO) == 1) thread_ = std::thread([this] { watch(); });
}

ProgressBar::~ProgressBar() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void ProgressBar::start(const std::string& stage) {
  const std::lock_guard lock(mutex_);
  stage_ = stage;
  progress_.done = 0;
  progress_.total = 0;
}

std::string ProgressBar::line() {
  const auto total = progress_.total.load(std::memory_order_relaxed);
  if (total <= 0) return fmt::format("{} ...", stage_);
  const double share =
      std::clamp(static_cast<double>(progress_.done.load(std::memory_order_relaxed)) /
                     static_cast<double>(total),
                 0.0, 1.0);
  const int filled = static_cast<int>(share * kBarWidth);
  return fmt::format("{} [{:#<{}}{:.<{}}] {:3.0f} %", stage_, "", filled, "", kBarWidth - filled,
                     100 * share);
}

void ProgressBar::watch() {
  std::unique_lock lock(mutex_);
  const auto finished = [this] { return finished_; };
  if (wake_.wait_for(lock, kPatience, finished)) return;
  do {
    fmt::print(stderr, "{}{}", kEraseLine, line());
    std::fflush(stderr);
  } while (!wake_.wait_for(lock, kPeriod, finished));
  fmt::print(stderr, "{}", kEraseLine);
  std::fflush(stderr);
}

}  // namespace flashdsa::tools
