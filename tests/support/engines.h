#pragma once

#include <gtest/gtest.h>

#include <iosfwd>
#include <string>
#include <vector>

#include "flashdsa/runtime.h"

namespace flashdsa::test {

#ifdef FLASHDSA_TEST_CUDA
inline constexpr bool kBuildHasCuda = true;
#else
inline constexpr bool kBuildHasCuda = false;
#endif

/// What a test runs on: a backend, and for `cpu` an instruction set.
struct Engine {
  Backend backend;
  SimdTarget simd = SimdTarget::kAuto;
};

/// The reference backend, the CPU backend once for every instruction set that it knows, and the
/// device backends.
std::vector<Engine> engines();

/// Those of `engines` that work on the host: they have threads and report progress.
std::vector<Engine> host_engines();

/// Those of `engines` that promise a bound of their scratch: all but the reference.
std::vector<Engine> bounded_engines();

/// Every backend once, for what has one body for all instruction sets.
std::vector<Engine> backend_engines();

/// "" when this machine has the engine, else the reason why not.
std::string engine_refusal(const Engine& engine);

/// "reference", "cpu_avx2", "sm90"
std::string engine_name(const ::testing::TestParamInfo<Engine>& info);
void PrintTo(const Engine& engine, std::ostream* out);  // how GoogleTest prints one

/// Whether the backend takes tensors of device memory.
bool works_on_device(Backend backend);

/// SPEC section 8: absolute part of the bound on lse and max_logits.
double log_absolute(Backend backend);

/// A runtime of the reference backend.
Runtime reference_runtime();

/// A test that runs on every engine; one that this machine lacks is a skip with its reason.
class EngineTest : public ::testing::TestWithParam<Engine> {
 protected:
  void SetUp() override {
    if (const std::string reason = engine_refusal(GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }

  bool is_reference() const { return GetParam().backend == Backend::kReference; }
  bool is_on_device() const { return works_on_device(GetParam().backend); }

  Runtime runtime(Mode mode = Mode::kDefault) const {
    Runtime runtime;
    runtime.backend = GetParam().backend;
    runtime.simd = GetParam().simd;
    runtime.mode = mode;
    return runtime;
  }

  /// Whether the mode promises gradients of the same bits on every run. The default mode of a
  /// device promises it of the forward alone, for its backward may use atomics (SPEC section 6).
  bool gradients_repeat(Mode mode) const { return !is_on_device() || mode != Mode::kDefault; }

  /// A runtime in the first mode whose gradients repeat.
  Runtime repeatable() const {
    return runtime(is_on_device() ? Mode::kDeterministic : Mode::kDefault);
  }

  Runtime runtime_with_threads(int threads) const {
    Runtime result = runtime();
    result.threads = threads;
    return result;
  }
};

}  // namespace flashdsa::test
