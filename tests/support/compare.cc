#include "tests/support/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

namespace flashdsa::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

std::string place(const Values& got, const Values& want, std::size_t i) {
  return fmt::format("{}: got {:.9g}, want {:.9g}",
                     place_text(got.shape, static_cast<std::int64_t>(i)), got.data[i],
                     want.data[i]);
}

std::string about(const Values& got) {
  return fmt::format("shape {}{}{}", shape_text(got.shape), got.problem.empty() ? "" : "; ",
                     got.problem);
}

// The sentence of a failure; `error` ranks the places, those above `limit` are counted as off.
AssertionResult failure(const Values& got, const Values& want, const std::string& what,
                        const std::function<double(std::size_t)>& error, double limit = 0) {
  std::size_t worst = 0, first = got.data.size(), count = 0;
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    if (error(i) > error(worst)) worst = i;
    if (error(i) > limit) {
      ++count;
      if (first == got.data.size()) first = i;
    }
  }
  if (first == got.data.size()) first = worst;
  return AssertionFailure() << fmt::format(
             "{}: {}; {} of {} elements off; first {}; worst {}; {}", got.name, what, count,
             got.data.size(), place(got, want, first), place(got, want, worst), about(got));
}

bool same_special(double got, double want) {
  if (std::isnan(got) || std::isnan(want)) return std::isnan(got) && std::isnan(want);
  if (std::isinf(got) || std::isinf(want)) return got == want;
  return true;
}

// Why the two cannot be compared as numbers, or success.
AssertionResult comparable(const Values& got, const Values& want) {
  if (got.shape != want.shape || got.data.size() != want.data.size()) {
    return AssertionFailure() << fmt::format("{}: got shape {}, want {}; {}", got.name,
                                             shape_text(got.shape), shape_text(want.shape),
                                             got.problem);
  }
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    if (same_special(got.data[i], want.data[i])) continue;
    return failure(got, want, "NaN or infinity at another place", [&](std::size_t j) {
      return same_special(got.data[j], want.data[j]) ? 0.0 : 1.0;
    });
  }
  return AssertionSuccess();
}

double error_at(const Values& got, const Values& want, std::size_t i) {
  return std::isfinite(want.data[i]) ? std::abs(got.data[i] - want.data[i]) : 0.0;
}

double finite_at(const Values& values, std::size_t i) {
  return std::isfinite(values.data[i]) ? values.data[i] : 0.0;
}

// Norms of the error and of `want` over [begin, end).
struct Norms {
  double error = 0;
  double want = 0;
};

Norms norms(const Values& got, const Values& want, std::size_t begin, std::size_t end) {
  Norms sum;
  for (std::size_t i = begin; i < end; ++i) {
    sum.error += std::pow(error_at(got, want, i), 2);
    sum.want += std::pow(finite_at(want, i), 2);
  }
  return {std::sqrt(sum.error), std::sqrt(sum.want)};
}

}  // namespace

Values values_of(std::string name, const HostTensor& tensor, std::string problem) {
  return {std::move(name), std::move(problem), tensor.shape(), tensor.values()};
}

AssertionResult relative_rmse_within(const Values& got, const Values& want, double bound,
                                     double floor) {
  if (auto result = comparable(got, want); !result) return result;
  const Norms total = norms(got, want, 0, got.data.size());
  if (total.error <= bound * total.want + floor) return AssertionSuccess();
  const double per_element = total.error / std::sqrt(static_cast<double>(got.data.size()));
  return failure(
      got, want,
      fmt::format("error {:.3g} exceeds {:.3g} of {:.3g} + {:.2g} (relative RMSE {:.3g})",
                  total.error, bound, total.want, floor, total.error / total.want),
      [&](std::size_t i) { return error_at(got, want, i); }, per_element);
}

AssertionResult cosine_at_least(const Values& got, const Values& want, double bound) {
  if (auto result = comparable(got, want); !result) return result;
  double product = 0, got_square = 0, want_square = 0;
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    product += finite_at(got, i) * finite_at(want, i);
    got_square += std::pow(finite_at(got, i), 2);
    want_square += std::pow(finite_at(want, i), 2);
  }
  if (got_square == 0 && want_square == 0) return AssertionSuccess();
  const double cosine = product / std::sqrt(got_square * want_square);
  if (cosine >= bound) return AssertionSuccess();
  return failure(got, want, fmt::format("cosine {:.7f} is below {}", cosine, bound),
                 [&](std::size_t i) { return error_at(got, want, i); });
}

AssertionResult vectors_within(const Values& got, const Values& want, double bound,
                               const std::vector<double>& floors) {
  if (auto result = comparable(got, want); !result) return result;
  const auto width = static_cast<std::size_t>(got.shape.back());
  const std::size_t count = width == 0 ? 0 : got.data.size() / width;
  if (!floors.empty() && floors.size() != count) {
    return AssertionFailure() << fmt::format("{}: {} floors for {} vectors", got.name,
                                             floors.size(), count);
  }
  std::vector<double> excess(count);  // error over what is allowed
  std::optional<std::size_t> worst;
  for (std::size_t v = 0; v < count; ++v) {
    const Norms vector = norms(got, want, v * width, (v + 1) * width);
    const double allowed = bound * vector.want + (floors.empty() ? 0.0 : floors[v]);
    if (vector.error > allowed) excess[v] = vector.error / allowed;
    if (excess[v] > 0 && (!worst || excess[v] > excess[*worst])) worst = v;
  }
  if (!worst) return AssertionSuccess();
  Shape outer = got.shape;
  outer.pop_back();
  return failure(
      got, want,
      fmt::format("vector {} has {:.3g} times the allowed error",
                  place_text(outer, static_cast<std::int64_t>(*worst)), excess[*worst]),
      [&](std::size_t i) { return excess[i / width] > 0 ? error_at(got, want, i) : 0.0; });
}

AssertionResult elements_within(const Values& got, const Values& want, double absolute,
                                double relative) {
  if (auto result = comparable(got, want); !result) return result;
  const auto excess = [&](std::size_t i) {
    return error_at(got, want, i) - absolute - relative * std::abs(finite_at(want, i));
  };
  for (std::size_t i = 0; i < got.data.size(); ++i) {
    if (excess(i) <= 0) continue;
    return failure(got, want,
                   fmt::format("error above {:.3g} + {:.3g} of the value", absolute, relative),
                   excess);
  }
  return AssertionSuccess();
}

AssertionResult all_zero(const Values& got) {
  Values want = got;
  want.data.assign(got.data.size(), 0.0);
  return elements_within(got, want, 0);
}

AssertionResult same_bits(const HostTensor& got, const HostTensor& want) {
  if (got.dtype() != want.dtype() || got.shape() != want.shape()) {
    return AssertionFailure() << fmt::format("got {}, want {}", describe(got), describe(want));
  }
  for (std::int64_t i = 0; i < got.elements(); ++i) {
    if (got.bits(i) == want.bits(i)) continue;
    return AssertionFailure() << fmt::format(
               "bits differ first at {}: got {} ({:#x}), want {} ({:#x}); shape {}",
               place_text(got.shape(), i), got.get(i), got.bits(i), want.get(i), want.bits(i),
               shape_text(got.shape()));
  }
  return AssertionSuccess();
}

}  // namespace flashdsa::test
