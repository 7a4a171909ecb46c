// Heads copied between tensors of different head counts: the padding that a kernel for 64 heads
// needs.
//
//   a CTA takes rows blockIdx.x, += gridDim.x; its threads take the words of the row of `to`

#include <algorithm>
#include <cstdint>

#include "core/cuda/check.h"
#include "tools/gpu.h"

namespace flashdsa::tools {
namespace {

constexpr int kThreads = 256;

// Sizes count words.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    copy_heads_kernel(const Word* from, int from_words, Word* to, int to_words, std::int64_t rows) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int i = static_cast<int>(threadIdx.x); i < to_words; i += kThreads) {
      to[row * to_words + i] = i < from_words ? from[row * from_words + i] : Word{};
    }
  }
}

template <typename Word>
void launch_copy_heads(const TensorView& from, const TensorView& to, Stream stream) {
  const auto words_of_row = [](const TensorView& view) {
    return static_cast<int>(view.bytes() / static_cast<std::size_t>(view.shape[0]) / sizeof(Word));
  };
  const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(to.shape[0], 1 << 16)));
  copy_heads_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(
      from.as<const Word>(), words_of_row(from), to.as<Word>(), words_of_row(to), to.shape[0]);
  core::cuda::check_launch("copy_heads_kernel", grid, kThreads, 0);
}

}  // namespace

void queue_copy_heads(const TensorView& from, const TensorView& to, Stream stream) {
  if (to.elements() == 0) return;
  const core::cuda::DeviceGuard guard(to.device.index);
  const auto is_whole = [](const TensorView& view) {
    return view.bytes() / static_cast<std::size_t>(view.shape[0]) % sizeof(uint4) == 0;
  };
  if (is_whole(from) && is_whole(to)) {
    launch_copy_heads<uint4>(from, to, stream);
  } else {
    launch_copy_heads<std::uint32_t>(from, to, stream);
  }
}

}  // namespace flashdsa::tools
