#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashdsa/tensor_view.h"
#include "tools/synth_layout.h"

namespace flashdsa::tools {

/// The sizes of a model's attention on one rank.
struct ModelShape {
  std::string name;
  std::int64_t heads = 0;        // H
  std::int64_t index_heads = 0;  // H_index
  std::int64_t head_dim = 576;   // D
  std::int64_t topk = 2048;      // K
  double softmax_scale = 0;
  double rope_base = 0;
};

/// Names of the presets, first the default.
std::span<const std::string_view> preset_names();

/// Throws Error(kValue) for an unknown name.
ModelShape preset(std::string_view name);

/// What a batch holds beside its shape and layout.
struct BatchOptions {
  std::uint64_t seed = 1;
  double overlap = 0.9;          // of neighbouring selections; only for random batches
  bool attention = true;         // q, kv
  bool indexer = true;           // index_q, index_k, head_weights
  bool grad = true;              // grad_out
  bool sink = false;             // attn_sink
  bool padding_mask = false;     // the mask, with the trailing padding absorbed into cu_seqlens
  bool poison_padding = false;   // padding rows hold NaN instead of zero
  bool general_queries = false;  // query_mode of the file
  int threads = 0;
};

/// The tensors and strings of one input file. SPEC section 9.
struct Batch {
  ModelShape shape;
  PackedLayout layout;
  std::vector<std::pair<std::string, Tensor>> tensors;
  std::map<std::string, std::string> metadata;

  const Tensor& at(std::string_view name) const;  // the tensor must be there
};

/// Normal random tensors; index_q drifts along every document so that the indexer's selections of
/// neighbouring rows share about `overlap` of their keys.
Batch random_batch(const ModelShape& shape, PackedLayout layout, const BatchOptions& options);

/// The bytes of real text as tokens, through a small fixed model: docs/synth.md. `texts` holds the
/// documents of `layout`, cut to their lengths.
Batch text_batch(const ModelShape& shape, PackedLayout layout, std::span<const std::string> texts,
                 const BatchOptions& options);

/// Reads the files and cuts the longest ones to a common length, so that the total is at most
/// `tokens`. Throws Error(kValue) with the path for an unreadable or empty file.
std::vector<std::string> read_texts(std::span<const std::string> paths, std::int64_t tokens);

}  // namespace flashdsa::tools
