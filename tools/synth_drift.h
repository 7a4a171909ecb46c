#pragma once

#include <cstdint>
#include <vector>

namespace flashdsa::tools {

/// How strongly the indexer queries of neighbouring rows must be correlated so that their
/// selections share a given part of their keys.
///
/// Keys are independent normal vectors, so over the keys the scores of two rows are nearly jointly
/// normal with correlation r; of the best fraction p of the keys (p = K / visible keys) the rows
/// share P(both > z) / p with Q(z) = p. r comes from the correlation rho of two query vectors
/// through the ReLU and from the drift of the head weights. docs/synth.md has the formulae.
class DriftSchedule {
 public:
  /// Relative deviation of a head weight from 1.
  static constexpr double kWeightDeviation = 0.25;

  /// `overlap` in [0, 1]. Rows share K / visible keys at least, whatever is asked for.
  DriftSchedule(double overlap, std::int64_t topk);

  /// Correlation rho of the row that sees `visible` keys with the row before it.
  double correlation(std::int64_t visible) const;

 private:
  std::int64_t topk_;
  std::vector<double> by_step_;  // one value per quarter octave of visible / K
};

}  // namespace flashdsa::tools
