#pragma once

#include <optional>
#include <string>

#include "flashdsa/runtime.h"
#include "tools/bench_timing.h"

namespace flashdsa::tools {

/// The CPU's measured ceiling, in GFLOP/s: every thread repeats a product of 64 x 2048 x 576 (BF16
/// in, FP32 out: 64 heads times 2048 gathered keys) on operands of its own, by the library's own
/// kernel; the threads' rates are added up. Throws Error(kUnavailable) for an instruction set that
/// is not to be had.
double measure_peak_gflops(int threads, SimdTarget simd);

/// The ceiling of a GPU of this name, in GFLOP/s: the rate of cuBLAS for a product of 8192 x 8192 x
/// 8192, BF16 with FP32 sums, in this regime; measured beforehand, see docs/benchmarks.md. Absent
/// for a GPU that it was not measured on.
std::optional<double> gpu_peak_gflops(const std::string& name, Regime regime);

}  // namespace flashdsa::tools
