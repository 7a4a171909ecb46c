#include "attention/cpu/select_kernels.h"

#include <algorithm>

#include "core/simd/target.h"

namespace flashdsa::attention::cpu {

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

Sizes sizes_of(const CommonParams& params) {
  return {static_cast<std::int32_t>(params.heads), static_cast<std::int32_t>(params.head_dim),
          static_cast<std::int32_t>(params.topk), static_cast<float>(params.softmax_scale)};
}

std::int32_t counted_keys(const CommonParams& params, std::int64_t t, std::int32_t* keys) {
  std::int64_t slots = params.topk;
  if (params.topk_length != nullptr) {
    slots = std::clamp<std::int64_t>(params.topk_length[t], 0, params.topk);
  }
  const std::int32_t* row = params.topk_indices + t * params.topk_indices_row_stride;
  std::int32_t count = 0;
  for (std::int64_t j = 0; j < slots; ++j) {
    if (row[j] >= 0 && row[j] < params.t_k) keys[count++] = row[j];
  }
  return count;
}

}  // namespace flashdsa::attention::cpu
