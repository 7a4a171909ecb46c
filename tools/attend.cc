// flashdsa attend: SPEC sections 5 and 6 on files.

#include <memory>
#include <optional>

#include "tools/command.h"
#include "tools/pipeline.h"

namespace flashdsa::tools {
namespace {

constexpr auto kName = "attend";
constexpr auto kTensors = R"(Tensors of IN (D is 576, or 512 without rope):
  q             bfloat16 [T_q, H, D]    H in 1..128
  kv            bfloat16 [T_k, 1, D]    the value is its first 512 channels
  topk_indices  int32 [T_q, 1, K]       keys of every row; slots outside 0..T_k-1 do not count
  topk_length   int32 [T_q]             optional: only the first slots of a row exist
  attn_sink     float32 [H]             optional: logit of a virtual key of value zero
  grad_out      bfloat16 [T_q, H, 512]  optional: asks for the gradients
Tensors of OUT:
  out             bfloat16 [T_q, H, 512]
  lse             float32 [T_q, H]        natural logarithm, without the sink
  max_logits      float32 [T_q, H]        scaled, without the sink
  grad_q          bfloat16 [T_q, H, D]    with grad_out, as the following
  grad_kv         bfloat16 or float32 [T_k, 1, D]
  grad_attn_sink  float32 [H]             with attn_sink)";

struct Options {
  std::string in;
  std::string out;
  std::optional<std::string> grad_kv_dtype;
  RuntimeOptions runtime{kName};
  ScalarOptions scalars{kName};
};

void execute(Options& options) {
  Runtime chosen = options.runtime.make();
  const auto grad_kv_dtype = parse_grad_kv_dtype(kName, options.grad_kv_dtype);
  const Input input(kName, options.in, options.scalars);
  check_output(input, options.out);
  chosen.mode = read_mode(input);
  input.require({"q", "kv", "topk_indices"});
  Stages stages(chosen, choose_placement(chosen, input, {"q"}));
  const AttentionTensors tensors = load_attention(input, load_selection(input));
  const AttentionResults results = attend(tensors, grad_kv_dtype, stages);

  SafetensorsWriter writer;
  add_results(writer, results);
  Report report(kName);
  describe_attention(report, tensors);
  stages.describe(report);
  deliver(writer, options.out, report, options.runtime.json());
}

}  // namespace

void add_attend_command(CLI::App& app, int&) {
  const auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand(kName, "Sparse attention over given keys, backward too with grad_out");
  command->add_option("IN", options->in, "Safetensors file with q, kv, topk_indices")->required();
  command->add_option("OUT", options->out, "Safetensors file to write")->required();
  add_grad_kv_dtype(*command, options->grad_kv_dtype);
  add_attention_scalars(*command, options->scalars);
  options->runtime.add_to(*command);
  command->footer(kTensors);
  command->callback([options] { execute(*options); });
}

}  // namespace flashdsa::tools
