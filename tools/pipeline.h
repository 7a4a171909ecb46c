#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "flashdsa/flashdsa.h"
#include "tools/options.h"
#include "tools/placement.h"
#include "tools/progress.h"
#include "tools/report.h"
#include "tools/safetensors.h"

namespace flashdsa::tools {

/// An open input file and the scalars that go with it.
class Input {
 public:
  /// Opens the file. Throws Error(kValue).
  Input(std::string command, const std::string& path, ScalarOptions& scalars);

  bool has(std::string_view name) const { return reader_.has(name); }
  Tensor load(std::string_view name) const;  ///< throws Error(kValue) when it is missing
  std::optional<Tensor> load_optional(std::string_view name) const;

  bool is_float64(std::string_view name) const;

  /// Throws Error(kValue) naming the first tensor that is missing.
  void require(std::initializer_list<std::string_view> names) const;

  const std::string& command() const { return command_; }
  const SafetensorsReader& reader() const { return reader_; }
  const ScalarOptions& scalars() const { return scalars_; }

 private:
  std::string command_;
  SafetensorsReader reader_;
  const ScalarOptions& scalars_;
};

/// Runs the stages of a command one after another where it computes: counts their time and shows
/// their progress.
class Stages {
 public:
  Stages(Runtime runtime, Placement placement);

  /// Calls body(runtime), waits for what it queued and books the time under `name`.
  template <typename Body>
  auto run(const std::string& name, const Body& body) {
    begin(name);
    if constexpr (std::is_void_v<decltype(body(runtime()))>) {
      body(runtime());
      end(name);
    } else {
      auto result = body(runtime());
      end(name);
      return result;
    }
  }

  /// Copies to where the command computes, and back; their time is booked as that of copies.
  template <typename Tensors>
  Tensors place(const Tensors& tensors) {
    return copied([&] { return placement_.place_all(tensors); });
  }
  template <typename Tensors>
  Tensors fetch(const Tensors& tensors) {
    return copied([&] { return placement_.fetch_all(tensors); });
  }

  const Placement& placement() const { return placement_; }
  const Runtime& runtime() const { return runtime_; }
  const std::vector<std::pair<std::string, double>>& seconds() const { return seconds_; }
  std::size_t peak_scratch_bytes() const { return usage_.peak_scratch_bytes; }

  /// Adds backend, time of every stage and peak scratch to a report.
  void describe(Report& report) const;

 private:
  template <typename Body>
  auto copied(const Body& body) {
    begin("copies");
    auto result = body();
    copy_seconds_ += elapsed();
    return result;
  }

  void begin(const std::string& name);
  void end(const std::string& name);
  double elapsed() const;

  Placement placement_;
  Usage usage_;
  ProgressBar bar_;
  Runtime runtime_;
  double begin_seconds_ = 0;
  double copy_seconds_ = 0;
  std::vector<std::pair<std::string, double>> seconds_;
};

struct Selection {
  Tensor topk_indices;                // int32 [T_q, 1, K]
  std::optional<Tensor> topk_length;  // int32 [T_q]
  std::optional<Tensor> topk_scores;  // [T_q, K]
};

template <typename Body>
void for_each_tensor(Selection& selection, const Body& body) {
  body(selection.topk_indices);
  for_each_optional({&selection.topk_length, &selection.topk_scores}, body);
}

struct IndexerTensors {
  Tensor index_q;
  Tensor index_k;
  Tensor head_weights;
};

template <typename Body>
void for_each_tensor(IndexerTensors& tensors, const Body& body) {
  for (Tensor* tensor : {&tensors.index_q, &tensors.index_k, &tensors.head_weights}) body(*tensor);
}

/// Tensors and scalars of the attention.
struct AttentionTensors {
  Tensor q;
  Tensor kv;
  double softmax_scale = 0;
  Selection selection;
  std::optional<Tensor> attn_sink;
  std::optional<Tensor> grad_out;
};

template <typename Body>
void for_each_tensor(AttentionTensors& tensors, const Body& body) {
  body(tensors.q);
  body(tensors.kv);
  for_each_tensor(tensors.selection, body);
  for_each_optional({&tensors.attn_sink, &tensors.grad_out}, body);
}

struct AttentionResults {
  Tensor out;
  Tensor lse;
  Tensor max_logits;
  std::optional<Tensor> grad_q;
  std::optional<Tensor> grad_kv;
  std::optional<Tensor> grad_attn_sink;
};

template <typename Body>
void for_each_tensor(AttentionResults& results, const Body& body) {
  for (Tensor* tensor : {&results.out, &results.lse, &results.max_logits}) body(*tensor);
  for_each_optional({&results.grad_q, &results.grad_kv, &results.grad_attn_sink}, body);
}

/// Declares the scalars that a part of the work reads.
void add_metadata_scalars(CLI::App& command, ScalarOptions& scalars);
void add_topk_scalars(CLI::App& command, ScalarOptions& scalars);
void add_attention_scalars(CLI::App& command, ScalarOptions& scalars);

/// --grad-kv-dtype: absent when it is not given. Throws Error(kValue).
void add_grad_kv_dtype(CLI::App& command, std::optional<std::string>& text);
std::optional<DType> parse_grad_kv_dtype(const std::string& command,
                                         const std::optional<std::string>& text);

/// Scalars, read from options or the file.
std::int64_t read_index_topk(const Input& input);
double read_softmax_scale(const Input& input);
Mode read_mode(const Input& input);

/// Where to compute with the tensors of these names; --backend and their types decide.
Placement choose_placement(const Runtime& runtime, const Input& input,
                           std::initializer_list<std::string_view> names);

/// Metadata of the file's packed rows, there. SPEC section 2.
PackedMetadata build_metadata(const Input& input, const Placement& placement,
                              const Runtime& runtime);

/// SPEC section 3. Results lie where the inputs do.
IndexerTensors load_indexer(const Input& input);
Selection select_keys(const IndexerTensors& tensors, const PackedMetadata& metadata,
                      std::int64_t topk, bool scores, const Runtime& runtime);

/// The selection that the file itself holds.
Selection load_selection(const Input& input);

/// SPEC sections 5 and 6. Results lie where the inputs do. `grad_kv_dtype` absent: the type of the
/// other gradients.
AttentionTensors load_attention(const Input& input, Selection selection);
AttentionResults attend_forward(const AttentionTensors& tensors, const Runtime& runtime);
void attend_backward(const AttentionTensors& tensors, std::optional<DType> grad_kv_dtype,
                     AttentionResults& results, const Runtime& runtime);

/// Both on the host's tensors where the command computes, the backward with grad_out; results of
/// the host.
AttentionResults attend(const AttentionTensors& tensors, std::optional<DType> grad_kv_dtype,
                        Stages& stages);

/// Puts results under their names of SPEC section 9. They must outlive the writing.
void add_results(SafetensorsWriter& writer, const PackedMetadata& metadata);
void add_results(SafetensorsWriter& writer, const Selection& selection);
void add_results(SafetensorsWriter& writer, const AttentionResults& results);

/// Adds what a person wants to know of the rows to a report; the metadata is the host's.
void describe_metadata(Report& report, const PackedMetadata& metadata);

/// Adds the sizes of the attention to a report.
void describe_attention(Report& report, const AttentionTensors& tensors);

/// Throws Error(kValue) when OUT is IN or cannot be written; called before any work.
void check_output(const Input& input, const std::string& out);

/// Writes OUT and prints the report; OUT appears only when both have gone well. A report that would
/// run into OUT's own bytes (OUT is /dev/stdout) is left out.
void deliver(const SafetensorsWriter& writer, const std::string& out, const Report& report,
             bool as_json);

}  // namespace flashdsa::tools
