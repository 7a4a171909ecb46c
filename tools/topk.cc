// flashdsa topk: SPEC section 3 on files.

#include <memory>

#include "tools/command.h"
#include "tools/pipeline.h"
#include "tools/selection_summary.h"

namespace flashdsa::tools {
namespace {

constexpr auto kName = "topk";
constexpr auto kTensors = R"(Tensors of IN:
  index_q       bfloat16 [T_q, H_index, 128]           H_index in 1..64
  index_k       bfloat16 [T_k, 128]
  head_weights  float32 or bfloat16 [T_q, H_index]     scaled by the caller
  cu_seqlens and the other tensors of `flashdsa metadata`
Tensors of OUT:
  topk_indices  int32 [T_q, 1, K]   storage rows of the selected keys, ascending, then -1
  topk_length   int32 [T_q]         selected keys: min(K, visible keys)
  topk_scores   float32 [T_q, K]    with --scores: in the same order, then -inf)";

struct Options {
  std::string in;
  std::string out;
  bool scores = false;
  RuntimeOptions runtime{kName};
  ScalarOptions scalars{kName};
};

void execute(Options& options) {
  const Runtime chosen = options.runtime.make();
  const Input input(kName, options.in, options.scalars);
  check_output(input, options.out);
  const std::int64_t topk = read_index_topk(input);
  Stages stages(chosen, choose_placement(chosen, input, {"index_q"}));
  const PackedMetadata placed_metadata = stages.run("metadata", [&](const Runtime& runtime) {
    return build_metadata(input, stages.placement(), runtime);
  });
  const IndexerTensors tensors = stages.place(load_indexer(input));
  const Selection selection = stages.fetch(stages.run("topk", [&](const Runtime& runtime) {
    return select_keys(tensors, placed_metadata, topk, options.scores, runtime);
  }));
  const PackedMetadata metadata = stages.fetch(placed_metadata);

  SafetensorsWriter writer;
  add_results(writer, selection);
  Report report(kName);
  describe_metadata(report, metadata);
  describe_selection(report, metadata, selection);
  stages.describe(report);
  deliver(writer, options.out, report, options.runtime.json());
}

}  // namespace

void add_topk_command(CLI::App& app, int&) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand(kName, "Select the best keys of every query row with the indexer");
  command->add_option("IN", options->in, "Safetensors file with index_q, index_k, head_weights")
      ->required();
  command->add_option("OUT", options->out, "Safetensors file to write")->required();
  command->add_flag("--scores", options->scores, "Write topk_scores too");
  add_topk_scalars(*command, options->scalars);
  add_metadata_scalars(*command, options->scalars);
  options->runtime.add_to(*command);
  command->footer(kTensors);
  command->callback([options] { execute(*options); });
}

}  // namespace flashdsa::tools
