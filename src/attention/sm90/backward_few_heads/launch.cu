#include <algorithm>

#include "attention/sm90/backward_few_heads/kernel.cuh"
#include "attention/sm90/backward_few_heads/launch.h"
#include "core/cuda/check.h"

namespace flashdsa::attention::sm90::backward_few_heads {
namespace {

template <int kHeadDim, int kColumns>
void launch(KernelParams params, int device, cudaStream_t stream) {
  using Sizes = Config<kHeadDim, kColumns>;
  constexpr auto kName = "sparse_mla_backward_few_heads_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_backward_few_heads_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  params.ctas = std::min(params.items, multiprocessors(device));
  const dim3 grid(static_cast<unsigned>(params.ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

template <int kHeadDim>
void launch_for_heads(const KernelParams& params, int device, cudaStream_t stream) {
  const auto launcher = params.heads <= 8    ? launch<kHeadDim, 8>
                        : params.heads <= 16 ? launch<kHeadDim, 16>
                                             : launch<kHeadDim, 32>;
  launcher(params, device, stream);
}

}  // namespace

void launch_backward_few_heads(const KernelParams& params, int head_dim, int device,
                               cudaStream_t stream) {
  (head_dim == 576 ? launch_for_heads<576> : launch_for_heads<512>)(params, device, stream);
}

}  // namespace flashdsa::attention::sm90::backward_few_heads
