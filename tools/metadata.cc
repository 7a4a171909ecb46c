// flashdsa metadata: SPEC section 2 on files.

#include <memory>

#include "tools/command.h"
#include "tools/pipeline.h"

namespace flashdsa::tools {
namespace {

constexpr auto kName = "metadata";
constexpr auto kTensors = R"(Tensors of IN:
  cu_seqlens         int32 [N+1]           real document lengths, summed up
  cu_seqlens_padded  int32 [N+1]           storage boundaries (default: cu_seqlens)
  query_indices      int32 or int64 [T_q]  storage positions of the local rows (default: all T_k)
  padding_mask       bool [T_q]            true = padding
Tensors of OUT: starts, causal_lengths, query_valid, valid_row_indices, segment_cu_q, segment_cu_k,
q_causal_offsets, key_source_indices; in __metadata__: max_seqlen_q, max_seqlen_k,
total_key_tokens, all_rows_nonempty.)";

struct Options {
  std::string in;
  std::string out;
  RuntimeOptions runtime{kName};
  ScalarOptions scalars{kName};
};

void execute(Options& options) {
  const Runtime chosen = options.runtime.make();
  const Input input(kName, options.in, options.scalars);
  check_output(input, options.out);
  Stages stages(chosen, choose_placement(chosen, input, {}));
  const PackedMetadata metadata = stages.fetch(stages.run("metadata", [&](const Runtime& runtime) {
    return build_metadata(input, stages.placement(), runtime);
  }));

  SafetensorsWriter writer;
  add_results(writer, metadata);
  Report report(kName);
  describe_metadata(report, metadata);
  stages.describe(report);
  deliver(writer, options.out, report, options.runtime.json());
}

}  // namespace

void add_metadata_command(CLI::App& app, int&) {
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(kName, "Find every packed row's document and keys");
  command->add_option("IN", options->in, "Safetensors file with cu_seqlens")->required();
  command->add_option("OUT", options->out, "Safetensors file to write")->required();
  add_metadata_scalars(*command, options->scalars);
  options->runtime.add_to(*command);
  command->footer(kTensors);
  command->callback([options] { execute(*options); });
}

}  // namespace flashdsa::tools
