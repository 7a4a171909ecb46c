#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "indexer/params.h"
#include "indexer/sm90/scores/kernel.cuh"
#include "indexer/sm90/scores/launch.h"

namespace flashdsa::indexer::sm90::score_pass {
namespace {

template <int kHeads, bool kAllHeads>
void launch(const KernelParams& params, const CUtensorMap& queries, const CUtensorMap& keys,
            int ctas, cudaStream_t stream) {
  using Sizes = Config<kHeads>;
  constexpr auto kName = "indexer_scores_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = indexer_scores_kernel<Sizes, kAllHeads>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  const dim3 grid(static_cast<unsigned>(ctas));
  launch_behind(kernel, grid, Sizes::kThreads, kSharedBytes, stream, params, queries, keys);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace

void launch_scores(const KernelParams& params, const CUtensorMap& queries, const CUtensorMap& keys,
                   int ctas, cudaStream_t stream) {
  const bool all = params.heads == padded_heads(params.heads);
  const auto kernel = params.heads <= 32 ? (all ? launch<32, true> : launch<32, false>)
                                         : (all ? launch<64, true> : launch<64, false>);
  kernel(params, queries, keys, ctas, stream);
}

}  // namespace flashdsa::indexer::sm90::score_pass
