// How often the benchmark calls, and what it compares a rate with.

#include "tools/bench_timing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "flashdsa/error.h"
#include "tools/bench_peak.h"

namespace flashdsa::tools {
namespace {

TEST(BenchTiming, HostCallsAreCounted) {
  for (const auto& [repeats, wanted] : {std::pair{0, 5}, std::pair{1, 1}, std::pair{12, 12}}) {
    TimingOptions options;
    options.repeats = repeats;
    options.min_seconds = 0;
    int calls = 0;
    const auto seconds = time_on_host([&] { ++calls; }, options);
    EXPECT_EQ(calls, wanted);
    EXPECT_EQ(seconds.size(), static_cast<std::size_t>(wanted));
    EXPECT_TRUE(std::ranges::is_sorted(seconds));
  }
}

TEST(BenchTiming, HostCallsFillTheTime) {
  TimingOptions options;
  options.repeats = 1;
  options.min_seconds = 0.01;
  const auto seconds = time_on_host([] {}, options);
  double sum = 0;
  for (const double value : seconds) sum += value;
  EXPECT_GE(sum, 0.0099);
}

TEST(BenchTiming, RegimesHaveNames) {
  for (const char* name : {"cold", "warm", "sustained"}) {
    EXPECT_EQ(regime_name(parse_regime(name)), name);
  }
  EXPECT_THROW(parse_regime("hot"), Error);
}

// docs/benchmarks.md: 789, 680 and 672 TFLOP/s.
TEST(BenchPeak, KnowsTheMeasuredGpusAlone) {
  EXPECT_EQ(gpu_peak_gflops("NVIDIA H200", Regime::kCold), 789e3);
  EXPECT_EQ(gpu_peak_gflops("NVIDIA H200", Regime::kWarm), 680e3);
  EXPECT_EQ(gpu_peak_gflops("NVIDIA H200", Regime::kSustained), 672e3);
  EXPECT_FALSE(gpu_peak_gflops("NVIDIA H100 PCIe", Regime::kWarm));
}

}  // namespace
}  // namespace flashdsa::tools
