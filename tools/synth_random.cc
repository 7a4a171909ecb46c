#include "tools/synth_random.h"

#include <algorithm>
#include <cmath>

#include "flashdsa/runtime.h"
#include "tools/parallel.h"

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
  constexpr std::int64_t kPiecesPerThread = 8;  // evens out pieces of unequal cost
  const int team = threads > 0 ? threads : hardware_threads();
  const std::int64_t pieces = std::min(count, team * kPiecesPerThread);
  parallel_for(team, pieces, [&](std::int64_t piece) {
    body(count * piece / pieces, count * (piece + 1) / pieces);
  });
}

}  // namespace flashdsa::tools
