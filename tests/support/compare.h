#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/host_tensor.h"

namespace flashdsa::test {

// Bounds of SPEC section 8.
inline constexpr double kOutRmse = 4e-3;
inline constexpr double kOutCosine = 0.99999;
inline constexpr double kGradRmse = 1e-2;
inline constexpr double kVectorFactor = 4;    // a single vector may use this multiple of the bound
inline constexpr double kLogRelative = 1e-6;  // of lse and max_logits, beside log_absolute(backend)
inline constexpr double kScoreError = 2e-5;   // of a row's largest sum of |w| * max(0, dot)

/// What the comparator works on: the elements of a tensor and what a failure says about them.
struct Values {
  std::string name;     // "grad_q"
  std::string problem;  // "seed 7, T_q 3, ..."
  Shape shape;
  std::vector<double> data;
};

Values values_of(std::string name, const HostTensor& tensor, std::string problem = "");

// Every comparison fails for another shape, and where NaN and infinities do not stand at the same
// places, the infinities with the same sign; numbers are compared at the finite places. A failure
// names the first and the worst place with both values, the shape and the problem.

/// |got - want| <= bound * |want| + floor over the whole tensor (Euclidean norms).
::testing::AssertionResult relative_rmse_within(const Values& got, const Values& want, double bound,
                                                double floor = 0);

/// Cosine of the angle between the two; tensors of zero agree.
::testing::AssertionResult cosine_at_least(const Values& got, const Values& want, double bound);

/// Each vector of the last axis: |got - want| <= bound * |want| + floor. `floors` is empty or has
/// one entry a vector.
::testing::AssertionResult vectors_within(const Values& got, const Values& want, double bound,
                                          const std::vector<double>& floors = {});

/// Each element: |got - want| <= absolute + relative * |want|.
::testing::AssertionResult elements_within(const Values& got, const Values& want, double absolute,
                                           double relative = 0);

/// Every element is zero.
::testing::AssertionResult all_zero(const Values& got);

/// The same dtype, shape and bits.
::testing::AssertionResult same_bits(const HostTensor& got, const HostTensor& want);

}  // namespace flashdsa::test
