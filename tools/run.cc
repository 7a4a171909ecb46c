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

/// Metadata and selection of the host.
struct Selected {
  PackedMetadata metadata;
  Selection selection;
};

Selected select(const Input& input, const Options& options, Stages& stages, ErrorTable& table) {
  const PackedMetadata metadata = stages.run("metadata", [&](const Runtime& runtime) {
    return build_metadata(input, stages.placement(), runtime);
  });
  const IndexerTensors tensors = load_indexer(input);
  const IndexerTensors placed = stages.place(tensors);
  const Selection selection = stages.run("topk", [&](const Runtime& runtime) {
    return select_keys(placed, metadata, read_index_topk(input), options.scores, runtime);
  });
  const Selected selected{stages.fetch(metadata), stages.fetch(selection)};
  if (options.verify) {
    stages.run("verify topk", [&](const Runtime& runtime) {
      verify_selection(table, tensors, selected.metadata, selected.selection, runtime);
    });
  }
  return selected;
}

void execute(Options& options, int& exit_code) {
  Runtime chosen = options.runtime.make();
  const auto grad_kv_dtype = parse_grad_kv_dtype(kName, options.grad_kv_dtype);
  const Input input(kName, options.in, options.scalars);
  check_output(input, options.out);
  check_inputs(input);
  chosen.mode = read_mode(input);
  Stages stages(chosen, choose_placement(chosen, input, {"index_q", "q"}));
  ErrorTable table;
  Report report(kName);
  const auto [metadata, selection] = select(input, options, stages, table);
  report.add("documents", "documents", input.reader().shape("cu_seqlens")->front() - 1);
  const AttentionTensors tensors = load_attention(input, selection);
  const AttentionResults results = attend(tensors, grad_kv_dtype, stages);
  if (options.verify) {
    stages.run("verify attention", [&](const Runtime& runtime) {
      verify_attention(table, tensors, results, stages.placement().on_host(), runtime);
    });
  }

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
