#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>
#include <vector>

#include "tests/support/host_tensor.h"

namespace flashdsa::test {

/// Random numbers that a seed fixes on every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  /// In [0, 1).
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

  /// In [low, high].
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(uniform() * static_cast<double>(high - low + 1));
  }

  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

  void fill_normal(HostTensor& tensor, double deviation = 1) {
    for (std::int64_t i = 0; i < tensor.elements(); ++i) tensor.set(i, deviation * normal());
  }

  void fill_integers(HostTensor& tensor, std::int64_t low, std::int64_t high) {
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      tensor.set(i, static_cast<double>(integer(low, high)));
    }
  }

  /// `count` different numbers of 0 .. size-1, ascending.
  std::vector<std::int32_t> subset(std::int64_t size, std::int64_t count) {
    std::vector<std::int32_t> result;
    for (std::int64_t i = 0; i < size; ++i) {
      const auto missing = static_cast<double>(count) - static_cast<double>(result.size());
      if (uniform() * static_cast<double>(size - i) < missing) {
        result.push_back(static_cast<std::int32_t>(i));
      }
    }
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace flashdsa::test
