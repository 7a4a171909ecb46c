// Forward on Hopper: finds how far each row reaches, packs q and kv when their rows are not aligned
// to 16 bytes, and queues the kernel.

#include <cstddef>
#include <cstdint>
#include <numbers>

#include "attention/backends.h"
#include "attention/sm90/aligned_rows.h"
#include "attention/sm90/forward/launch.h"
#include "attention/sm90/rows.h"
#include "core/cuda/check.h"
#include "core/device.h"
#include "core/scratch.h"

namespace flashdsa::attention::sm90 {
using forward_pass::KernelParams;

std::string refusal(const CommonParams& params) {
  if (params.device.kind != DeviceKind::kCuda) return "the tensors are not on a CUDA device";
  if (params.real != DType::kBFloat16) return "takes bfloat16 only";
  return core::sm90_refusal(params.device.index);
}

void forward(const ForwardParams& params, const Runtime& runtime) {
  if (params.t_q == 0) return;
  const core::cuda::DeviceGuard guard(params.device.index);
  const auto stream = static_cast<cudaStream_t>(runtime.stream.handle);
  const int width = static_cast<int>(params.head_dim);

  const AlignedRows q({static_cast<const __nv_bfloat16*>(params.q), params.t_q, params.heads, width,
                       params.q_row_stride, params.q_head_stride},
                      runtime, params.device, stream);
  const AlignedRows kv({static_cast<const __nv_bfloat16*>(params.kv), params.t_k, 1, width,
                        params.kv_row_stride, width},
                       runtime, params.device, stream);
  const core::Scratch scratch(runtime, static_cast<std::size_t>(params.t_q) * sizeof(std::int32_t),
                              params.device);
  auto* extents = static_cast<std::int32_t*>(scratch.data());
  launch_row_extents({params.topk_indices, params.topk_indices_row_stride, params.topk_length,
                      params.t_q, static_cast<int>(params.topk), static_cast<int>(params.t_k)},
                     extents, stream);

  KernelParams kernel{};
  kernel.q = q.data;
  kernel.q_row_stride = q.outer_stride;
  kernel.q_head_stride = q.inner_stride;
  kernel.kv = kv.data;
  kernel.kv_row_bytes = kv.outer_stride * static_cast<std::int64_t>(sizeof(__nv_bfloat16));
  kernel.topk_indices = params.topk_indices;
  kernel.topk_indices_row_stride = params.topk_indices_row_stride;
  kernel.extents = extents;
  kernel.attn_sink = static_cast<const float*>(params.attn_sink);
  kernel.out = static_cast<__nv_bfloat16*>(params.out);
  kernel.out_aligned = is_aligned(params.out);
  kernel.lse = static_cast<float*>(params.lse);
  kernel.max_logits = static_cast<float*>(params.max_logits);
  kernel.head_blocks_log2 = params.heads > 64 ? 1 : 0;
  kernel.items = params.t_q << kernel.head_blocks_log2;
  kernel.heads = static_cast<int>(params.heads);
  kernel.t_k = static_cast<int>(params.t_k);
  kernel.softmax_scale = static_cast<float>(params.softmax_scale);
  kernel.softmax_scale_log2e = static_cast<float>(params.softmax_scale * std::numbers::log2e);
  forward_pass::launch_forward(kernel, width, params.device.index, stream);
}

}  // namespace flashdsa::attention::sm90
