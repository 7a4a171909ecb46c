// flashdsa run: metadata, selection and attention in one go. SPEC section 9.

#include <fmt/format.h>

#include <memory>
#include <optional>

#include "flashdsa/error.h"
#include "tools/command.h"
#include "tools/pipeline.h"
#include "tools/selection_summary.h"
#include "tools/verify_attention.h"
#include "tools/verify_selection.h"

namespace flashdsa::tools {
namespace {

constexpr auto kName = "run";
constexpr auto kTensors =
    R"(Takes the tensors of `flashdsa metadata`, `flashdsa topk` and `flashdsa attend` from IN,
except topk_indices and topk_length, which the selection gives, and writes all their results.)";

struct Options {
  std::string in;
  std::string out;
  std::optional<std::string> grad_kv_dtype;
  bool scores = false;
  bool verify = false;
  RuntimeOptions runtime{kName};
  ScalarOptions scalars{kName};
};

// Names what is missing before any work begins.
void check_inputs(const Input& input) {
  input.require({"cu_seqlens", "index_q", "index_k", "head_weights", "q", "kv"});
  read_index_topk(input);
  read_softmax_scale(input);
  const auto* q = input.reader().shape("q");
  const auto* index_q = input.reader().shape("index_q");
  if (!q->empty() && !index_q->empty() && q->front() != index_q->front()) {
    throw Error(ErrorCode::kValue,
                fmt::format("run: q must have as many rows as index_q, {}, got {}",
                            index_q->front(), q->front()));
  }
}

Selection select(const Input& input, const PackedMetadata& metadata, const Options& options,
                 Stages& stages, ErrorTable& table) {
  const IndexerTensors tensors = load_indexer(input);
  Selection selection = stages.run("topk", [&](const Runtime& runtime) {
    return select_keys(tensors, metadata, read_index_topk(input), options.scores, runtime);
  });
  if (options.verify) {
    stages.run("verify topk", [&](const Runtime& runtime) {
      verify_selection(table, tensors, metadata, selection, runtime);
    });
  }
  return selection;
}

AttentionResults attend(const AttentionTensors& tensors, const Options& options, Stages& stages,
                        ErrorTable& table) {
  AttentionResults results = stages.run(
      "forward", [&](const Runtime& runtime) { return attend_forward(tensors, runtime); });
  if (tensors.grad_out) {
    stages.run("backward", [&](const Runtime& runtime) {
      attend_backward(tensors, parse_grad_kv_dtype(kName, options.grad_kv_dtype), results, runtime);
    });
  }
  if (options.verify) {
    stages.run("verify attention", [&](const Runtime& runtime) {
      const Backend backend = effective_backend(runtime);
      const bool tight = backend == Backend::kCpu || backend == Backend::kReference;
      verify_attention(table, tensors, results, tight, runtime);
    });
  }
  return results;
}

void execute(Options& options, int& exit_code) {
  Runtime chosen = options.runtime.make();
  parse_grad_kv_dtype(kName, options.grad_kv_dtype);
  const Input input(kName, options.in, options.scalars);
  check_output(input, options.out);
  check_inputs(input);
  chosen.mode = read_mode(input);
  Stages stages(chosen);
  ErrorTable table;
  Report report(kName);
  const PackedMetadata metadata = stages.run(
      "metadata", [&](const Runtime& runtime) { return build_metadata(input, runtime); });
  report.add("documents", "documents", input.reader().shape("cu_seqlens")->front() - 1);
  const AttentionTensors tensors =
      load_attention(input, select(input, metadata, options, stages, table));
  const AttentionResults results = attend(tensors, options, stages, table);

  SafetensorsWriter writer;
  add_results(writer, metadata);
  add_results(writer, tensors.selection);
  add_results(writer, results);
  describe_metadata(report, metadata);
  describe_selection(report, metadata, tensors.selection);
  describe_attention(report, tensors);
  stages.describe(report);
  if (options.verify) report.add_block("errors", table.json(), table.text());
  deliver(writer, options.out, report, options.runtime.json());
  if (!table.ok()) exit_code = kVerificationFailed;
}

}  // namespace

void add_run_command(CLI::App& app, int& exit_code) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand(kName, "Metadata, selection and attention in order, as a layer does");
  command->add_option("IN", options->in, "Safetensors file with all inputs")->required();
  command->add_option("OUT", options->out, "Safetensors file to write")->required();
  command->add_flag("--scores", options->scores, "Write topk_scores too");
  command->add_flag("--verify", options->verify,
                    "Compare with the FP64 reference, as `flashdsa verify`; exit code 1 when a "
                    "bound is broken");
  add_grad_kv_dtype(*command, options->grad_kv_dtype);
  add_topk_scalars(*command, options->scalars);
  add_metadata_scalars(*command, options->scalars);
  add_attention_scalars(*command, options->scalars);
  options->runtime.add_to(*command);
  command->footer(kTensors);
  command->callback([options, &exit_code] { execute(*options, exit_code); });
}

}  // namespace flashdsa::tools
