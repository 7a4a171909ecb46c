#include <algorithm>

#include "attention/sm90/forward_groups/kernel.cuh"
#include "attention/sm90/forward_groups/launch.h"
#include "core/cuda/check.h"

namespace flashdsa::attention::sm90::forward_groups {
namespace {

template <int kHeadDim>
void launch(const KernelParams& params, int device, cudaStream_t stream) {
  using Sizes = Config<kHeadDim>;
  constexpr auto kName = "sparse_mla_forward_groups_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_forward_groups_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  const int64_t ctas = std::min<int64_t>(params.t_q, multiprocessors(device));
  const dim3 grid(static_cast<unsigned>(ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace

void launch_forward_groups(const KernelParams& params, int head_dim, int device,
                           cudaStream_t stream) {
  (head_dim == 576 ? launch<576> : launch<512>)(params, device, stream);
}

}  // namespace flashdsa::attention::sm90::forward_groups
