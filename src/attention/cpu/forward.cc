// Forward on the CPU: rows are handed to threads one by one; kernels.cc computes a row.

#include <algorithm>
#include <limits>

#include "attention/backends.h"
#include "attention/cpu/select_kernels.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/scratch.h"

namespace flashdsa::attention::cpu {

std::string refusal(const CommonParams& params) {
  if (params.device.kind != DeviceKind::kCpu) return "the tensors are not on the host";
  if (params.real != DType::kBFloat16) return "takes bfloat16 only";
  return "";
}

void forward(const ForwardParams& params, const Runtime& runtime) {
  const Kernels& kernels = select_kernels(runtime);
  const Sizes sizes = sizes_of(params);
  const std::size_t heads = static_cast<std::size_t>(params.heads);
  const int threads = core::thread_count(runtime, params.t_q);
  const std::size_t key_bytes = static_cast<std::size_t>(params.topk) * sizeof(std::int32_t);
  core::WorkerScratch scratch(runtime, threads, kernels.forward_scratch_bytes(sizes), key_bytes);
  core::ProgressReporter progress(runtime, params.t_q);

  core::parallel_for(threads, params.t_q, [&](std::int64_t t, int worker) {
    auto* keys = static_cast<std::int32_t*>(scratch.second(worker));
    const std::int64_t head_row = t * params.heads;
    ForwardRow row;
    row.q = static_cast<const std::uint16_t*>(params.q) + t * params.q_row_stride;
    row.q_head_stride = params.q_head_stride;
    row.kv = static_cast<const std::uint16_t*>(params.kv);
    row.kv_row_stride = params.kv_row_stride;
    row.keys = keys;
    row.key_count = counted_keys(params, t, keys);
    row.attn_sink = static_cast<const float*>(params.attn_sink);
    row.out = static_cast<std::uint16_t*>(params.out) + head_row * kValueDim;
    row.lse = static_cast<float*>(params.lse) + head_row;
    row.max_logits =
        params.max_logits == nullptr ? nullptr : static_cast<float*>(params.max_logits) + head_row;
    if (row.key_count > 0) {
      kernels.forward_row(sizes, row, scratch.first(worker));
    } else {
      constexpr float kNone = -std::numeric_limits<float>::infinity();
      std::fill_n(row.out, heads * kValueDim, std::uint16_t{0});
      std::fill_n(row.lse, heads, kNone);
      if (row.max_logits != nullptr) std::fill_n(row.max_logits, heads, kNone);
    }
    progress.advance();
  });
}

}  // namespace flashdsa::attention::cpu
