#include <algorithm>

#include "core/cuda/check.h"
#include "indexer/sm90/backward/kernel.cuh"
#include "indexer/sm90/backward/launch.h"

namespace flashdsa::indexer::sm90::backward_pass {
namespace {

template <int kHeads, bool kOrdered>
void launch(KernelParams params, int device, cudaStream_t stream) {
  using Sizes = Config<kHeads, kOrdered>;
  constexpr auto kName = "indexer_backward_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = indexer_backward_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  const int ctas = std::min(params.rows, multiprocessors(device));
  params.walkers = ctas * Sizes::kWalkers;
  const dim3 grid(static_cast<unsigned>(ctas));
  kernel<<<grid, Sizes::kThreads, kSharedBytes, stream>>>(params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

template <bool kOrdered>
void launch(const KernelParams& params, int device, cudaStream_t stream) {
  const auto run = params.heads <= 16   ? launch<16, kOrdered>
                   : params.heads <= 32 ? launch<32, kOrdered>
                                        : launch<64, kOrdered>;
  run(params, device, stream);
}

}  // namespace

void launch_backward(const KernelParams& params, bool ordered, int device, cudaStream_t stream) {
  const auto run = ordered ? launch<true> : launch<false>;
  run(params, device, stream);
}

}  // namespace flashdsa::indexer::sm90::backward_pass
