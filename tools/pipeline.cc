#include "tools/pipeline.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include "flashdsa/error.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kMaxKeyTokens = std::numeric_limits<std::int32_t>::max() - 1;
constexpr std::int64_t kMaxTopk = 2048;
constexpr std::int64_t kMaxHeads = 128;
constexpr std::int64_t kMaxIndexHeads = 64;
constexpr std::int64_t kIndexDim = 128;
constexpr std::int64_t kValueDim = 512;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::optional<TensorView> view_of(const std::optional<Tensor>& tensor) {
  if (!tensor) return std::nullopt;
  return tensor->view();
}

// The type of results that go with float64 or bfloat16 inputs, for tensors held in FP32.
DType single_beside(DType real) {
  return real == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

DType real_beside(DType real) {
  return real == DType::kFloat64 ? DType::kFloat64 : DType::kBFloat16;
}

// T_k: the option, or the rows of index_k and kv; all that are given must agree.
std::int64_t read_total_key_tokens(const Input& input) {
  auto total = input.scalars().integer("total_key_tokens", 1, kMaxKeyTokens);
  std::string source = "total_key_tokens";
  for (const char* name : {"index_k", "kv"}) {
    const auto* shape = input.reader().shape(name);
    if (shape == nullptr || shape->empty()) continue;
    const std::int64_t rows = shape->front();
    if (total && *total != rows) {
      throw Error(ErrorCode::kValue,
                  fmt::format("{}: total_key_tokens must be the rows of index_k and kv, got {} of "
                              "{} and {} of {}",
                              input.command(), *total, source, rows, name));
    }
    total = rows;
    source = name;
  }
  if (!total) input.scalars().refuse_missing("total_key_tokens");
  return *total;
}

// Results are allocated for inputs of a plausible shape alone: the library refuses all others, and
// before that their sizes must not ask for memory.
std::int64_t rows_to_allocate(bool plausible, const TensorView& view) {
  return plausible ? view.shape[0] : 0;
}

bool is_plausible_q(const TensorView& q) {
  return q.rank == 3 && q.shape[1] >= 1 && q.shape[1] <= kMaxHeads &&
         (q.shape[2] == kValueDim || q.shape[2] == kValueDim + 64);
}

bool is_plausible_index_q(const TensorView& index_q, const PackedMetadata& metadata) {
  return index_q.rank == 3 && index_q.shape[0] == metadata.starts.view().shape[0] &&
         index_q.shape[1] >= 1 && index_q.shape[1] <= kMaxIndexHeads &&
         index_q.shape[2] == kIndexDim;
}

SparseAttentionInputs common_inputs(const AttentionTensors& tensors) {
  SparseAttentionInputs inputs;
  inputs.q = tensors.q;
  inputs.kv = tensors.kv;
  inputs.topk_indices = tensors.selection.topk_indices;
  inputs.softmax_scale = tensors.softmax_scale;
  inputs.topk_length = view_of(tensors.selection.topk_length);
  inputs.attn_sink = view_of(tensors.attn_sink);
  return inputs;
}

void add_optional(SafetensorsWriter& writer, const char* name,
                  const std::optional<Tensor>& tensor) {
  if (tensor) writer.add(name, *tensor);
}

bool is_stdout(const std::string& path) {
  struct stat file{};
  struct stat out{};
  return stat(path.c_str(), &file) == 0 && fstat(STDOUT_FILENO, &out) == 0 &&
         file.st_dev == out.st_dev && file.st_ino == out.st_ino;
}

}  // namespace

Input::Input(std::string command, const std::string& path, ScalarOptions& scalars)
    : command_(std::move(command)), reader_(path), scalars_(scalars) {
  scalars.use_file(reader_.metadata());
}

Tensor Input::load(std::string_view name) const {
  require({name});
  return reader_.load(name);
}

std::optional<Tensor> Input::load_optional(std::string_view name) const {
  if (!has(name)) return std::nullopt;
  return reader_.load(name);
}

void Input::require(std::initializer_list<std::string_view> names) const {
  for (const std::string_view name : names) {
    if (has(name)) continue;
    throw Error(ErrorCode::kValue,
                fmt::format("{}: tensor {} must be in the input file, {} has none", command_, name,
                            reader_.path()));
  }
}

bool Input::is_float64(std::string_view name) const {
  return reader_.dtype(name) == DType::kFloat64;
}

Stages::Stages(Runtime runtime, Placement placement)
    : placement_(std::move(placement)), runtime_(runtime) {
  runtime_.stream = placement_.stream();
  runtime_.progress = bar_.progress();
  runtime_.usage = &usage_;
}

void Stages::begin(const std::string& name) {
  bar_.start(name);
  begin_seconds_ = now_seconds();
}

void Stages::end(const std::string& name) {
  placement_.synchronize();
  seconds_.emplace_back(name, elapsed());
}

double Stages::elapsed() const { return now_seconds() - begin_seconds_; }

void Stages::describe(Report& report) const {
  report.add("backend", "backend", std::string(backend_name(placement_.backend())));
  auto times = nlohmann::ordered_json::object();
  std::string text;
  for (const auto& [name, seconds] : seconds_) {
    times[name] = seconds;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, format_seconds(seconds));
  }
  report.add("time", "seconds", std::move(times), std::move(text));
  if (!placement_.on_host()) {
    report.add("copies", "copy_seconds", copy_seconds_, format_seconds(copy_seconds_));
  }
  report.add("peak scratch", "peak_scratch_bytes", peak_scratch_bytes(),
             format_bytes(static_cast<double>(peak_scratch_bytes())));
}

void add_metadata_scalars(CLI::App& command, ScalarOptions& scalars) {
  scalars.add_value(command, "total_key_tokens", "N",
                    "T_k, rows of the gathered, padded keys, 1..2^31-2; default: the rows of "
                    "index_k or kv");
  scalars.add_value(command, "max_seqlen", "N",
                    "Largest real document length in tokens; only checked");
  scalars.add_value(command, "query_mode", "MODE",
                    "contiguous (default): query_indices are one interval; general: any strictly "
                    "increasing list");
  scalars.add_flag(command, "lenient", "Allow documents of real length 0");
}

void add_topk_scalars(CLI::App& command, ScalarOptions& scalars) {
  scalars.add_value(command, "index_topk", "K", "Keys to select for each query row, 1..2048");
}

void add_attention_scalars(CLI::App& command, ScalarOptions& scalars) {
  scalars.add_value(command, "softmax_scale", "X", "Factor of the logits, > 0 and finite");
  scalars.add_flag(command, "deterministic", "Same bits on every run, backward included");
  scalars.add_flag(command, "invariant",
                   "Deterministic, and a row's result does not depend on the other rows");
}

void add_grad_kv_dtype(CLI::App& command, std::optional<std::string>& text) {
  command
      .add_option_function<std::string>(
          "--grad-kv-dtype", [&text](const std::string& given) { text = given; },
          "Type of grad_kv: bf16 (default) or f32")
      ->type_name("TYPE");
}

std::optional<DType> parse_grad_kv_dtype(const std::string& command,
                                         const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  if (*text == "bf16") return DType::kBFloat16;
  if (*text == "f32") return DType::kFloat32;
  throw Error(ErrorCode::kValue,
              fmt::format("{}: --grad-kv-dtype must be bf16 or f32, got '{}'", command, *text));
}

std::int64_t read_index_topk(const Input& input) {
  const auto topk = input.scalars().integer("index_topk", 1, kMaxTopk);
  if (!topk) input.scalars().refuse_missing("index_topk");
  return *topk;
}

double read_softmax_scale(const Input& input) {
  const auto scale = input.scalars().real("softmax_scale");
  if (!scale) input.scalars().refuse_missing("softmax_scale");
  return *scale;
}

Mode read_mode(const Input& input) {
  const bool deterministic = input.scalars().flag("deterministic");
  if (input.scalars().flag("invariant")) return Mode::kInvariant;
  return deterministic ? Mode::kDeterministic : Mode::kDefault;
}

Placement choose_placement(const Runtime& runtime, const Input& input,
                           std::initializer_list<std::string_view> names) {
  return {runtime, std::any_of(names.begin(), names.end(),
                               [&](auto name) { return input.is_float64(name); })};
}

PackedMetadata build_metadata(const Input& input, const Placement& placement,
                              const Runtime& runtime) {
  input.require({"cu_seqlens"});
  PackedMetadataArgs args;
  args.total_key_tokens = read_total_key_tokens(input);
  args.max_seqlen = input.scalars().integer("max_seqlen", 0, kMaxKeyTokens);
  const auto mode = input.scalars().word("query_mode", {"contiguous", "general"});
  if (mode == "general") args.query_mode = QueryMode::kGeneral;
  args.lenient = input.scalars().flag("lenient");

  const auto placed = [&](const char* name) {
    std::optional<Tensor> tensor = input.load_optional(name);
    if (tensor) tensor = placement.place(*tensor);
    return tensor;
  };
  const auto cu_seqlens = placed("cu_seqlens");
  const auto query_indices = placed("query_indices");
  const auto cu_seqlens_padded = placed("cu_seqlens_padded");
  const auto padding_mask = placed("padding_mask");
  args.cu_seqlens = *cu_seqlens;
  args.query_indices = view_of(query_indices);
  args.cu_seqlens_padded = view_of(cu_seqlens_padded);
  args.padding_mask = view_of(padding_mask);
  return prepare_packed_metadata(args, runtime);
}

IndexerTensors load_indexer(const Input& input) {
  input.require({"index_q", "index_k", "head_weights"});
  return {input.load("index_q"), input.load("index_k"), input.load("head_weights")};
}

Selection select_keys(const IndexerTensors& tensors, const PackedMetadata& metadata,
                      std::int64_t topk, bool scores, const Runtime& runtime) {
  const TensorView& index_q = tensors.index_q;
  const std::int64_t rows = rows_to_allocate(is_plausible_index_q(index_q, metadata), index_q);
  Selection selection;
  const auto allocate = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return allocate_beside(index_q, dtype, shape, runtime);
  };
  selection.topk_indices = allocate(DType::kInt32, {rows, 1, topk});
  selection.topk_length = allocate(DType::kInt32, {rows});
  if (scores) selection.topk_scores = allocate(single_beside(index_q.dtype), {rows, topk});
  IndexerTopkArgs args;
  args.index_q = index_q;
  args.index_k = tensors.index_k;
  args.head_weights = tensors.head_weights;
  args.starts = metadata.starts;
  args.causal_lengths = metadata.causal_lengths;
  args.total_key_tokens = metadata.total_key_tokens;
  args.topk_indices = selection.topk_indices;
  args.topk_length = view_of(selection.topk_length);
  args.topk_scores = view_of(selection.topk_scores);
  indexer_topk(args, runtime);
  return selection;
}

Selection load_selection(const Input& input) {
  return {input.load("topk_indices"), input.load_optional("topk_length"), std::nullopt};
}

AttentionTensors load_attention(const Input& input, Selection selection) {
  input.require({"q", "kv"});
  AttentionTensors tensors;
  tensors.softmax_scale = read_softmax_scale(input);
  tensors.q = input.load("q");
  tensors.kv = input.load("kv");
  tensors.selection = std::move(selection);
  tensors.attn_sink = input.load_optional("attn_sink");
  tensors.grad_out = input.load_optional("grad_out");
  return tensors;
}

AttentionResults attend_forward(const AttentionTensors& tensors, const Runtime& runtime) {
  const TensorView& q = tensors.q;
  const bool plausible = is_plausible_q(q);
  const std::int64_t rows = rows_to_allocate(plausible, q);
  const std::int64_t heads = plausible ? q.shape[1] : 1;
  const DType single = single_beside(q.dtype);
  AttentionResults results;
  results.out = allocate_beside(q, real_beside(q.dtype), {rows, heads, kValueDim}, runtime);
  results.lse = allocate_beside(q, single, {rows, heads}, runtime);
  results.max_logits = allocate_beside(q, single, {rows, heads}, runtime);

  AttentionForwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = common_inputs(tensors);
  args.out = results.out;
  args.lse = results.lse;
  args.max_logits = results.max_logits;
  attention_forward(args, runtime);
  return results;
}

void attend_backward(const AttentionTensors& tensors, std::optional<DType> grad_kv_dtype,
                     AttentionResults& results, const Runtime& runtime) {
  const TensorView& q = tensors.q;  // the forward call has accepted q and kv
  const TensorView& kv = tensors.kv;
  results.grad_q = allocate_beside(q, q.dtype, {q.shape[0], q.shape[1], q.shape[2]}, runtime);
  results.grad_kv = allocate_beside(q, grad_kv_dtype.value_or(q.dtype),
                                    {kv.shape[0], kv.shape[1], kv.shape[2]}, runtime);
  if (tensors.attn_sink) {
    results.grad_attn_sink = allocate_beside(q, single_beside(q.dtype), {q.shape[1]}, runtime);
  }
  AttentionBackwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = common_inputs(tensors);
  args.out = results.out;
  args.lse = results.lse;
  args.grad_out = *tensors.grad_out;
  args.grad_q = *results.grad_q;
  args.grad_kv = *results.grad_kv;
  args.grad_attn_sink = view_of(results.grad_attn_sink);
  attention_backward(args, runtime);
}

AttentionResults attend(const AttentionTensors& tensors, std::optional<DType> grad_kv_dtype,
                        Stages& stages) {
  const AttentionTensors placed = stages.place(tensors);
  AttentionResults results = stages.run(
      "forward", [&](const Runtime& runtime) { return attend_forward(placed, runtime); });
  if (placed.grad_out) {
    stages.run("backward", [&](const Runtime& runtime) {
      attend_backward(placed, grad_kv_dtype, results, runtime);
    });
  }
  return stages.fetch(results);
}

void add_results(SafetensorsWriter& writer, const PackedMetadata& metadata) {
  writer.add("starts", metadata.starts);
  writer.add("causal_lengths", metadata.causal_lengths);
  writer.add("query_valid", metadata.query_valid);
  add_optional(writer, "valid_row_indices", metadata.valid_row_indices);
  writer.add("segment_cu_q", metadata.segment_cu_q);
  writer.add("segment_cu_k", metadata.segment_cu_k);
  writer.add("q_causal_offsets", metadata.q_causal_offsets);
  add_optional(writer, "key_source_indices", metadata.key_source_indices);
  writer.add_metadata("max_seqlen_q", fmt::format("{}", metadata.max_seqlen_q));
  writer.add_metadata("max_seqlen_k", fmt::format("{}", metadata.max_seqlen_k));
  writer.add_metadata("total_key_tokens", fmt::format("{}", metadata.total_key_tokens));
  writer.add_metadata("all_rows_nonempty", metadata.all_rows_nonempty ? "true" : "false");
}

void add_results(SafetensorsWriter& writer, const Selection& selection) {
  writer.add("topk_indices", selection.topk_indices);
  add_optional(writer, "topk_length", selection.topk_length);
  add_optional(writer, "topk_scores", selection.topk_scores);
}

void add_results(SafetensorsWriter& writer, const AttentionResults& results) {
  writer.add("out", results.out);
  writer.add("lse", results.lse);
  writer.add("max_logits", results.max_logits);
  add_optional(writer, "grad_q", results.grad_q);
  add_optional(writer, "grad_kv", results.grad_kv);
  add_optional(writer, "grad_attn_sink", results.grad_attn_sink);
}

void describe_metadata(Report& report, const PackedMetadata& metadata) {
  const auto lengths = metadata.causal_lengths.span<std::int32_t>();
  const auto valid = metadata.query_valid.span<std::uint8_t>();
  report.add("query rows", "rows", lengths.size());
  report.add("valid rows", "valid_rows", std::count(valid.begin(), valid.end(), 1));
  report.add("empty rows", "empty_rows", std::count(lengths.begin(), lengths.end(), 0));
  report.add("segments", "segments", metadata.q_causal_offsets.view().shape[0]);
  report.add("key rows", "total_key_tokens", metadata.total_key_tokens);
  report.add("longest segment", "max_seqlen_q", metadata.max_seqlen_q,
             fmt::format("{} queries, {} keys", metadata.max_seqlen_q, metadata.max_seqlen_k));
  report.add(nullptr, "max_seqlen_k", metadata.max_seqlen_k);
}

void describe_attention(Report& report, const AttentionTensors& tensors) {
  const TensorView& q = tensors.q;
  const TensorView& indices = tensors.selection.topk_indices;
  report.add("attention", "attention",
             {{"rows", q.shape[0]},
              {"heads", q.shape[1]},
              {"head_dim", q.shape[2]},
              {"keys", tensors.kv.view().shape[0]},
              {"topk", indices.shape[2]},
              {"backward", tensors.grad_out.has_value()}},
             fmt::format("{} rows of {} heads, head dim {}, {} of {} keys, {}", q.shape[0],
                         q.shape[1], q.shape[2], indices.shape[2], tensors.kv.view().shape[0],
                         tensors.grad_out ? "forward and backward" : "forward"));
}

void check_output(const Input& input, const std::string& out) {
  if (input.reader().is_same_file(out)) {
    throw Error(ErrorCode::kValue,
                fmt::format("{}: OUT must not be IN, got {} for both", input.command(), out));
  }
  OutputFile::check_writable(out);
}

void deliver(const SafetensorsWriter& writer, const std::string& out, const Report& report,
             bool as_json) {
  OutputFile file = writer.stage(out);
  if (!is_stdout(out)) report.print(as_json);
  file.commit();
}

}  // namespace flashdsa::tools
