// attention_backward on Hopper: the passes around the backward kernel, in stream order.
//
//   extents of the rows; aligned copies of inputs that the kernel cannot read in place;
//   default: kernel with atomics into FP32 accumulators;
//   deterministic, invariant: for every chunk of items the kernel that stores each slot's row, then
//   the ordered sum; channels into their order and dtype; the sink's sum.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "attention/backends.h"
#include "attention/sm90/backward/launch.h"
#include "attention/sm90/backward/ordered_sum.h"
#include "attention/sm90/backward/passes.h"
#include "core/cuda/check.h"
#include "core/scratch.h"

namespace flashdsa::attention::sm90 {
namespace {

using backward_pass::KernelParams;

constexpr std::int64_t kVectorBytes = 16;  // of cp.async and bulk copies
constexpr std::int64_t kHeadsPerItem = 64;

// Of the ordered modes' slot rows: 132 rows of K = 2048, D = 576, one for every SM, take 623 MB.
constexpr std::int64_t kOrderedRowBytes = std::int64_t{640} << 20;
constexpr std::int64_t kMaxItemsPerLaunch = std::int64_t{1} << 30;

struct Call {
  const BackwardParams& params;
  const Runtime& runtime;
  cudaStream_t stream;
};

bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0;
}

// A BF16 input [rows, heads, width] that the kernel reads in 16-byte pieces: itself, or a copy.
class VectorInput {
 public:
  VectorInput(const Call& call, const void* data, backward_pass::RepackParams shape)
      : shape_(shape),
        copied_(!readable(data)),
        copy_(call.runtime,
              copied_ ? static_cast<std::size_t>(shape.rows * shape.heads * shape.width) *
                            sizeof(__nv_bfloat16)
                      : 0,
              call.params.device) {
    shape_.from = static_cast<const __nv_bfloat16*>(data);
    if (!copied_) return;
    auto* copy = static_cast<__nv_bfloat16*>(copy_.data());
    backward_pass::launch_repack(shape_, copy, call.stream);
    shape_.from = copy;
    shape_.head_stride = shape_.width;
    shape_.row_stride = shape_.heads * shape_.width;
  }

  const __nv_bfloat16* data() const { return shape_.from; }
  std::int64_t row_stride() const { return shape_.row_stride; }
  std::int64_t head_stride() const { return shape_.head_stride; }

 private:
  static bool fits(std::int64_t count, std::int64_t stride) {
    constexpr auto kElement = static_cast<std::int64_t>(sizeof(__nv_bfloat16));
    return count <= 1 || (stride * kElement % kVectorBytes == 0 &&
                          stride * kElement <= std::numeric_limits<std::int32_t>::max());
  }
  bool readable(const void* data) const {
    return is_aligned(data) && fits(shape_.rows, shape_.row_stride) &&
           fits(shape_.heads, shape_.head_stride);
  }

  backward_pass::RepackParams shape_;
  bool copied_;
  core::Scratch copy_;
};

struct Inputs {
  VectorInput q, out, grad_out, kv;

  explicit Inputs(const Call& call)
      : q(call, call.params.q,
          per_head(call.params.q_row_stride, call.params.q_head_stride, call.params,
                   call.params.head_dim)),
        out(call, call.params.out,
            per_head(call.params.out_row_stride, call.params.out_head_stride, call.params,
                     kValueDim)),
        grad_out(call, call.params.grad_out,
                 per_head(call.params.grad_out_row_stride, call.params.grad_out_head_stride,
                          call.params, kValueDim)),
        kv(call, call.params.kv,
           {nullptr, call.params.kv_row_stride, 0, call.params.t_k, 1, call.params.head_dim}) {}

 private:
  static backward_pass::RepackParams per_head(std::int64_t row_stride, std::int64_t head_stride,
                                              const BackwardParams& params, std::int64_t width) {
    return {nullptr, row_stride, head_stride, params.t_q, params.heads, width};
  }
};

// What lies between the inputs and the results; an FP32 grad_kv and a grad_q that are aligned are
// written in place.
class Buffers {
 public:
  explicit Buffers(const Call& call)
      : accumulators(static_cast<float*>(call.params.grad_kv)),
        grad_q(static_cast<__nv_bfloat16*>(call.params.grad_q)),
        memory_(call.runtime, bytes(call.params), call.params.device) {
    core::Carver carver(memory_.data());
    carve(carver, call.params);
  }

  float* accumulators;              // [T_k, D], channels permuted
  __nv_bfloat16* grad_q;            // [T_q, H, D]
  std::int32_t* extents = nullptr;  // [T_q]
  float* sink_terms = nullptr;      // [T_q, H], or null

 private:
  std::size_t bytes(const BackwardParams& params) {
    core::Carver count;
    carve(count, params);
    return count.bytes();
  }

  void carve(core::Carver& carver, const BackwardParams& p) {
    extents = carver.take<std::int32_t>(static_cast<std::size_t>(p.t_q));
    if (p.grad_attn_sink != nullptr) {
      sink_terms = carver.take<float>(static_cast<std::size_t>(p.t_q * p.heads));
    }
    if (p.grad_kv_dtype != DType::kFloat32 || !is_aligned(p.grad_kv)) {
      accumulators = carver.take<float>(static_cast<std::size_t>(p.t_k * p.head_dim));
    }
    if (!is_aligned(p.grad_q)) {
      grad_q = carver.take<__nv_bfloat16>(static_cast<std::size_t>(p.t_q * p.heads * p.head_dim));
    }
  }

  core::Scratch memory_;
};

KernelParams kernel_params(const BackwardParams& p, const Inputs& inputs, const Buffers& buffers) {
  KernelParams kernel{};
  kernel.q = inputs.q.data();
  kernel.q_row_stride = inputs.q.row_stride();
  kernel.q_head_stride = inputs.q.head_stride();
  kernel.kv = inputs.kv.data();
  kernel.kv_row_bytes =
      p.t_k > 1 ? static_cast<std::uint32_t>(inputs.kv.row_stride()) * 2 : 0;  // row 0 needs none
  kernel.out = inputs.out.data();
  kernel.out_row_stride = inputs.out.row_stride();
  kernel.out_head_stride = inputs.out.head_stride();
  kernel.grad_out = inputs.grad_out.data();
  kernel.grad_out_row_stride = inputs.grad_out.row_stride();
  kernel.grad_out_head_stride = inputs.grad_out.head_stride();
  kernel.lse = static_cast<const float*>(p.lse);
  kernel.lse_row_stride = p.lse_row_stride;
  kernel.topk_indices = p.topk_indices;
  kernel.topk_indices_row_stride = p.topk_indices_row_stride;
  kernel.extents = buffers.extents;
  kernel.attn_sink = static_cast<const float*>(p.attn_sink);
  kernel.sink_terms = buffers.sink_terms;
  kernel.grad_q = buffers.grad_q;
  kernel.two_head_blocks = p.heads > kHeadsPerItem ? 1 : 0;
  kernel.heads = static_cast<int>(p.heads);
  kernel.t_k = static_cast<int>(p.t_k);
  kernel.topk = static_cast<int>(p.topk);
  kernel.softmax_scale = static_cast<float>(p.softmax_scale);
  return kernel;
}

// Adds every item's rows to `accumulators` with atomics.
void add_unordered(const Call& call, KernelParams kernel, std::int64_t items, float* accumulators) {
  kernel.grad_kv_rows = accumulators;
  for (std::int64_t first = 0; first < items; first += kMaxItemsPerLaunch) {
    kernel.first_item = first;
    kernel.items = static_cast<int>(std::min(kMaxItemsPerLaunch, items - first));
    backward_pass::launch_backward(kernel, static_cast<int>(call.params.head_dim), false,
                                   call.params.device.index, call.stream);
  }
}

// Items of a chunk: a bounded workspace, in whole waves of CTAs where it holds one.
std::int64_t ordered_chunk(const Call& call, std::int64_t items) {
  const BackwardParams& p = call.params;
  const std::int64_t item_bytes = p.topk * p.head_dim * static_cast<std::int64_t>(sizeof(float));
  std::int64_t chunk = std::max(kOrderedRowBytes / item_bytes, std::int64_t{1});
  const std::int64_t ctas = backward_pass::resident_ctas(p.device.index);
  if (chunk > ctas) chunk = chunk / ctas * ctas;
  return std::min(chunk, items);
}

// Adds every item's rows to `accumulators` in ascending (item, slot).
void add_ordered(const Call& call, KernelParams kernel, std::int64_t items, float* accumulators) {
  const BackwardParams& p = call.params;
  const std::int64_t chunk = ordered_chunk(call, items);
  const auto slots = static_cast<std::size_t>(chunk * p.topk);
  backward_pass::OrderedWorkspace workspace{};
  workspace.sort_bytes = backward_pass::sort_bytes(chunk * p.topk, kernel.t_k);
  const auto layout = [&](core::Carver& carver) {
    workspace.rows = carver.take<float>(slots * static_cast<std::size_t>(p.head_dim));
    for (auto& keys : workspace.keys) keys = carver.take<std::uint32_t>(slots);
    for (auto& numbers : workspace.slots) numbers = carver.take<std::uint32_t>(slots);
    workspace.sort = carver.take<std::byte>(workspace.sort_bytes);
  };
  core::Carver count;
  layout(count);
  const core::Scratch memory(call.runtime, count.bytes(), p.device);
  core::Carver carve(memory.data());
  layout(carve);

  kernel.grad_kv_rows = workspace.rows;
  for (std::int64_t first = 0; first < items; first += chunk) {
    kernel.first_item = first;
    kernel.items = static_cast<int>(std::min(chunk, items - first));
    backward_pass::launch_backward(kernel, static_cast<int>(p.head_dim), true, p.device.index,
                                   call.stream);
    if (p.t_k > 0) {
      backward_pass::launch_ordered_sum(kernel, static_cast<int>(p.head_dim), workspace,
                                        accumulators, call.stream);
    }
  }
}

// Accumulators and grad_q to where the caller wants them, the sink's sum.
void finish(const Call& call, const Buffers& buffers) {
  const BackwardParams& p = call.params;
  const std::int64_t count = p.t_k * p.head_dim;
  if (p.grad_kv_dtype == DType::kFloat32) {
    backward_pass::launch_unpermute(buffers.accumulators, static_cast<float*>(p.grad_kv), count,
                                    call.stream);
  } else {
    backward_pass::launch_unpermute(buffers.accumulators, static_cast<__nv_bfloat16*>(p.grad_kv),
                                    count, call.stream);
  }
  if (buffers.grad_q != p.grad_q) {
    const auto bytes =
        static_cast<std::size_t>(p.t_q * p.heads * p.head_dim) * sizeof(__nv_bfloat16);
    core::cuda::check(
        cudaMemcpyAsync(p.grad_q, buffers.grad_q, bytes, cudaMemcpyDeviceToDevice, call.stream),
        "copying grad_q");
  }
  if (p.grad_attn_sink != nullptr) {
    backward_pass::launch_sink_sum(buffers.sink_terms, p.t_q, static_cast<int>(p.heads),
                                   static_cast<float*>(p.grad_attn_sink), call.stream);
  }
}

}  // namespace

void backward(const BackwardParams& params, const Runtime& runtime) {
  const core::cuda::DeviceGuard guard(params.device.index);
  const Call call{params, runtime, static_cast<cudaStream_t>(runtime.stream.handle)};
  const Buffers buffers(call);
  const Inputs inputs(call);
  const KernelParams kernel = kernel_params(params, inputs, buffers);

  backward_pass::launch_extents({params.topk_indices, params.topk_indices_row_stride,
                                 params.topk_length, params.t_q, kernel.topk, kernel.t_k},
                                buffers.extents, call.stream);
  const auto grad_kv_bytes = static_cast<std::size_t>(params.t_k * params.head_dim) * sizeof(float);
  if (grad_kv_bytes > 0) {
    core::cuda::check(cudaMemsetAsync(buffers.accumulators, 0, grad_kv_bytes, call.stream),
                      "zeroing grad_kv");
  }
  const std::int64_t items = params.t_q << kernel.two_head_blocks;
  if (items > 0 && runtime.mode == Mode::kDefault) {
    add_unordered(call, kernel, items, buffers.accumulators);
  } else if (items > 0) {
    add_ordered(call, kernel, items, buffers.accumulators);
  }
  finish(call, buffers);
}

}  // namespace flashdsa::attention::sm90
