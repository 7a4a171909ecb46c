#include <algorithm>

#include "attention/sm90/backward_many_heads/kernel.cuh"
#include "attention/sm90/backward_many_heads/launch.h"
#include "core/cuda/check.h"
#include "core/cuda/launch.h"

namespace flashdsa::attention::sm90::backward_many_heads {
namespace {

template <int kHeadDim, bool kGroups>
void launch(KernelParams params, int device, cudaStream_t stream) {
  using Sizes = Config<kHeadDim, kGroups>;
  constexpr auto kName = "sparse_mla_backward_many_heads_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_backward_many_heads_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  params.ctas = std::min(params.items, multiprocessors(device) / 2);  // pairs
  const dim3 grid(static_cast<unsigned>(2 * params.ctas));
  launch_clusters(kernel, grid, /*ctas=*/2, Sizes::kThreads, kSharedBytes, stream, params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace

void launch_backward_many_heads(const KernelParams& params, int head_dim, int device,
                                cudaStream_t stream) {
  (head_dim == 576 ? launch<576, false> : launch<512, false>)(params, device, stream);
}

void launch_backward_groups(const KernelParams& params, int head_dim, int device,
                            cudaStream_t stream) {
  (head_dim == 576 ? launch<576, true> : launch<512, true>)(params, device, stream);
}

}  // namespace flashdsa::attention::sm90::backward_many_heads
