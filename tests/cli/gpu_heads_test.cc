// Heads that are padded and cut for a peer.

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>

#include "flashdsa/runtime.h"
#include "tools/gpu.h"
#include "tools/placement.h"

namespace flashdsa::tools {
namespace {

// [rows, heads, channels] of words that tell where they stand.
Tensor numbered(std::int64_t rows, std::int64_t heads, std::int64_t channels) {
  const Tensor tensor = Tensor::host(DType::kInt32, {rows, heads, channels});
  const auto words = tensor.span<std::int32_t>();
  std::iota(words.begin(), words.end(), 1);
  return tensor;
}

class CopyHeads : public ::testing::Test {
 protected:
  void SetUp() override {
    if (best_backend() == Backend::kCpu) GTEST_SKIP() << "no GPU";
  }

  // `from` with another number of heads, by way of the device.
  static Tensor copied(const Tensor& from, std::int64_t heads) {
    const Placement there(Runtime{}, /*has_float64=*/false);
    Runtime runtime;
    runtime.stream = there.stream();
    const Tensor source = there.place(from);
    const TensorView& view = from;
    const Tensor target =
        allocate_beside(source, view.dtype, {view.shape[0], heads, view.shape[2]}, runtime);
    queue_copy_heads(source, target, runtime.stream);
    return there.fetch(target);
  }
};

TEST_F(CopyHeads, PadsWithZerosAndCuts) {
  for (const std::int64_t channels : {1, 3, 576}) {
    for (const auto& [from_heads, to_heads] : {std::pair(5, 64), std::pair(64, 5)}) {
      const Tensor from = numbered(7, from_heads, channels), to = copied(from, to_heads);
      for (std::int64_t row = 0; row < 7; ++row) {
        for (std::int64_t i = 0; i < to_heads * channels; ++i) {
          const std::int64_t place = row * from_heads * channels + i;
          ASSERT_EQ(
              to.span<std::int32_t>()[static_cast<std::size_t>(row * to_heads * channels + i)],
              i < from_heads * channels ? place + 1 : 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashdsa::tools
