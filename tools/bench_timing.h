#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tools/placement.h"

namespace flashdsa::tools {

/// How much work goes before the timed calls of a device, and so which clock its power allows.
/// Calls of a host backend are always timed warm.
enum class Regime : std::uint8_t {
  kCold,       ///< 0.7 s of rest, then 3 calls
  kWarm,       ///< 150 ms of calls
  kSustained,  ///< 1.5 s of calls
};

std::string regime_name(Regime regime);
Regime parse_regime(const std::string& text);  ///< throws Error(kValue)

struct TimingOptions {
  Regime regime = Regime::kWarm;
  bool flush_l2 = false;     ///< of a device: overwrite its L2 cache in front of every call
  std::int64_t repeats = 0;  ///< timed calls; 0: 5 on the host, on a device what 100 ms hold
  double min_seconds = 0.5;  ///< on the host: time of the calls at least
};

/// Seconds of every timed call, ascending.
std::vector<double> time_on_host(const std::function<void()>& call, const TimingOptions& options);

/// The same of several calls that take turns, by the device's own clock.
std::vector<std::vector<double>> time_on_device(std::span<const std::function<void()>> calls,
                                                const Placement& placement,
                                                const TimingOptions& options);

}  // namespace flashdsa::tools
