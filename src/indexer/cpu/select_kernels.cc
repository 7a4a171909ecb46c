#include "indexer/cpu/select_kernels.h"

#include <algorithm>

#include "core/simd/target.h"

namespace flashdsa::indexer::cpu {

const Kernels& select_kernels(const Runtime& runtime) {
  switch (core::simd::choose(runtime.simd)) {
#if defined(__x86_64__)
    case SimdTarget::kAvx512Bf16:
      return avx512bf16::kernels();
    case SimdTarget::kAvx512:
      return avx512::kernels();
    case SimdTarget::kAvx2:
      return avx2::kernels();
#endif
    default:
      return baseline::kernels();
  }
}

void read_weights(const CommonParams& params, std::int64_t t, float* weights) {
  const std::int64_t at = t * params.head_weights_row_stride;
  if (params.weights_dtype == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(params.head_weights) + at, params.index_heads, weights);
    return;
  }
  const auto* bits = static_cast<const std::uint16_t*>(params.head_weights) + at;
  std::transform(bits, bits + params.index_heads, weights, [](std::uint16_t value) {
    return static_cast<float>(BFloat16::from_bits(value));
  });
}

}  // namespace flashdsa::indexer::cpu
