#include "attention/sm90/forward_many_rows/launch.cuh"
#include "attention/sm90/forward_many_rows/launch.h"

namespace flashdsa::attention::sm90::forward_many_rows {

void launch_rows(const KernelParams& params, int head_dim, int device, cudaStream_t stream) {
  const auto run = head_dim == 576 ? launch<Config<576, false>> : launch<Config<512, false>>;
  run(params, params.items, device, stream);
}

}  // namespace flashdsa::attention::sm90::forward_many_rows
