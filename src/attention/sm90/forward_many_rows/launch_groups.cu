#include "attention/sm90/forward_many_rows/launch.cuh"
#include "attention/sm90/forward_many_rows/launch.h"

namespace flashdsa::attention::sm90::forward_many_rows {

void launch_groups(const KernelParams& params, int head_dim, int device, cudaStream_t stream) {
  const auto run = head_dim == 576 ? launch<Config<576, true>> : launch<Config<512, true>>;
  run(params, params.t_q, device, stream);
}

}  // namespace flashdsa::attention::sm90::forward_many_rows
