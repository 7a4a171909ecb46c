#pragma once

#include "flashdsa/runtime.h"

namespace flashdsa::tools {

/// The CPU's measured ceiling, in GFLOP/s: every thread repeats a product of 64 x 2048 x 576 (BF16
/// in, FP32 out: 64 heads times 2048 gathered keys) on operands of its own, by the library's own
/// kernel; the threads' rates are added up. Throws Error(kUnavailable) for an instruction set that
/// is not to be had.
double measure_peak_gflops(int threads, SimdTarget simd);

}  // namespace flashdsa::tools
