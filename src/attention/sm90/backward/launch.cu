#include <algorithm>

#include "attention/sm90/backward/kernel.cuh"
#include "attention/sm90/backward/launch.h"
#include "core/cuda/check.h"

namespace flashdsa::attention::sm90::backward_pass {
namespace {

template <typename Sizes>
void launch(KernelParams params, int device, cudaStream_t stream) {
  constexpr auto kName = "sparse_mla_backward_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_backward_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  params.ctas = std::min(params.items, resident_ctas(device));
  const dim3 grid(static_cast<unsigned>(params.ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

template <int kHeadDim, bool kOrdered, bool kGroups = false>
void launch_passes(const KernelParams& params, int device, cudaStream_t stream) {
  launch<Config<kHeadDim, kOrdered, false, kGroups>>(params, device, stream);
  launch<Config<kHeadDim, kOrdered, true, kGroups>>(params, device, stream);
}

}  // namespace

int resident_ctas(int device) { return multiprocessors(device); }

void launch_backward(const KernelParams& params, int head_dim, bool ordered, int device,
                     cudaStream_t stream) {
  const auto run = head_dim == 576
                       ? (ordered ? launch_passes<576, true> : launch_passes<576, false>)
                       : (ordered ? launch_passes<512, true> : launch_passes<512, false>);
  run(params, device, stream);
}

void launch_backward_groups(const KernelParams& params, int head_dim, int device,
                            cudaStream_t stream) {
  const auto run =
      head_dim == 576 ? launch_passes<576, false, true> : launch_passes<512, false, true>;
  run(params, device, stream);
}

void launch_repair(const KernelParams& params, int head_dim, int device, cudaStream_t stream) {
  const auto run =
      head_dim == 576 ? launch<Config<576, false, true>> : launch<Config<512, false, true>>;
  run(params, device, stream);
}

}  // namespace flashdsa::attention::sm90::backward_pass
