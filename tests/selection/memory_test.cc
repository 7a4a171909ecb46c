// Whichever memory a call lacks, it ends with Error(kMemory) and has written nothing.

#include <memory>
#include <optional>

#include "flashdsa/selection.h"
#include "tests/support/expect_error.h"
#include "tests/support/failing_memory.h"
#include "tests/support/host_tensor.h"

namespace flashdsa::test {
namespace {

class CompactMemory : public ::testing::TestWithParam<Backend> {
 protected:
  static Runtime runtime() {
    Runtime runtime;
    runtime.backend = GetParam();
    runtime.threads = 2;
    return runtime;
  }
};

FallibleCall compact_call(std::int64_t key_count) {
  struct Tensors {
    HostTensor indices{DType::kInt32, {40, 7}};
    HostTensor sorted{DType::kInt32, {40, 7}};
    HostTensor lengths{DType::kInt32, {40}};
  };
  const auto of = std::make_shared<Tensors>();
  for (std::int64_t i = 0; i < of->indices.elements(); ++i) {
    of->indices.set(i, static_cast<double>(i * 31 % 97));
  }
  return {[=](const Runtime& runtime) {
            compact_and_sort({of->indices, key_count, of->sorted, of->lengths}, runtime);
          },
          [=] { return of->sorted.untouched() && of->lengths.untouched(); }};
}

TEST_P(CompactMemory, WithoutMemoryIsAnErrorThatWritesNothing) {
  const auto make = [] { return compact_call(60); };
  EXPECT_GT(fail_every_new(runtime(), make), 0);
  EXPECT_EQ(fail_every_allocation(runtime(), make), 0);
}

// A refusal whose sentence finds no memory is a memory error, not an exception of another type.
TEST_P(CompactMemory, ARefusalWithoutMemoryIsAMemoryError) {
  const auto make = [] { return compact_call(-1); };
  EXPECT_GT(fail_every_new(runtime(), make), 0);
  expect_error([&] { make().run(runtime()); }, ErrorCode::kValue,
               "compact_and_sort: key_count must be in 0..2147483646, got -1");
}

class PlanMemory : public CompactMemory {};

TEST_P(PlanMemory, WithoutMemoryIsAnError) {
  const auto make = [] {
    const auto indices = std::make_shared<HostTensor>(DType::kInt32, Shape{40, 1, 7});
    for (std::int64_t i = 0; i < indices->elements(); ++i) {
      indices->set(i, static_cast<double>(i % 7 * 2 + i / 70));
    }
    return FallibleCall{[=](const Runtime& runtime) {
                          build_selection_plan({*indices, std::nullopt, 60, 8}, runtime);
                        },
                        [] { return true; }};
  };
  EXPECT_GT(fail_every_new(runtime(), make), 0);
}

INSTANTIATE_TEST_SUITE_P(Host, PlanMemory, ::testing::Values(Backend::kReference, Backend::kCpu),
                         [](const auto& test) { return std::string(backend_name(test.param)); });
INSTANTIATE_TEST_SUITE_P(Host, CompactMemory, ::testing::Values(Backend::kReference, Backend::kCpu),
                         [](const auto& test) { return std::string(backend_name(test.param)); });

}  // namespace
}  // namespace flashdsa::test
