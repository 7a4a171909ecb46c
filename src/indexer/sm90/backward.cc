// indexer_backward on Hopper, in stream order: zeroed FP32 sums of grad_index_k; the kernel, which
// adds to them with atomics (default), or for every chunk of rows the kernel that stores each
// slot's row and the ordered sum (deterministic, invariant); channels into their order and dtype.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/ordered_sum.h"
#include "core/device.h"
#include "core/scratch.h"
#include "indexer/backends.h"
#include "indexer/sm90/backward/launch.h"

namespace flashdsa::indexer::sm90 {
namespace {

using backward_pass::KernelParams;

constexpr std::int64_t kMaxRowsPerLaunch = std::int64_t{1} << 30;
constexpr std::int64_t kMaxChunkSlots = std::int64_t{1} << 30;

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

// Whether rows that lie `stride` BF16 numbers apart begin at multiples of 16 bytes if one does.
bool keeps_alignment(std::int64_t rows, std::int64_t stride) {
  return rows <= 1 || stride % 8 == 0;
}

struct Call {
  const BackwardParams& params;
  const Runtime& runtime;
  cudaStream_t stream;

  std::size_t sums_bytes() const {
    return static_cast<std::size_t>(params.t_k * kIndexDim) * sizeof(float);
  }

  // An FP32 grad_index_k that is aligned is its own accumulator.
  bool adds_in_place() const {
    return params.grad_index_k_dtype == DType::kFloat32 && is_aligned(params.grad_index_k);
  }
};

KernelParams kernel_params(const BackwardParams& p) {
  KernelParams kernel{};
  kernel.index_q = static_cast<const __nv_bfloat16*>(p.index_q);
  kernel.index_q_row_stride = p.index_q_row_stride;
  kernel.index_q_head_stride = p.index_q_head_stride;
  kernel.index_k = static_cast<const __nv_bfloat16*>(p.index_k);
  kernel.index_k_row_stride = p.index_k_row_stride;
  kernel.head_weights = p.head_weights;
  kernel.head_weights_row_stride = p.head_weights_row_stride;
  kernel.topk_indices = p.topk_indices;
  kernel.topk_indices_row_stride = p.topk_indices_row_stride;
  kernel.topk_length = p.topk_length;
  kernel.grad_scores = static_cast<const float*>(p.grad_scores);
  kernel.grad_scores_row_stride = p.grad_scores_row_stride;
  kernel.grad_index_q = static_cast<__nv_bfloat16*>(p.grad_index_q);
  kernel.grad_head_weights = p.grad_head_weights;
  kernel.heads = static_cast<int>(p.index_heads);
  kernel.t_k = static_cast<int>(p.t_k);
  kernel.topk = static_cast<int>(p.topk);
  kernel.weights_are_bf16 = p.weights_dtype == DType::kBFloat16;
  kernel.q_aligned = is_aligned(p.index_q) && keeps_alignment(p.t_q, p.index_q_row_stride) &&
                     keeps_alignment(p.index_heads, p.index_q_head_stride);
  kernel.k_aligned = is_aligned(p.index_k) && keeps_alignment(p.t_k, p.index_k_row_stride);
  kernel.grad_q_aligned = is_aligned(p.grad_index_q);
  return kernel;
}

void zero(const Call& call, float* sums) {
  if (call.params.t_k == 0) return;
  core::cuda::check(cudaMemsetAsync(sums, 0, call.sums_bytes(), call.stream),
                    "zeroing grad_index_k");
}

// Calls `launch` for ranges of rows, which it finds in its argument.
template <typename Launch>
void for_chunks(const Call& call, KernelParams kernel, std::int64_t chunk, const Launch& launch) {
  for (std::int64_t first = 0; first < call.params.t_q; first += chunk) {
    kernel.first_row = first;
    kernel.rows = static_cast<int>(std::min(chunk, call.params.t_q - first));
    launch(kernel);
  }
}

void add_unordered(const Call& call, float* sums) {
  zero(call, sums);
  KernelParams kernel = kernel_params(call.params);
  kernel.grad_k_rows = sums;
  for_chunks(call, kernel, kMaxRowsPerLaunch, [&](const KernelParams& rows) {
    backward_pass::launch_backward(rows, false, call.params.device.index, call.stream);
  });
}

// The ordered modes' workspace of `rows` rows.
class Workspace {
 public:
  Workspace(const Call& call, std::int64_t rows) : slots_(rows * call.params.topk) {
    layout_.sort_bytes = core::cuda::sort_bytes(slots_, static_cast<int>(call.params.t_k));
  }

  std::size_t bytes() {
    core::Carver count;
    carve(count);
    return count.bytes();
  }

  const core::cuda::OrderedWorkspace& carve(core::Carver& carver) {
    const auto slots = static_cast<std::size_t>(slots_);
    layout_.rows = carver.take<float>(slots * static_cast<std::size_t>(kIndexDim));
    for (auto& keys : layout_.keys) keys = carver.take<std::uint32_t>(slots);
    for (auto& numbers : layout_.slots) numbers = carver.take<std::uint32_t>(slots);
    layout_.sort = carver.take<std::byte>(layout_.sort_bytes);
    return layout_;
  }

 private:
  std::int64_t slots_;
  core::cuda::OrderedWorkspace layout_{};
};

// Rows of a chunk: what the budget holds beside the sums, at least one.
std::int64_t ordered_chunk(const Call& call) {
  const BackwardParams& p = call.params;
  const std::size_t sums = call.adds_in_place() ? 0 : call.sums_bytes();
  const std::size_t budget =
      call.runtime.scratch_budget_bytes - std::min(sums, call.runtime.scratch_budget_bytes);
  const std::size_t slot_bytes = (kIndexDim + 4) * sizeof(float);  // without the sort
  const auto affordable = static_cast<std::int64_t>(
      std::min(budget / slot_bytes, static_cast<std::size_t>(kMaxChunkSlots)));
  std::int64_t chunk = std::clamp<std::int64_t>(affordable / p.topk, 1, p.t_q);
  while (chunk > 1 && Workspace(call, chunk).bytes() > budget) chunk -= (chunk + 63) / 64;
  return chunk;
}

void add_ordered(const Call& call, float* sums) {
  const BackwardParams& p = call.params;
  const std::int64_t chunk = ordered_chunk(call);
  Workspace layout(call, chunk);
  const core::Scratch memory(call.runtime, layout.bytes(), p.device);
  core::Carver carver(memory.data());
  const core::cuda::OrderedWorkspace& workspace = layout.carve(carver);
  zero(call, sums);
  KernelParams kernel = kernel_params(p);
  kernel.grad_k_rows = workspace.rows;
  for_chunks(call, kernel, chunk, [&](const KernelParams& rows) {
    backward_pass::launch_backward(rows, true, p.device.index, call.stream);
    if (p.t_k == 0) return;
    core::cuda::launch_ordered_sum<kIndexDim>(
        {p.topk_indices, p.topk_indices_row_stride, p.topk_length, rows.first_row, rows.rows,
         /*parts_log2=*/0, rows.topk, rows.t_k},
        workspace, sums, call.stream);
  });
}

void store_grad_index_k(const Call& call, const float* sums) {
  const BackwardParams& p = call.params;
  if (p.grad_index_k_dtype == DType::kFloat32) {
    backward_pass::launch_store_channels(sums, static_cast<float*>(p.grad_index_k), p.t_k,
                                         call.stream);
  } else {
    backward_pass::launch_store_channels(sums, static_cast<__nv_bfloat16*>(p.grad_index_k), p.t_k,
                                         call.stream);
  }
}

}  // namespace

void backward(const BackwardParams& params, const Runtime& runtime) {
  const core::cuda::DeviceGuard guard(params.device.index);
  const Call call{params, runtime, static_cast<cudaStream_t>(runtime.stream.handle)};
  const core::Scratch memory(runtime, call.adds_in_place() ? 0 : call.sums_bytes(), params.device);
  auto* sums = static_cast<float*>(call.adds_in_place() ? params.grad_index_k : memory.data());
  if (params.t_q == 0) {
    zero(call, sums);
  } else if (runtime.mode == Mode::kDefault) {
    add_unordered(call, sums);
  } else {
    add_ordered(call, sums);
  }
  if (params.t_k > 0) store_grad_index_k(call, sums);
}

}  // namespace flashdsa::indexer::sm90
