#pragma once

#include "flashdsa/runtime.h"

namespace flashdsa::core::simd {

/// The instruction set a call runs on: Runtime::simd, or the best one of this CPU and build.
/// Throws Error(kUnavailable) when the one asked for is not to be had.
SimdTarget choose(SimdTarget requested);

}  // namespace flashdsa::core::simd
