#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flashdsa/runtime.h"

namespace flashdsa::test {

/// What a test runs on: a backend, and for `cpu` an instruction set.
struct Engine {
  Backend backend;
  SimdTarget simd;
};

/// The reference backend, and the CPU backend once for every instruction set that it knows.
std::vector<Engine> engines();

/// "" when this machine has the engine, else the reason why not.
std::string engine_refusal(const Engine& engine);

/// "reference", "cpu_avx2"
std::string engine_name(const ::testing::TestParamInfo<Engine>& info);

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

  Runtime runtime() const {
    Runtime runtime;
    runtime.backend = GetParam().backend;
    runtime.simd = GetParam().simd;
    return runtime;
  }

  Runtime runtime_with_threads(int threads) const {
    Runtime result = runtime();
    result.threads = threads;
    return result;
  }
};

}  // namespace flashdsa::test
