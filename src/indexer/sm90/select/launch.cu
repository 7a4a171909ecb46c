#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "indexer/sm90/select/kernel.cuh"
#include "indexer/sm90/select/launch.h"

namespace flashdsa::indexer::sm90::select_pass {
namespace {

using namespace core::cuda;

template <Tasks kTasks>
void launch(const KernelParams& params, int multiprocessors, cudaStream_t stream) {
  using Sizes = Config<kTasks>;
  constexpr auto kName = "indexer_select_kernel";
  constexpr std::size_t kSharedBytes = sizeof(SharedStorage<Sizes>);
  const auto kernel = indexer_select_kernel<Sizes>;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), kName, kSharedBytes);
  const dim3 grid(static_cast<unsigned>(multiprocessors * Sizes::kCtasPerSm));
  launch_behind(kernel, grid, Sizes::kThreads, kSharedBytes, stream, params);
  check_launch(kName, grid, Sizes::kThreads, kSharedBytes);
}

}  // namespace

void launch_select(const KernelParams& params, std::int64_t segment_columns, int multiprocessors,
                   cudaStream_t stream) {
  const auto kernel =
      segment_columns <= kShortColumns ? launch<Tasks::kShortRows> : launch<Tasks::kLongRows>;
  kernel(params, multiprocessors, stream);
}

void launch_merge(const KernelParams& params, int multiprocessors, cudaStream_t stream) {
  launch<Tasks::kMerges>(params, multiprocessors, stream);
}

}  // namespace flashdsa::indexer::sm90::select_pass
