#include "tools/bench_timing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include "flashdsa/error.h"
#include "tools/gpu.h"

namespace flashdsa::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<const char*, 3> kRegimeNames = {"cold", "warm", "sustained"};

constexpr auto kRest = std::chrono::milliseconds(700);
constexpr int kColdWarmups = 3;
constexpr std::int64_t kColdRounds = 10;
constexpr double kWarmSeconds = 0.15;
constexpr double kSustainedSeconds = 1.5;
constexpr double kMeasuredSeconds = 0.1;  // short beside the regimes' own times
constexpr std::int64_t kMinRounds = 10;
constexpr std::int64_t kMaxRounds = 200;
constexpr std::int64_t kHostRepeats = 5;
constexpr std::int64_t kFlushBytes = std::int64_t{256} << 20;  // several times any L2 cache
constexpr int kRoundsWithoutWaiting = 4;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The calls of one row on a device.
class DeviceTiming {
 public:
  DeviceTiming(std::span<const std::function<void()>> calls, const Placement& placement,
               const TimingOptions& options)
      : calls_(calls), placement_(placement), options_(options) {
    if (!options.flush_l2) return;
    TensorView on_device;
    on_device.device = placement.device();
    Runtime runtime;
    runtime.stream = placement.stream();
    flushed_ = allocate_beside(on_device, DType::kUInt8, {kFlushBytes}, runtime);
  }

  std::vector<std::vector<double>> run() {
    const std::int64_t rounds = options_.regime == Regime::kCold ? rest() : keep_busy();
    return time_queued(
        calls_, options_.repeats > 0 ? options_.repeats : rounds, [this] { flush(); },
        placement_.device(), placement_.stream());
  }

 private:
  void flush() const {
    if (options_.flush_l2) queue_overwrite(flushed_, placement_.stream());
  }

  void queue_round() const {
    for (const auto& call : calls_) {
      flush();
      call();
    }
  }

  std::int64_t rest() const {
    placement_.synchronize();
    std::this_thread::sleep_for(kRest);
    for (int i = 0; i < kColdWarmups; ++i) queue_round();
    return kColdRounds;
  }

  // Returns how many rounds fit into the time of measuring.
  std::int64_t keep_busy() const {
    const double wanted = options_.regime == Regime::kSustained ? kSustainedSeconds : kWarmSeconds;
    const auto begin = Clock::now();
    double rounds = 0;
    do {
      for (int i = 0; i < kRoundsWithoutWaiting; ++i) queue_round();
      rounds += kRoundsWithoutWaiting;
      placement_.synchronize();
    } while (seconds_since(begin) < wanted);
    const double fit = rounds * kMeasuredSeconds / seconds_since(begin);
    return std::clamp(static_cast<std::int64_t>(fit), kMinRounds, kMaxRounds);
  }

  std::span<const std::function<void()>> calls_;
  const Placement& placement_;
  const TimingOptions& options_;
  Tensor flushed_;
};

}  // namespace

std::string regime_name(Regime regime) { return kRegimeNames[static_cast<std::size_t>(regime)]; }

Regime parse_regime(const std::string& text) {
  const auto found = std::find(kRegimeNames.begin(), kRegimeNames.end(), text);
  if (found == kRegimeNames.end()) {
    throw Error(ErrorCode::kValue, fmt::format("bench: --regime must be among {}, got '{}'",
                                               fmt::join(kRegimeNames, ", "), text));
  }
  return static_cast<Regime>(found - kRegimeNames.begin());
}

std::vector<double> time_on_host(const std::function<void()>& call, const TimingOptions& options) {
  const std::int64_t repeats = options.repeats > 0 ? options.repeats : kHostRepeats;
  std::vector<double> seconds;
  double total = 0;
  while (static_cast<std::int64_t>(seconds.size()) < repeats || total < options.min_seconds) {
    const auto begin = Clock::now();
    call();
    seconds.push_back(seconds_since(begin));
    total += seconds.back();
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

std::vector<std::vector<double>> time_on_device(std::span<const std::function<void()>> calls,
                                                const Placement& placement,
                                                const TimingOptions& options) {
  auto seconds = DeviceTiming(calls, placement, options).run();
  for (auto& of_call : seconds) std::sort(of_call.begin(), of_call.end());
  return seconds;
}

}  // namespace flashdsa::tools
