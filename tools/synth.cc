// flashdsa synth: writes a realistic input file. SPEC section 9, docs/synth.md.

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "flashdsa/error.h"
#include "tools/command.h"
#include "tools/safetensors.h"
#include "tools/synth_batch.h"

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
  std::string backend = "auto";
  bool json = false;
  BatchOptions batch;
};

ModelShape shape_of(const SynthArgs& args) {
  ModelShape shape = preset(args.preset);
  if (args.heads > 0) shape.heads = args.heads;
  if (args.index_heads > 0) shape.index_heads = args.index_heads;
  if (args.topk > 0) shape.topk = args.topk;
  if (args.head_dim > 0) shape.head_dim = args.head_dim;
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
  std::vector<std::string> texts;
  if (!args.texts.empty()) texts = read_texts(args.texts, args.tokens);
  PackedLayout layout = pack_documents(lengths_of(args, texts), args.pad_to);
  BatchOptions options = args.batch;
  if (args.cp_size > 1) {
    options.general_queries = args.cp_order == "zigzag";
    take_rank(layout, options.general_queries ? CpOrder::kZigzag : CpOrder::kContiguous,
              args.cp_rank, args.cp_size);
  }
  const ModelShape shape = shape_of(args);
  if (!texts.empty()) return text_batch(shape, std::move(layout), texts, options);
  return random_batch(shape, std::move(layout), options);
}

void write(const Batch& batch, const std::string& path) {
  SafetensorsWriter writer;
  for (const auto& [name, tensor] : batch.tensors) writer.add(name, tensor);
  for (const auto& [name, value] : batch.metadata) writer.add_metadata(name, value);
  writer.write(path);
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

void add_options(CLI::App& command, SynthArgs& args) {
  command.add_option("OUT", args.out, "safetensors file to write")->required();
  const auto names = preset_names();
  command.add_option("--preset", args.preset, "model whose sizes are used (default glm5.2)")
      ->check(CLI::IsMember(std::vector<std::string>(names.begin(), names.end())));
  command.add_option("--tokens", args.tokens, "real tokens of the batch (default 8192)")
      ->check(CLI::Range(std::int64_t{1}, kMaxTokens));
  auto* documents =
      command.add_option("--documents", args.documents,
                         "number of documents (default: lengths log-uniform in 100..4000)");
  documents->check(CLI::Range(std::int64_t{1}, kMaxTokens));
  command.add_option("--pad-to", args.pad_to, "storage of a document is a multiple of this")
      ->check(CLI::Range(std::int64_t{1}, kMaxTokens));
  command.add_option("--cp-rank,--cp_rank", args.cp_rank, "write the query rows of this rank only")
      ->check(CLI::Range(std::int64_t{0}, kMaxTokens));
  command.add_option("--cp-size,--cp_size", args.cp_size, "ranks of context parallelism")
      ->check(CLI::Range(std::int64_t{1}, kMaxTokens));
  command.add_option("--cp-order,--cp_order", args.cp_order, "how ranks cut the storage")
      ->check(CLI::IsMember({"contiguous", "zigzag"}));
  command.add_option("--heads", args.heads, "H, attention heads")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{128}));
  command.add_option("--index-heads,--index_heads", args.index_heads, "H_index, indexer heads")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{64}));
  command.add_option("--topk,--index-topk,--index_topk", args.topk, "K, selection width")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{2048}));
  command.add_option("--head-dim,--head_dim", args.head_dim, "D, 576 or 512 (no rope)")
      ->check(CLI::IsMember(std::vector<std::int64_t>{576, 512}));
  auto* overlap = command.add_option("--overlap", args.batch.overlap,
                                     "share of keys that neighbouring selections have in common");
  overlap->check(CLI::Range(0.0, 1.0));
  command.add_option("--seed", args.batch.seed, "seed of all random numbers (default 1)");
  command.add_flag("--grad,!--no-grad", args.batch.grad, "write grad_out (default)");
  command.add_flag("--sink", args.batch.sink, "write attn_sink");
  command.add_flag("--padding-mask,--padding_mask", args.batch.padding_mask,
                   "write padding_mask; the last document absorbs its padding");
  command.add_flag("--poison-padding,--poison_padding", args.batch.poison_padding,
                   "padding rows hold NaN instead of zero");
  command.add_option("--text", args.texts, "text files, one document each, bytes are tokens")
      ->excludes(documents)
      ->excludes(overlap);
  command.add_option("--threads", args.batch.threads, "threads (default: all)")
      ->check(CLI::Range(0, 65536));
  command
      .add_option("--backend", args.backend, "accepted as by every command; no kernel runs here")
      ->check(CLI::IsMember({"auto", "cpu", "reference", "sm90", "sm80"}));
  command.add_flag("--json", args.json, "describe the file as one JSON object");
}

}  // namespace

void add_synth_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("synth", "write a realistic input file");
  const auto args = std::make_shared<SynthArgs>();
  add_options(*command, *args);
  command->callback([args, &exit_code] {
    SafetensorsWriter::check_writable(args->out);
    const Batch batch = build(*args);
    write(batch, args->out);
    (args->json ? print_json : print_table)(batch, args->out);
    exit_code = kSuccess;
  });
}

}  // namespace flashdsa::tools
