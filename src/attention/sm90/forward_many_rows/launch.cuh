#pragma once

#include <algorithm>

#include "attention/sm90/forward_many_rows/kernel.cuh"
#include "core/cuda/check.h"

namespace flashdsa::attention::sm90::forward_many_rows {

template <typename Sizes>
void launch(KernelParams params, int64_t most_items, int device, cudaStream_t stream) {
  constexpr auto kName = "sparse_mla_forward_many_rows_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_forward_many_rows_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  params.ctas = static_cast<int>(std::min<int64_t>(most_items, multiprocessors(device)));
  const dim3 grid(static_cast<unsigned>(params.ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace flashdsa::attention::sm90::forward_many_rows
