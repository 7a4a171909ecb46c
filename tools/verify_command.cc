// flashdsa verify: a backend's results against the reference's FP64 ones. SPEC section 8.

#include <fmt/format.h>

#include <algorithm>
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

constexpr auto kName = "verify";
constexpr auto kTensors = R"(Runs what the tensors of IN allow:
  the selection   index_q, index_k, head_weights, cu_seqlens (see `flashdsa topk --help`)
  the attention   q, kv and topk_indices, or the selection's (see `flashdsa attend --help`);
                  backward too with grad_out
and compares it with the reference backend on FP64 copies of the same inputs. Exit code 1 when a
bound of SPEC section 8 is broken.)";

struct Options {
  std::string in;
  std::optional<std::string> grad_kv_dtype;
  RuntimeOptions runtime{kName};
  ScalarOptions scalars{kName};
};

Selection verified_selection(const Input& input, Stages& stages, Report& report,
                             ErrorTable& table) {
  const std::int64_t topk = read_index_topk(input);
  const PackedMetadata placed_metadata = stages.run("metadata", [&](const Runtime& runtime) {
    return build_metadata(input, stages.placement(), runtime);
  });
  const IndexerTensors tensors = load_indexer(input);
  const IndexerTensors placed = stages.place(tensors);
  const Selection selection = stages.fetch(stages.run("topk", [&](const Runtime& runtime) {
    return select_keys(placed, placed_metadata, topk, /*scores=*/true, runtime);
  }));
  const PackedMetadata metadata = stages.fetch(placed_metadata);
  stages.run("verify topk", [&](const Runtime& runtime) {
    verify_selection(table, tensors, metadata, selection, runtime);
  });
  describe_metadata(report, metadata);
  describe_selection(report, metadata, selection);
  return selection;
}

void verified_attention(const Input& input, Selection selection, std::optional<DType> grad_kv_dtype,
                        Stages& stages, Report& report, ErrorTable& table) {
  const AttentionTensors tensors = load_attention(input, std::move(selection));
  const AttentionResults results = attend(tensors, grad_kv_dtype, stages);
  stages.run("verify attention", [&](const Runtime& runtime) {
    verify_attention(table, tensors, results, stages.placement().on_host(), runtime);
  });
  describe_attention(report, tensors);
}

// What the tensors of IN allow.
struct Work {
  bool selection = false;
  bool attention = false;
};

Work find_work(const Input& input) {
  const auto has_all = [&](std::initializer_list<std::string_view> names) {
    return std::all_of(names.begin(), names.end(), [&](auto name) { return input.has(name); });
  };
  Work work;
  work.selection = has_all({"cu_seqlens", "index_q", "index_k", "head_weights"});
  work.attention = has_all({"q", "kv"}) && (work.selection || input.has("topk_indices"));
  if (work.selection || work.attention) return work;
  if (input.has("index_q")) input.require({"cu_seqlens", "index_k", "head_weights"});
  if (input.has("q")) input.require({"kv", "topk_indices"});
  throw Error(ErrorCode::kValue,
              fmt::format("verify: IN must hold index_q, index_k, head_weights and cu_seqlens, or "
                          "q, kv and topk_indices, {} has too few of them",
                          input.reader().path()));
}

void execute(Options& options, int& exit_code) {
  Runtime chosen = options.runtime.make();
  const auto grad_kv_dtype = parse_grad_kv_dtype(kName, options.grad_kv_dtype);
  const Input input(kName, options.in, options.scalars);
  const Work work = find_work(input);
  if (work.attention) {
    read_softmax_scale(input);
    chosen.mode = read_mode(input);
  }
  Stages stages(chosen, choose_placement(chosen, input, {"index_q", "q"}));
  Report report(kName);
  ErrorTable table;
  Selection selection;
  if (work.selection) selection = verified_selection(input, stages, report, table);
  if (work.attention) {
    if (input.has("topk_indices")) selection = load_selection(input);
    verified_attention(input, std::move(selection), grad_kv_dtype, stages, report, table);
  }
  stages.describe(report);
  report.add("result", "ok", table.ok(), table.ok() ? "all bounds hold" : "FAILED");
  report.add_block("errors", table.json(), table.text());
  report.print(options.runtime.json());
  if (!table.ok()) exit_code = kVerificationFailed;
}

}  // namespace

void add_verify_command(CLI::App& app, int& exit_code) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand(kName, "Compare a backend with the FP64 reference, as a table of errors");
  command->add_option("IN", options->in, "Safetensors file")->required();
  add_grad_kv_dtype(*command, options->grad_kv_dtype);
  add_topk_scalars(*command, options->scalars);
  add_metadata_scalars(*command, options->scalars);
  add_attention_scalars(*command, options->scalars);
  options->runtime.add_to(*command);
  command->footer(kTensors);
  command->callback([options, &exit_code] { execute(*options, exit_code); });
}

}  // namespace flashdsa::tools
