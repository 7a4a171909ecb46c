// The functions that python/flashdsa calls. Each turns DLPack tensors into the library's views,
// calls one public function and turns its errors into Python's. What Python has checked already
// (kinds of arguments, names of options) is taken as it comes; everything else is the library's.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <new>
#include <string>
#include <utility>

#include "flashdsa/flashdsa.h"
#include "python/src/arguments.h"
#include "python/src/framework_allocator.h"
#include "python/src/results.h"

namespace flashdsa::python {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::Shape;
using tvm::ffi::String;
using DlTensor = tvm::ffi::TensorView;

const char* exception_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kType:
      return "TypeError";
    case ErrorCode::kValue:
    case ErrorCode::kData:
      return "ValueError";
    case ErrorCode::kUnavailable:
    case ErrorCode::kMemory:
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      break;
  }
  return "RuntimeError";
}

// Runs `body`; its errors become the Python exceptions of their codes, with the same sentence.
template <typename Body>
auto translate(const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw tvm::ffi::Error(exception_of(error.code()), error.what(), "");
  } catch (const std::bad_alloc&) {
    throw tvm::ffi::Error("RuntimeError", "flashdsa: expected host memory, got none", "");
  }
}

// What a call runs with: the caller's options, its framework's stream and allocator.
struct CallRuntime {
  CallRuntime(Device device, std::int64_t backend, std::int64_t mode, std::int64_t threads,
              bool check)
      : allocator(FrameworkAllocator::of_call(device)) {
    runtime.backend = static_cast<Backend>(backend);
    runtime.mode = static_cast<Mode>(mode);
    runtime.threads = static_cast<int>(threads);
    runtime.check = check;
    runtime.allocator = allocator.get();
    if (device.kind == DeviceKind::kCuda) {
      runtime.stream.handle = TVMFFIEnvGetStream(kDLCUDA, device.index);
    }
  }

  std::shared_ptr<FrameworkAllocator> allocator;
  Runtime runtime;
};

SparseAttentionInputs read_attention(ArgumentReader& reader, const OptionalTensor& q,
                                     const OptionalTensor& kv, const OptionalTensor& topk_indices,
                                     const OptionalTensor& topk_length,
                                     const OptionalTensor& attn_sink, double softmax_scale) {
  SparseAttentionInputs inputs;
  inputs.q = reader.require("q", q);
  inputs.kv = reader.require("kv", kv);
  inputs.topk_indices = reader.require("topk_indices", topk_indices);
  inputs.topk_length = reader.read("topk_length", topk_length);
  inputs.attn_sink = reader.read("attn_sink", attn_sink);
  inputs.softmax_scale = softmax_scale;
  return inputs;
}

// The caller's plan over its own memory, none without sizes: T_q, K, T_k and G.
std::optional<SelectionPlan> read_plan(ArgumentReader& reader, const OptionalTensor& storage,
                                       const Optional<Shape>& sizes) {
  if (!sizes.has_value()) {
    reader.read("plan.storage", storage);
    return std::nullopt;
  }
  const Shape& numbers = *sizes;
  return SelectionPlan{Tensor(reader.require("plan.storage", storage), nullptr), numbers[0],
                       numbers[1], numbers[2], numbers[3]};
}

void forward(OptionalTensor q, OptionalTensor kv, OptionalTensor topk_indices,
             OptionalTensor topk_length, OptionalTensor attn_sink, OptionalTensor plan_storage,
             DlTensor out, DlTensor lse, OptionalTensor max_logits, std::int64_t bfloat16_mask,
             double softmax_scale, Optional<Shape> plan_sizes, std::int64_t backend,
             std::int64_t mode, std::int64_t threads, bool check) {
  translate([&] {
    ArgumentReader reader("attention_forward", bfloat16_mask);
    AttentionForwardArgs args{
        read_attention(reader, q, kv, topk_indices, topk_length, attn_sink, softmax_scale),
        {},
        {},
        {}};
    const auto plan = read_plan(reader, plan_storage, plan_sizes);
    args.plan = plan ? &*plan : nullptr;
    args.out = reader.read("out", out);
    args.lse = reader.read("lse", lse);
    args.max_logits = reader.read("max_logits", max_logits);
    const CallRuntime call(args.q.device, backend, mode, threads, check);
    attention_forward(args, call.runtime);
  });
}

void backward(OptionalTensor q, OptionalTensor kv, OptionalTensor topk_indices,
              OptionalTensor topk_length, OptionalTensor attn_sink, OptionalTensor plan_storage,
              OptionalTensor out, OptionalTensor lse, OptionalTensor grad_out, DlTensor grad_q,
              DlTensor grad_kv, OptionalTensor grad_attn_sink, std::int64_t bfloat16_mask,
              double softmax_scale, Optional<Shape> plan_sizes, std::int64_t backend,
              std::int64_t mode, std::int64_t threads, bool check) {
  translate([&] {
    ArgumentReader reader("attention_backward", bfloat16_mask);
    AttentionBackwardArgs args;
    static_cast<SparseAttentionInputs&>(args) =
        read_attention(reader, q, kv, topk_indices, topk_length, attn_sink, softmax_scale);
    const auto plan = read_plan(reader, plan_storage, plan_sizes);
    args.plan = plan ? &*plan : nullptr;
    args.out = reader.require("out", out);
    args.lse = reader.require("lse", lse);
    args.grad_out = reader.require("grad_out", grad_out);
    args.grad_q = reader.read("grad_q", grad_q);
    args.grad_kv = reader.read("grad_kv", grad_kv);
    args.grad_attn_sink = reader.read("grad_attn_sink", grad_attn_sink);
    const CallRuntime call(args.q.device, backend, mode, threads, check);
    attention_backward(args, call.runtime);
  });
}

void topk(OptionalTensor index_q, OptionalTensor index_k, OptionalTensor head_weights,
          OptionalTensor starts, OptionalTensor causal_lengths, DlTensor topk_indices,
          OptionalTensor topk_length, OptionalTensor topk_scores, std::int64_t bfloat16_mask,
          Optional<std::int64_t> total_key_tokens, std::int64_t backend, std::int64_t mode,
          std::int64_t threads, bool check) {
  translate([&] {
    ArgumentReader reader("indexer_topk", bfloat16_mask);
    IndexerTopkArgs args;
    args.index_q = reader.require("index_q", index_q);
    args.index_k = reader.require("index_k", index_k);
    args.head_weights = reader.require("head_weights", head_weights);
    args.starts = reader.require("starts", starts);
    args.causal_lengths = reader.require("causal_lengths", causal_lengths);
    if (total_key_tokens.has_value()) args.total_key_tokens = *total_key_tokens;
    args.topk_indices = reader.read("topk_indices", topk_indices);
    args.topk_length = reader.read("topk_length", topk_length);
    args.topk_scores = reader.read("topk_scores", topk_scores);
    const CallRuntime call(args.index_q.device, backend, mode, threads, check);
    indexer_topk(args, call.runtime);
  });
}

void score_gradients(OptionalTensor index_q, OptionalTensor index_k, OptionalTensor head_weights,
                     OptionalTensor topk_indices, OptionalTensor grad_scores,
                     OptionalTensor topk_length, DlTensor grad_index_q, DlTensor grad_index_k,
                     DlTensor grad_head_weights, std::int64_t bfloat16_mask, std::int64_t backend,
                     std::int64_t mode, std::int64_t threads, bool check) {
  translate([&] {
    ArgumentReader reader("indexer_backward", bfloat16_mask);
    IndexerBackwardArgs args;
    args.index_q = reader.require("index_q", index_q);
    args.index_k = reader.require("index_k", index_k);
    args.head_weights = reader.require("head_weights", head_weights);
    args.topk_indices = reader.require("topk_indices", topk_indices);
    args.grad_scores = reader.require("grad_scores", grad_scores);
    args.topk_length = reader.read("topk_length", topk_length);
    args.grad_index_q = reader.read("grad_index_q", grad_index_q);
    args.grad_index_k = reader.read("grad_index_k", grad_index_k);
    args.grad_head_weights = reader.read("grad_head_weights", grad_head_weights);
    const CallRuntime call(args.index_q.device, backend, mode, threads, check);
    indexer_backward(args, call.runtime);
  });
}

void compact(OptionalTensor indices, DlTensor sorted_indices, DlTensor lengths,
             std::int64_t bfloat16_mask, std::int64_t key_count, std::int64_t backend,
             std::int64_t mode, std::int64_t threads, bool check) {
  translate([&] {
    ArgumentReader reader("compact_and_sort", bfloat16_mask);
    CompactAndSortArgs args;
    args.indices = reader.require("indices", indices);
    args.key_count = key_count;
    args.sorted_indices = reader.read("sorted_indices", sorted_indices);
    args.lengths = reader.read("lengths", lengths);
    const CallRuntime call(args.indices.device, backend, mode, threads, check);
    compact_and_sort(args, call.runtime);
  });
}

// The storage of the plan, then its numbers: T_q, K, T_k and G.
Array<Any> selection_plan(OptionalTensor topk_indices, OptionalTensor topk_length,
                          std::int64_t bfloat16_mask, std::int64_t total_key_tokens,
                          std::int64_t heads, std::int64_t backend, std::int64_t mode,
                          std::int64_t threads, bool check) {
  return translate([&] {
    ArgumentReader reader("build_selection_plan", bfloat16_mask);
    SelectionPlanArgs args;
    args.topk_indices = reader.require("topk_indices", topk_indices);
    args.topk_length = reader.read("topk_length", topk_length);
    args.total_key_tokens = total_key_tokens;
    args.heads = heads;
    const CallRuntime call(args.topk_indices.device, backend, mode, threads, check);
    const SelectionPlan plan = build_selection_plan(args, call.runtime);
    return Array<Any>{share(plan.storage, call.allocator),
                      Shape{plan.query_rows, plan.topk, plan.total_key_tokens, plan.group}};
  });
}

// The tensors of PackedMetadata in their order, then its numbers as one list: every element costs
// the caller a call.
Array<Any> metadata(OptionalTensor cu_seqlens, OptionalTensor query_indices,
                    OptionalTensor cu_seqlens_padded, OptionalTensor padding_mask,
                    std::int64_t bfloat16_mask, std::int64_t total_key_tokens,
                    Optional<std::int64_t> max_seqlen, std::int64_t query_mode, bool lenient,
                    bool capture_safe, bool key_sources, std::int64_t backend, std::int64_t mode,
                    std::int64_t threads, bool check) {
  return translate([&] {
    ArgumentReader reader("prepare_packed_metadata", bfloat16_mask);
    PackedMetadataArgs args;
    args.cu_seqlens = reader.require("cu_seqlens", cu_seqlens);
    args.query_indices = reader.read("query_indices", query_indices);
    args.cu_seqlens_padded = reader.read("cu_seqlens_padded", cu_seqlens_padded);
    args.padding_mask = reader.read("padding_mask", padding_mask);
    args.total_key_tokens = total_key_tokens;
    if (max_seqlen.has_value()) args.max_seqlen = *max_seqlen;
    args.query_mode = static_cast<QueryMode>(query_mode);
    args.lenient = lenient;
    args.capture_safe = capture_safe;
    args.key_sources = key_sources;
    const CallRuntime call(args.cu_seqlens.device, backend, mode, threads, check);
    const PackedMetadata rows = prepare_packed_metadata(args, call.runtime);

    const auto one = [&](const Tensor& tensor) { return Any(share(tensor, call.allocator)); };
    const auto maybe = [&](const std::optional<Tensor>& tensor) {
      return tensor ? one(*tensor) : Any(nullptr);
    };
    return Array<Any>{one(rows.starts),
                      one(rows.causal_lengths),
                      one(rows.query_valid),
                      maybe(rows.valid_row_indices),
                      one(rows.segment_cu_q),
                      one(rows.segment_cu_k),
                      one(rows.q_causal_offsets),
                      maybe(rows.key_source_indices),
                      maybe(rows.status),
                      Shape{rows.max_seqlen_q, rows.max_seqlen_k, rows.total_key_tokens,
                            rows.all_rows_nonempty ? 1 : 0}};
  });
}

tvm::ffi::Tensor allocate(DLDataType dtype, Shape shape) {
  return translate([&] { return host_tensor(dtype, shape); });
}

// (name, available, detail) of every backend, best first.
Array<Array<Any>> list_backends() {
  return translate([] {
    Array<Array<Any>> lines;
    for (const BackendStatus& status : backends()) {
      lines.push_back(Array<Any>{String(std::string(backend_name(status.backend))),
                                 status.available, String(status.detail)});
    }
    return lines;
  });
}

String get_version() { return std::string(version()); }
String get_build() { return std::string(build_description()); }

}  // namespace
}  // namespace flashdsa::python

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_forward, flashdsa::python::forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_backward, flashdsa::python::backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexer_topk, flashdsa::python::topk)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(indexer_backward, flashdsa::python::score_gradients)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(compact_and_sort, flashdsa::python::compact)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_selection_plan, flashdsa::python::selection_plan)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_packed_metadata, flashdsa::python::metadata)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(allocate, flashdsa::python::allocate)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backends, flashdsa::python::list_backends)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(version, flashdsa::python::get_version)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build, flashdsa::python::get_build)
