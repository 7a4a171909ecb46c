#include <algorithm>

#include "attention/sm90/forward/kernel.cuh"
#include "attention/sm90/forward/launch.h"
#include "core/cuda/check.h"

namespace flashdsa::attention::sm90::forward_pass {
namespace {

template <int kHeadDim>
void launch(const KernelParams& params, int device, cudaStream_t stream) {
  using Sizes = Config<kHeadDim>;
  constexpr auto kName = "sparse_mla_forward_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_forward_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  const int64_t ctas = std::min<int64_t>(params.items, multiprocessors(device));
  const dim3 grid(static_cast<unsigned>(ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace

void launch_forward(const KernelParams& params, int head_dim, int device, cudaStream_t stream) {
  (head_dim == 576 ? launch<576> : launch<512>)(params, device, stream);
}

}  // namespace flashdsa::attention::sm90::forward_pass
