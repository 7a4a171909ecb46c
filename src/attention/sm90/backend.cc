// Forward on Hopper: packs q and kv when their rows are not aligned to 16 bytes, finds how far each
// row reaches unless a plan says so, and queues the kernels. Above 32 heads that is the kernel for
// many rows, over all tokens. Up to 32 it takes the groups of a plan, the caller's or the call's
// own, and the kernel for few heads the tokens that are in none.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "attention/backends.h"
#include "attention/sm90/aligned_rows.h"
#include "attention/sm90/call_plan.h"
#include "attention/sm90/forward_few_heads/launch.h"
#include "attention/sm90/forward_many_rows/launch.h"
#include "attention/sm90/forward_params.h"
#include "attention/sm90/rows.h"
#include "core/cuda/check.h"
#include "core/device.h"
#include "core/scratch.h"

namespace flashdsa::attention::sm90 {
namespace {

// Extents of the rows; with a plan, flags of its items if they may have several rows.
std::size_t scratch_bytes(const ForwardParams& params, const selection::PlanView* plan) {
  const auto rows = static_cast<std::size_t>(params.t_q);
  if (plan == nullptr) return rows * sizeof(std::int32_t);
  return plan->group > 1 ? rows * kValueWarps : 0;
}

}  // namespace

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
  const CallPlan call_plan(params, runtime.mode != Mode::kInvariant, runtime);
  const selection::PlanView* plan = call_plan.get();
  ForwardKernelParams kernel{};
  const core::Scratch scratch(runtime, scratch_bytes(params, plan), params.device);
  if (plan == nullptr) {
    auto* extents = static_cast<std::int32_t*>(scratch.data());
    launch_row_extents({params.topk_indices, params.topk_indices_row_stride, params.topk_length,
                        params.t_q, static_cast<int>(params.topk), static_cast<int>(params.t_k)},
                       extents, stream);
    kernel.extents = extents;
  } else {
    kernel.extents = plan->row_keys;
    kernel.plan = *plan;
    kernel.group_log2 = std::countr_zero(static_cast<unsigned>(plan->group));
    kernel.not_finite = static_cast<std::uint8_t*>(scratch.data());
  }
  kernel.q = q.data;
  kernel.q_row_stride = q.outer_stride;
  kernel.q_head_stride = q.inner_stride;
  kernel.kv = kv.data;
  kernel.kv_row_bytes = kv.outer_stride * static_cast<std::int64_t>(sizeof(__nv_bfloat16));
  kernel.topk_indices = params.topk_indices;
  kernel.topk_indices_row_stride = params.topk_indices_row_stride;
  kernel.attn_sink = static_cast<const float*>(params.attn_sink);
  kernel.out = static_cast<__nv_bfloat16*>(params.out);
  kernel.out_aligned = is_aligned(params.out);
  kernel.lse = static_cast<float*>(params.lse);
  kernel.max_logits = static_cast<float*>(params.max_logits);
  kernel.t_q = params.t_q;
  kernel.heads = static_cast<int>(params.heads);
  kernel.inverse_heads = (0x10000 + kernel.heads - 1) / kernel.heads;
  kernel.head_blocks_log2 = params.heads > 64 ? 1 : 0;
  kernel.items = params.t_q << kernel.head_blocks_log2;
  kernel.t_k = static_cast<int>(params.t_k);
  kernel.softmax_scale = static_cast<float>(params.softmax_scale);
  kernel.softmax_scale_log2e = static_cast<float>(params.softmax_scale * std::numbers::log2e);
  const int device = params.device.index;
  if (params.heads > forward_few_heads::kMostHeads) {
    forward_many_rows::launch_rows(kernel, width, device, stream);
    return;
  }
  forward_few_heads::launch_forward_few_heads(kernel, width, device, stream);
  if (plan != nullptr) {
    forward_many_rows::launch_groups(kernel, width, device, stream);
  }
}

}  // namespace flashdsa::attention::sm90
