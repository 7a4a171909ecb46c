#include "tools/synth_random.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include "flashdsa/runtime.h"

namespace flashdsa::tools {

double portable_exp(double x) {
  constexpr double kLn2High = 0x1.62E42FEE00000p-1;  // 32 bits: times a small integer it is exact
  constexpr double kLn2Low = 0x1.A39EF35793C76p-33;
  const double exponent = std::floor(x / (kLn2High + kLn2Low) + 0.5);
  const double rest = (x - exponent * kLn2High) - exponent * kLn2Low;  // |rest| <= 0.35
  double sum = 1;
  for (int k = 14; k >= 1; --k) sum = 1 + sum * rest / k;
  return std::ldexp(sum, static_cast<int>(exponent));
}

double portable_sin_turns(double turns) {
  constexpr double kPi = 3.141592653589793;
  // Fold to the quarter turn around 0, where the series is short: sin(pi - x) = sin x.
  double folded = turns - std::floor(turns + 0.5);
  if (folded > 0.25) folded = 0.5 - folded;
  if (folded < -0.25) folded = -0.5 - folded;
  const double x = 2 * kPi * folded;
  double sum = 1;
  for (int k = 10; k >= 1; --k) sum = 1 - sum * x * x / ((2 * k) * (2 * k + 1));
  return x * sum;
}

double portable_cos_turns(double turns) { return portable_sin_turns(turns + 0.25); }

void parallel_ranges(int threads, std::int64_t count,
                     const std::function<void(std::int64_t begin, std::int64_t end)>& body) {
  const std::int64_t available = threads > 0 ? threads : hardware_threads();
  const std::int64_t team =
      std::clamp<std::int64_t>(available, 1, std::max<std::int64_t>(count, 1));
  std::vector<std::jthread> workers;
  for (std::int64_t i = 1; i < team; ++i) {
    workers.emplace_back(
        [&body, i, team, count] { body(count * i / team, count * (i + 1) / team); });
  }
  body(0, count / team);
}

}  // namespace flashdsa::tools
