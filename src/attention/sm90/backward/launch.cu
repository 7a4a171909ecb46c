#include <algorithm>

#include "attention/sm90/backward/kernel.cuh"
#include "attention/sm90/backward/launch.h"
#include "core/cuda/check.h"

namespace flashdsa::attention::sm90::backward_pass {
namespace {

template <int kHeadDim, bool kOrdered>
void launch(KernelParams params, int device, cudaStream_t stream) {
  using Sizes = Config<kHeadDim>;
  constexpr auto kName = "sparse_mla_backward_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = sparse_mla_backward_kernel<Sizes, kOrdered>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  params.ctas = std::min(params.items, resident_ctas(device));
  const dim3 grid(static_cast<unsigned>(params.ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace

int resident_ctas(int device) { return multiprocessors(device); }

void launch_backward(const KernelParams& params, int head_dim, bool ordered, int device,
                     cudaStream_t stream) {
  const auto run = head_dim == 576 ? (ordered ? launch<576, true> : launch<576, false>)
                                   : (ordered ? launch<512, true> : launch<512, false>);
  run(params, device, stream);
}

}  // namespace flashdsa::attention::sm90::backward_pass
