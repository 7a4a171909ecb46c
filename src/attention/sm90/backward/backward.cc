// attention_backward on Hopper: the passes around the backward kernel, in stream order.
//
//   extents of the rows, or what a plan (the caller's or the call's own) computes together;
//   aligned copies of inputs that the kernels cannot read in place;
//   default: kernels with atomics into FP32 accumulators, each with its repair: that for few heads,
//   that for more heads or a plan's items of several tokens;
//   deterministic, invariant: for every chunk of items the kernel that stores each slot's row, its
//   repair, then the ordered sum;
//   channels into their order and dtype; the sink's sum.

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/backends.h"
#include "attention/sm90/aligned_rows.h"
#include "attention/sm90/backward/groups.h"
#include "attention/sm90/backward/launch.h"
#include "attention/sm90/backward/passes.h"
#include "attention/sm90/backward_few_heads/launch.h"
#include "attention/sm90/call_plan.h"
#include "attention/sm90/rows.h"
#include "core/cuda/check.h"
#include "core/cuda/ordered_sum.h"
#include "core/scratch.h"

namespace flashdsa::attention::sm90 {
namespace {

using backward_pass::KernelParams;

constexpr std::int64_t kHeadsPerItem = 64;

// Of the ordered modes' slot rows: 132 rows of K = 2048, D = 576, one for every SM, take 623 MB.
constexpr std::int64_t kOrderedRowBytes = std::int64_t{640} << 20;
constexpr std::int64_t kMaxItemsPerLaunch = std::int64_t{1} << 30;

// Accumulators of as many bytes stay in second-level cache, whatever the order of the adds.
constexpr std::int64_t kCachedBytes = std::int64_t{32} << 20;

struct Call {
  const BackwardParams& params;
  const selection::PlanView* plan;  // or null
  const Runtime& runtime;
  cudaStream_t stream;
};

int two_head_blocks(const BackwardParams& p) { return p.heads > kHeadsPerItem ? 1 : 0; }
std::int64_t items_of(const BackwardParams& p) { return p.t_q << two_head_blocks(p); }

// Whether rows may share a tile; the order of an ordered mode is that of rows alone.
bool walks_groups(const Call& call) {
  return call.plan != nullptr && call.plan->group > 1 && call.runtime.mode == Mode::kDefault;
}

struct Inputs {
  AlignedRows q, out, grad_out, kv;

  explicit Inputs(const Call& call)
      : q(per_head(call, call.params.q, call.params.q_row_stride, call.params.q_head_stride,
                   call.params.head_dim)),
        out(per_head(call, call.params.out, call.params.out_row_stride, call.params.out_head_stride,
                     kValueDim)),
        grad_out(per_head(call, call.params.grad_out, call.params.grad_out_row_stride,
                          call.params.grad_out_head_stride, kValueDim)),
        kv({static_cast<const __nv_bfloat16*>(call.params.kv), call.params.t_k, 1,
            static_cast<int>(call.params.head_dim), call.params.kv_row_stride,
            call.params.head_dim},
           call.runtime, call.params.device, call.stream) {}

 private:
  static AlignedRows per_head(const Call& call, const void* data, std::int64_t row_stride,
                              std::int64_t head_stride, std::int64_t width) {
    return {{static_cast<const __nv_bfloat16*>(data), call.params.t_q, call.params.heads,
             static_cast<int>(width), row_stride, head_stride},
            call.runtime,
            call.params.device,
            call.stream};
  }
};

// What lies between the inputs and the results; an FP32 grad_kv and a grad_q that are aligned are
// written in place.
class Buffers {
 public:
  explicit Buffers(const Call& call)
      : accumulators(static_cast<float*>(call.params.grad_kv)),
        grad_q(static_cast<__nv_bfloat16*>(call.params.grad_q)),
        memory_(call.runtime, bytes(call), call.params.device) {
    core::Carver carver(memory_.data());
    carve(carver, call);
  }

  float* accumulators;                         // [T_k, D], channels permuted
  __nv_bfloat16* grad_q;                       // [T_q, H, D]
  std::int32_t* extents = nullptr;             // [T_q], or null with groups
  backward_pass::GroupItems groups{};          // or nulls
  float* d_errors = nullptr;                   // [T_q, H]
  std::uint8_t* needs_repair = nullptr;        // [items, 4]; with groups of the rows alone
  std::uint8_t* groups_need_repair = nullptr;  // [T_q, 4], or null
  float* sink_terms = nullptr;                 // [T_q, H], or null
  std::uint32_t* places = nullptr;             // [1], or null where the CTAs need not keep pace

 private:
  std::size_t bytes(const Call& call) {
    core::Carver count;
    carve(count, call);
    return count.bytes();
  }

  void carve(core::Carver& carver, const Call& call) {
    const BackwardParams& p = call.params;
    const auto rows = static_cast<std::size_t>(p.t_q);
    const auto vectors = static_cast<std::size_t>(p.t_q * p.heads);
    if (walks_groups(call)) {
      groups.items = carver.take<backward_pass::GroupItem>(rows);
      groups.single_rows = carver.take<std::int32_t>(rows);
      groups.counts = carver.take<backward_pass::GroupCounts>(1);
      groups.bad_keys = carver.take<std::uint8_t>(static_cast<std::size_t>(p.t_k));
      groups.numbers = carver.take<std::int32_t>(static_cast<std::size_t>(p.t_k));
      groups_need_repair = carver.take<std::uint8_t>(rows * 4);
    } else {
      extents = carver.take<std::int32_t>(rows);
    }
    d_errors = carver.take<float>(vectors);
    needs_repair = carver.take<std::uint8_t>(static_cast<std::size_t>(items_of(p)) * 4);
    if (p.grad_attn_sink != nullptr) {
      sink_terms = carver.take<float>(vectors);
    }
    if (p.t_k * p.head_dim * 4 > kCachedBytes && call.runtime.mode == Mode::kDefault) {
      places = carver.take<std::uint32_t>(1);
    }
    if (p.grad_kv_dtype != DType::kFloat32 || !is_aligned(p.grad_kv)) {
      accumulators = carver.take<float>(static_cast<std::size_t>(p.t_k * p.head_dim));
    }
    if (!is_aligned(p.grad_q)) {
      grad_q = carver.take<__nv_bfloat16>(vectors * static_cast<std::size_t>(p.head_dim));
    }
  }

  core::Scratch memory_;
};

KernelParams kernel_params(const Call& call, const Inputs& inputs, const Buffers& buffers) {
  const BackwardParams& p = call.params;
  KernelParams kernel{};
  kernel.q = inputs.q.data;
  kernel.q_row_stride = inputs.q.outer_stride;
  kernel.q_head_stride = inputs.q.inner_stride;
  kernel.kv = inputs.kv.data;
  kernel.kv_row_bytes =
      p.t_k > 1 ? static_cast<std::uint32_t>(inputs.kv.outer_stride) * 2 : 0;  // row 0 needs none
  kernel.out = inputs.out.data;
  kernel.out_row_stride = inputs.out.outer_stride;
  kernel.out_head_stride = inputs.out.inner_stride;
  kernel.grad_out = inputs.grad_out.data;
  kernel.grad_out_row_stride = inputs.grad_out.outer_stride;
  kernel.grad_out_head_stride = inputs.grad_out.inner_stride;
  kernel.lse = static_cast<const float*>(p.lse);
  kernel.lse_row_stride = p.lse_row_stride;
  kernel.topk_indices = p.topk_indices;
  kernel.topk_indices_row_stride = p.topk_indices_row_stride;
  kernel.extents = buffers.extents;
  if (buffers.groups.items != nullptr) {
    kernel.plan = *call.plan;
    kernel.group_items = buffers.groups.items;
    kernel.group_counts = buffers.groups.counts;
    kernel.extents = call.plan->row_keys;
    kernel.mask_words = static_cast<int>(call.plan->group * ((p.topk + 31) / 32));
    kernel.inverse_heads = static_cast<int>((0x10000 + p.heads - 1) / p.heads);
  }
  kernel.attn_sink = static_cast<const float*>(p.attn_sink);
  kernel.sink_terms = buffers.sink_terms;
  kernel.d_errors = buffers.d_errors;
  kernel.needs_repair = buffers.needs_repair;
  kernel.grad_q = buffers.grad_q;
  kernel.two_head_blocks = two_head_blocks(p);
  kernel.heads = static_cast<int>(p.heads);
  kernel.t_k = static_cast<int>(p.t_k);
  kernel.topk = static_cast<int>(p.topk);
  kernel.softmax_scale = static_cast<float>(p.softmax_scale);
  return kernel;
}

// Queues what says which slots a row has: its extent, or the items of the plan.
void find_slots(const Call& call, const Inputs& inputs, const Buffers& buffers) {
  const BackwardParams& p = call.params;
  if (walks_groups(call)) {
    const auto width = static_cast<int>(p.head_dim);
    backward_pass::launch_group_items(
        {*call.plan,
         {inputs.q.data, p.t_q, p.heads, width, inputs.q.outer_stride, inputs.q.inner_stride},
         {inputs.grad_out.data, p.t_q, p.heads, static_cast<int>(kValueDim),
          inputs.grad_out.outer_stride, inputs.grad_out.inner_stride},
         {inputs.kv.data, p.t_k, 1, width, inputs.kv.outer_stride, width}},
        buffers.groups, call.stream);
  } else {
    launch_row_extents({p.topk_indices, p.topk_indices_row_stride, p.topk_length, p.t_q,
                        static_cast<int>(p.topk), static_cast<int>(p.t_k)},
                       buffers.extents, call.stream);
  }
}

// Has the CTAs of the next kernel keep pace where the accumulators would not stay in cache.
void set_pace(const Call& call, const Buffers& buffers, KernelParams& kernel) {
  kernel.places = buffers.places;
  if (buffers.places == nullptr) return;
  core::cuda::check(cudaMemsetAsync(buffers.places, 0, sizeof(*buffers.places), call.stream),
                    "zeroing the places of the CTAs");
}

// Adds the rows of a plan's items to the accumulators with atomics: those of several tokens, then
// the rows that stand alone.
void add_groups(const Call& call, KernelParams kernel, const Buffers& buffers) {
  const BackwardParams& p = call.params;
  const int head_dim = static_cast<int>(p.head_dim), device = p.device.index;
  kernel.grad_kv_rows = buffers.accumulators;
  kernel.items = static_cast<int>(p.t_q);
  kernel.needs_repair = buffers.groups_need_repair;
  backward_pass::launch_backward_groups(kernel, head_dim, device, call.stream);

  kernel.single_rows = buffers.groups.single_rows;
  kernel.needs_repair = buffers.needs_repair;
  set_pace(call, buffers, kernel);
  core::cuda::check(
      cudaMemsetAsync(buffers.needs_repair, 0, static_cast<std::size_t>(p.t_q) * 4, call.stream),
      "zeroing the flags of rows");
  backward_few_heads::launch_backward_few_heads(kernel, head_dim, device, call.stream);
  backward_pass::launch_repair(kernel, head_dim, device, call.stream);
}

// Adds every item's rows to `accumulators` with atomics.
void add_unordered(const Call& call, KernelParams kernel, std::int64_t items,
                   const Buffers& buffers) {
  const int head_dim = static_cast<int>(call.params.head_dim), device = call.params.device.index;
  kernel.grad_kv_rows = buffers.accumulators;
  for (std::int64_t first = 0; first < items; first += kMaxItemsPerLaunch) {
    kernel.first_item = first;
    kernel.items = static_cast<int>(std::min(kMaxItemsPerLaunch, items - first));
    set_pace(call, buffers, kernel);
    if (call.params.heads <= backward_few_heads::kMostHeads) {
      backward_few_heads::launch_backward_few_heads(kernel, head_dim, device, call.stream);
      backward_pass::launch_repair(kernel, head_dim, device, call.stream);
    } else {
      backward_pass::launch_backward(kernel, head_dim, /*ordered=*/false, device, call.stream);
    }
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
  core::cuda::OrderedWorkspace workspace{};
  workspace.sort_bytes = core::cuda::sort_bytes(chunk * p.topk, kernel.t_k);
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
    backward_pass::launch_backward(kernel, static_cast<int>(p.head_dim), /*ordered=*/true,
                                   p.device.index, call.stream);
    if (p.t_k > 0) {
      const auto add = p.head_dim == 576 ? core::cuda::launch_ordered_sum<576>
                                         : core::cuda::launch_ordered_sum<512>;
      add({p.topk_indices, p.topk_indices_row_stride, kernel.extents, first, kernel.items,
           kernel.two_head_blocks, kernel.topk, kernel.t_k},
          workspace, accumulators, call.stream);
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
  const CallPlan plan(params, runtime.mode == Mode::kDefault, runtime);
  const Call call{params, plan.get(), runtime, static_cast<cudaStream_t>(runtime.stream.handle)};
  const Buffers buffers(call);
  const Inputs inputs(call);
  const KernelParams kernel = kernel_params(call, inputs, buffers);

  if (params.t_q > 0) find_slots(call, inputs, buffers);
  const auto grad_kv_bytes = static_cast<std::size_t>(params.t_k * params.head_dim) * sizeof(float);
  if (grad_kv_bytes > 0) {
    core::cuda::check(cudaMemsetAsync(buffers.accumulators, 0, grad_kv_bytes, call.stream),
                      "zeroing grad_kv");
  }
  const std::int64_t items = items_of(params);
  if (items > 0 && walks_groups(call)) {
    add_groups(call, kernel, buffers);
  } else if (items > 0 && runtime.mode == Mode::kDefault) {
    add_unordered(call, kernel, items, buffers);
  } else if (items > 0) {
    add_ordered(call, kernel, items, buffers.accumulators);
  }
  finish(call, buffers);
}

}  // namespace flashdsa::attention::sm90
