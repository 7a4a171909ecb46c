#include "tools/synth_drift.h"

#include <algorithm>
#include <cmath>

#include "tools/synth_random.h"

namespace flashdsa::tools {
namespace {

constexpr double kPi = 3.141592653589793;
constexpr double kStepRatio = 1.189207115002721;  // 2^(1/4)

// Simpson's rule with 2 * kHalf intervals.
template <typename Function>
double integrate(const Function& f, double begin, double end) {
  constexpr int kHalf = 100;
  const double step = (end - begin) / (2 * kHalf);
  double sum = f(begin) + f(end);
  for (int i = 1; i < 2 * kHalf; ++i) sum += (i % 2 == 1 ? 4 : 2) * f(begin + i * step);
  return sum * step / 3;
}

// x in [low, high] with f(x) = target, for increasing f; the nearer end when there is none.
template <typename Function>
double solve(const Function& f, double target, double low, double high) {
  for (int step = 0; step < 50; ++step) {
    const double middle = 0.5 * (low + high);
    (f(middle) < target ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

double sine(double radians) { return portable_sin_turns(radians / (2 * kPi)); }
double cosine(double radians) { return portable_cos_turns(radians / (2 * kPi)); }

// z with Q(z) = p, Q the upper tail of the normal distribution.
double upper_quantile(double p) {
  const auto below = [](double z) {
    const auto density = [](double x) { return portable_exp(-0.5 * x * x); };
    return 0.5 + integrate(density, 0, z) / std::sqrt(2 * kPi);
  };
  return solve(below, 1 - p, -8, 8);
}

// Correlation r of two jointly normal scores whose upper fractions p share `overlap` of their
// members: P(X > z, Y > z) = p^2 + 1/(2 pi) * integral of exp(-z^2 / (1 + sin a)), a = 0..asin r.
double score_correlation(double overlap, double p) {
  const double z = upper_quantile(p);
  const auto shared = [&](double angle) {
    const auto density = [&](double a) { return portable_exp(-z * z / (1 + sine(a))); };
    return p + integrate(density, 0, angle) / (2 * kPi * p);
  };
  return sine(solve(shared, overlap, 0, kPi / 2));
}

// Correlation rho of two query vectors that gives scores of correlation r. With rho = cos(a), the
// ReLUs of two normals of correlation rho have E = (sin a + (pi - a) cos a) / (2 pi).
double query_correlation(double r) {
  const auto scores = [](double closeness) {
    const double angle = kPi / 2 - closeness;
    const double rho = cosine(angle);
    const double relu = (sine(angle) + (kPi - angle) * rho - 1) / (kPi - 1);
    constexpr double kVariance = DriftSchedule::kWeightDeviation * DriftSchedule::kWeightDeviation;
    return relu * (1 + rho * kVariance) / (1 + kVariance);
  };
  return cosine(kPi / 2 - solve(scores, r, 0, kPi / 2));
}

}  // namespace

DriftSchedule::DriftSchedule(double overlap, std::int64_t topk) : topk_(topk) {
  double ratio = 1;
  while (ratio * static_cast<double>(topk) < 0x1p31) {
    const double p = 1 / (ratio * std::sqrt(kStepRatio));  // at the middle of the step
    by_step_.push_back(overlap <= p   ? 0
                       : overlap >= 1 ? 1
                                      : query_correlation(score_correlation(overlap, p)));
    ratio *= kStepRatio;
  }
}

double DriftSchedule::correlation(std::int64_t visible) const {
  std::size_t step = 0;
  double limit = static_cast<double>(topk_) * kStepRatio;
  while (static_cast<double>(visible) >= limit && step + 1 < by_step_.size()) {
    limit *= kStepRatio;
    ++step;
  }
  return by_step_[step];
}

}  // namespace flashdsa::tools
