// flashdsa synth: writes a realistic input file. SPEC section 9, docs/synth.md.

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "flashdsa/error.h"
#include "tools/command.h"
#include "tools/options.h"
#include "tools/output_file.h"
#include "tools/report.h"
#include "tools/safetensors.h"
#include "tools/synth_batch.h"
#include "tools/synth_options.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kMaxTokens = (std::int64_t{1} << 31) - 2;

// Lengths of packed fine-tuning data, where the number of documents is not given.
constexpr std::int64_t kShortestDocument = 100;
constexpr std::int64_t kLongestDocument = 4000;

struct SynthArgs {
  std::string out;
  std::string preset = "glm5.2";
  std::int64_t tokens = 8192;
  std::int64_t documents = 0;  // 0: as many as log-uniform lengths give
  std::int64_t pad_to = 1;
  std::int64_t cp_rank = 0;
  std::int64_t cp_size = 1;
  std::string cp_order = "contiguous";
  std::int64_t heads = 0;  // 0: the preset's, also below
  std::int64_t index_heads = 0;
  std::int64_t topk = 0;
  std::int64_t head_dim = 0;
  std::vector<std::string> texts;
  RuntimeOptions runtime{"synth"};
  BatchOptions batch;
};

ModelShape shape_of(const SynthArgs& args) {
  ModelShape shape = preset(args.preset);
  if (args.heads > 0) shape.heads = args.heads;
  if (args.index_heads > 0) shape.index_heads = args.index_heads;
  if (args.topk > 0) shape.topk = args.topk;
  if (args.head_dim > 0) shape.head_dim = args.head_dim;
  if (shape.head_dim != 512 && shape.head_dim != 576) {
    throw Error(ErrorCode::kValue,
                fmt::format("synth: --head-dim must be 512 or 576, got {}", shape.head_dim));
  }
  return shape;
}

std::vector<std::int64_t> lengths_of(const SynthArgs& args, const std::vector<std::string>& texts) {
  if (!texts.empty()) {
    std::vector<std::int64_t> lengths;
    for (const std::string& text : texts) lengths.push_back(static_cast<std::int64_t>(text.size()));
    return lengths;
  }
  if (args.documents > 0) return split_tokens(args.tokens, args.documents, args.batch.seed);
  return draw_lengths(args.tokens, kShortestDocument, kLongestDocument, args.batch.seed);
}

Batch build(const SynthArgs& args) {
  if (args.cp_rank >= args.cp_size) {
    throw Error(ErrorCode::kValue,
                fmt::format("synth: --cp-rank must be below --cp-size = {}, got {}", args.cp_size,
                            args.cp_rank));
  }
  const ModelShape shape = shape_of(args);
  std::vector<std::string> texts;
  if (!args.texts.empty()) texts = read_texts(args.texts, args.tokens);
  PackedLayout layout = pack_documents(lengths_of(args, texts), args.pad_to);
  BatchOptions options = args.batch;
  if (args.cp_size > 1) {
    options.general_queries = args.cp_order == "zigzag";
    take_rank(layout, options.general_queries ? CpOrder::kZigzag : CpOrder::kContiguous,
              args.cp_rank, args.cp_size);
  }
  if (!texts.empty()) return text_batch(shape, std::move(layout), texts, options);
  return random_batch(shape, std::move(layout), options);
}

void print_json(const Batch& batch, const std::string& path) {
  nlohmann::ordered_json record;
  record["path"] = path;
  record["documents"] = batch.layout.documents();
  record["tokens"] = batch.layout.cu_seqlens.back();
  record["metadata"] = batch.metadata;
  for (const auto& [name, tensor] : batch.tensors) {
    const TensorView& view = tensor.view();
    record["tensors"][name] = {
        {"dtype", dtype_name(view.dtype)},
        {"shape", std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + view.rank)}};
  }
  fmt::print("{}\n", record.dump());
}

void print_table(const Batch& batch, const std::string& path) {
  const PackedLayout& layout = batch.layout;
  fmt::print("{}: {}, {} documents, {} tokens in {} rows, longest {}, {} query rows\n", path,
             batch.shape.name, layout.documents(), layout.cu_seqlens.back(),
             layout.total_key_tokens, layout.longest(), layout.query_positions.size());
  for (const auto& [name, tensor] : batch.tensors) {
    fmt::print("  {:<18} {:<26} {:>8.1f} MiB\n", name, describe(tensor),
               static_cast<double>(tensor.view().bytes()) / 0x1p20);
  }
}

// The file appears only when its description has been printed.
void deliver(const Batch& batch, const std::string& path, bool as_json) {
  SafetensorsWriter writer;
  for (const auto& [name, tensor] : batch.tensors) writer.add(name, tensor);
  for (const auto& [name, value] : batch.metadata) writer.add_metadata(name, value);
  OutputFile file = writer.stage(path);
  if (path != "/dev/stdout") {
    (as_json ? print_json : print_table)(batch, path);
    flush_stdout();
  }
  file.commit();
}

void add_size_options(CLI::App& command, SynthArgs& args) {
  const auto names = preset_names();
  command.add_option("--preset", args.preset, "Model whose sizes are used; default glm5.2")
      ->check(CLI::IsMember(std::vector<std::string>(names.begin(), names.end())));
  add_integer_option(command, "--heads", args.heads, 1, 128, "H, attention heads");
  add_integer_option(command, "--index-heads", args.index_heads, 1, 64, "H_index, indexer heads");
  add_integer_option(command, "--topk", args.topk, 1, 2048, "K, selection width");
  add_integer_option(command, "--head-dim", args.head_dim, 512, 576, "D, 576 or 512 (no rope)");
}

void add_layout_options(CLI::App& command, SynthArgs& args) {
  add_integer_option(command, "--tokens", args.tokens, 1, kMaxTokens,
                     "Real tokens of the batch; default 8192");
  auto* documents =
      add_integer_option(command, "--documents", args.documents, 1, kMaxTokens,
                         "Number of documents; default: lengths log-uniform in 100..4000");
  add_integer_option(command, "--pad-to", args.pad_to, 1, kMaxTokens,
                     "Storage of every document is a multiple of this; default 1");
  add_integer_option(command, "--cp-size", args.cp_size, 1, kMaxTokens,
                     "Ranks of context parallelism; default 1");
  add_integer_option(command, "--cp-rank", args.cp_rank, 0, kMaxTokens,
                     "Write the query rows of this rank; default 0");
  command.add_option("--cp-order", args.cp_order, "How ranks cut the storage; default contiguous")
      ->check(CLI::IsMember({"contiguous", "zigzag"}));
  auto* overlap = add_real_option(command, "--overlap", args.batch.overlap, 0, 1,
                                  "Share of keys that the selections of neighbouring rows have in "
                                  "common; default 0.9");
  command
      .add_option("--text", args.texts,
                  "Text files in place of random numbers: one document each, bytes are tokens")
      ->excludes(documents)
      ->excludes(overlap);
}

void add_content_options(CLI::App& command, SynthArgs& args) {
  command.add_option("--seed", args.batch.seed, "Seed of all random numbers; default 1");
  command.add_flag("--grad,!--no-grad", args.batch.grad, "Write grad_out; the default");
  command.add_flag("--sink", args.batch.sink, "Write attn_sink");
  command.add_flag("--padding-mask", args.batch.padding_mask,
                   "Write padding_mask; the last document absorbs its padding");
  command.add_flag("--poison-padding", args.batch.poison_padding,
                   "Padding rows hold NaN instead of zero");
}

}  // namespace

void add_synth_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("synth", "Write a realistic input file");
  const auto args = std::make_shared<SynthArgs>();
  command->add_option("OUT", args->out, "Safetensors file to write")->required();
  add_size_options(*command, *args);
  add_layout_options(*command, *args);
  add_content_options(*command, *args);
  args->runtime.add_to(*command);
  command->callback([args, &exit_code] {
    args->batch.threads = args->runtime.make().threads;
    SafetensorsWriter::check_writable(args->out);
    deliver(build(*args), args->out, args->runtime.json());
    exit_code = kSuccess;
  });
}

}  // namespace flashdsa::tools
