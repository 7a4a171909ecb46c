// Real text through a small fixed model: see docs/synth.md.
//
//   token, short, long   [32] each: the byte's embedding, and its running means over about 10 and
//                        100 tokens, each scaled to unit root mean square
//   x = (token, short, long)                                                        [96]
//   index_k = rope(W_k x);  index_q[h] = rope(sum over the parts of gain[h, part] * (W_k x)_part)
//   head_weights[h] = (1 + 0.25 v_h . x) * H_index^-0.5 * 128^-0.5
//   kv = rope(W_kv x + noise);  q[h] = rope(W_up[h] (W_down x)), W_down x of width 32
//
// Queries and keys of the indexer come from one projection, so a row prefers keys whose context is
// like its own, and the selection drifts as slowly as the context does.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>

#include "flashdsa/error.h"
#include "flashdsa/runtime.h"
#include "tools/parallel.h"
#include "tools/synth_batch.h"
#include "tools/synth_fill.h"
#include "tools/synth_random.h"

namespace flashdsa::tools {
namespace {

constexpr std::size_t kPart = 32;
constexpr std::size_t kParts = 3;
constexpr std::size_t kHidden = kPart * kParts;
constexpr std::size_t kQueryRank = 32;
constexpr std::size_t kIndexDim = 128;
constexpr std::size_t kRopeDim = 64;
constexpr std::size_t kValueDim = 512;  // the rope channels of a head follow
constexpr std::array<float, kParts> kDecay = {0, 0.9f, 0.99f};
constexpr float kKvNoise = 0.3f;

// What indexer heads look at, in turn: the token, the phrase, the topic, all of it.
constexpr std::array<std::array<float, kParts>, 4> kHeadKinds = {
    {{{0.3f, 1, 1}}, {{0.1f, 1.2f, 0.8f}}, {{0.05f, 0.4f, 1.6f}}, {{0.1f, 0.6f, 1.3f}}}};
constexpr float kGainDeviation = 0.3f;

using Hidden = std::array<float, kHidden>;

/// A matrix of normal numbers with variance 1 / inputs, stored input by input so that the product's
/// inner loop runs over outputs: each output is summed in the order of the inputs.
class Projection {
 public:
  Projection(const RandomStream& stream, std::size_t inputs, std::size_t outputs)
      : outputs_(outputs), weights_(inputs * outputs) {
    const float scale = 1 / std::sqrt(static_cast<float>(inputs));
    for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i] = scale * stream.normal(i);
  }

  /// result += inputs [begin, end) of x times the weights.
  void accumulate(const float* x, std::size_t begin, std::size_t end, float* result) const {
    for (std::size_t i = begin; i < end; ++i) {
      const float* row = weights_.data() + i * outputs_;
      for (std::size_t c = 0; c < outputs_; ++c) result[c] += x[i] * row[c];
    }
  }

 private:
  std::size_t outputs_;
  std::vector<float> weights_;
};

/// Rotations of the rope channels: pairs (2i, 2i + 1), frequency base^(-i / 32).
class Rope {
 public:
  explicit Rope(double base) {
    double root = base;  // base^(1 / 32)
    for (int halving = 0; halving < 5; ++halving) root = std::sqrt(root);
    double frequency = 1 / (2 * 3.141592653589793);
    for (double& value : turns_) {
      value = frequency;
      frequency /= root;
    }
  }

  struct Angles {
    std::array<float, kRopeDim / 2> sine, cosine;
  };

  Angles at(std::int64_t offset) const {
    Angles angles;
    for (std::size_t i = 0; i < turns_.size(); ++i) {
      const double turns = turns_[i] * static_cast<double>(offset);
      angles.sine[i] = static_cast<float>(portable_sin_turns(turns));
      angles.cosine[i] = static_cast<float>(portable_cos_turns(turns));
    }
    return angles;
  }

  static void rotate(const Angles& angles, float* channels) {
    for (std::size_t i = 0; i < kRopeDim / 2; ++i) {
      const float a = channels[2 * i], b = channels[2 * i + 1];
      channels[2 * i] = a * angles.cosine[i] - b * angles.sine[i];
      channels[2 * i + 1] = a * angles.sine[i] + b * angles.cosine[i];
    }
  }

 private:
  std::array<double, kRopeDim / 2> turns_;
};

void normalise(float* part) {
  float squares = 0;
  for (std::size_t c = 0; c < kPart; ++c) squares += part[c] * part[c];
  const float scale = 1 / std::sqrt(squares / static_cast<float>(kPart) + 1e-12f);
  for (std::size_t c = 0; c < kPart; ++c) part[c] *= scale;
}

/// x of every token of a document.
std::vector<Hidden> hidden_states(const std::string& text, const std::vector<float>& embedding) {
  std::vector<Hidden> states(text.size());
  Hidden means{};
  for (std::size_t t = 0; t < text.size(); ++t) {
    const std::size_t token = static_cast<unsigned char>(text[t]);
    for (std::size_t part = 0; part < kParts; ++part) {
      for (std::size_t c = 0; c < kPart; ++c) {
        float& mean = means[part * kPart + c];
        mean = kDecay[part] * mean + (1 - kDecay[part]) * embedding[token * kPart + c];
      }
    }
    states[t] = means;
    for (std::size_t part = 0; part < kParts; ++part) normalise(&states[t][part * kPart]);
  }
  return states;
}

void store(std::span<const float> values, BFloat16* target) {
  for (std::size_t c = 0; c < values.size(); ++c) target[c] = BFloat16(values[c]);
}

class TextModel {
 public:
  TextModel(const ModelShape& shape, std::uint64_t seed)
      : heads_(static_cast<std::size_t>(shape.heads)),
        index_heads_(static_cast<std::size_t>(shape.index_heads)),
        head_dim_(static_cast<std::size_t>(shape.head_dim)),
        rope_(shape.rope_base),
        index_({seed, StreamId::kIndexProjection}, kHidden, kIndexDim),
        weights_({seed, StreamId::kWeightProjection}, kHidden, index_heads_),
        kv_({seed, StreamId::kKvProjection}, kHidden, head_dim_),
        kv_noise_(seed, StreamId::kKvNoise),
        query_down_({seed, StreamId::kQueryDown}, kHidden, kQueryRank),
        query_up_({seed, StreamId::kQueryUp}, kQueryRank, heads_ * head_dim_),
        gains_(index_heads_ * kParts * kIndexDim) {
    const RandomStream stream(seed, StreamId::kIndexGain);
    for (std::size_t i = 0; i < gains_.size(); ++i) {
      const std::size_t head = i / (kParts * kIndexDim);
      const std::size_t part = i / kIndexDim % kParts;
      gains_[i] =
          kHeadKinds[head % kHeadKinds.size()][part] * (1 + kGainDeviation * stream.normal(i));
    }
  }

  void write_index_key(const Hidden& x, std::int64_t offset, BFloat16* target) const {
    std::array<float, kIndexDim> key{};
    index_.accumulate(x.data(), 0, kHidden, key.data());
    Rope::rotate(rope_.at(offset), key.data());
    store(key, target);
  }

  void write_index_query(const Hidden& x, std::int64_t offset, BFloat16* target,
                         float* head_weights) const {
    const Rope::Angles angles = rope_.at(offset);
    std::array<std::array<float, kIndexDim>, kParts> parts{};
    for (std::size_t part = 0; part < kParts; ++part) {
      index_.accumulate(x.data(), part * kPart, (part + 1) * kPart, parts[part].data());
    }
    for (std::size_t head = 0; head < index_heads_; ++head) {
      std::array<float, kIndexDim> query{};
      for (std::size_t part = 0; part < kParts; ++part) {
        const float* gain = gains_.data() + (head * kParts + part) * kIndexDim;
        for (std::size_t c = 0; c < kIndexDim; ++c) query[c] += gain[c] * parts[part][c];
      }
      Rope::rotate(angles, query.data());
      store(query, target + head * kIndexDim);
    }
    std::vector<float> projected(index_heads_);
    weights_.accumulate(x.data(), 0, kHidden, projected.data());
    const float scale = 1 / std::sqrt(static_cast<float>(index_heads_ * kIndexDim));
    for (std::size_t head = 0; head < index_heads_; ++head) {
      head_weights[head] = scale * (1 + 0.25f * projected[head]);
    }
  }

  void write_key(const Hidden& x, std::int64_t position, std::int64_t offset,
                 BFloat16* target) const {
    std::vector<float> key(head_dim_);
    const auto counter = static_cast<std::uint64_t>(position) * head_dim_;
    for (std::size_t c = 0; c < head_dim_; ++c) key[c] = kKvNoise * kv_noise_.normal(counter + c);
    kv_.accumulate(x.data(), 0, kHidden, key.data());
    if (head_dim_ > kValueDim) Rope::rotate(rope_.at(offset), key.data() + kValueDim);
    store(key, target);
  }

  void write_query(const Hidden& x, std::int64_t offset, BFloat16* target) const {
    std::array<float, kQueryRank> low{};
    query_down_.accumulate(x.data(), 0, kHidden, low.data());
    std::vector<float> query(heads_ * head_dim_);
    query_up_.accumulate(low.data(), 0, kQueryRank, query.data());
    if (head_dim_ > kValueDim) {
      const Rope::Angles angles = rope_.at(offset);
      for (std::size_t head = 0; head < heads_; ++head) {
        Rope::rotate(angles, query.data() + head * head_dim_ + kValueDim);
      }
    }
    store(query, target);
  }

 private:
  std::size_t heads_, index_heads_, head_dim_;
  Rope rope_;
  Projection index_, weights_, kv_;
  RandomStream kv_noise_;
  Projection query_down_, query_up_;
  std::vector<float> gains_;  // [H_index, parts, 128]
};

std::vector<float> make_embedding(std::uint64_t seed) {
  const RandomStream stream(seed, StreamId::kEmbedding);
  std::vector<float> embedding(256 * kPart);
  for (std::size_t i = 0; i < embedding.size(); ++i) embedding[i] = stream.normal(i);
  return embedding;
}

/// x of every token of every document.
class TextStates {
 public:
  TextStates(std::span<const std::string> texts, const BatchOptions& options)
      : documents_(texts.size()) {
    const std::vector<float> embedding = make_embedding(options.seed);
    parallel_for(options.threads > 0 ? options.threads : hardware_threads(),
                 static_cast<std::int64_t>(texts.size()), [&](std::int64_t i) {
                   const auto d = static_cast<std::size_t>(i);
                   documents_[d] = hidden_states(texts[d], embedding);
                 });
  }

  const Hidden& at(const RowPlace& place) const {
    return documents_[static_cast<std::size_t>(place.document)]
                     [static_cast<std::size_t>(place.offset)];
  }

 private:
  std::vector<std::vector<Hidden>> documents_;
};

/// Calls body(row, place, x) for every row that is not padding.
template <typename Body>
void for_each_token(const RowFill& fill, const TextStates& states, const Body& body) {
  const auto rows = static_cast<std::int64_t>(fill.places.size());
  parallel_ranges(fill.threads, rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const RowPlace& place = fill.places[static_cast<std::size_t>(row)];
      if (place.real) body(row, place, states.at(place));
    }
  });
}

void add_indexer(Batch& batch, const TextModel& model, const TextStates& states,
                 const RowFill& queries, const RowFill& keys) {
  constexpr auto kWidth = static_cast<std::int64_t>(kIndexDim);
  const auto t_q = static_cast<std::int64_t>(queries.places.size());
  const std::int64_t heads = batch.shape.index_heads;
  const Tensor index_q = Tensor::host(DType::kBFloat16, {t_q, heads, kWidth});
  const Tensor index_k = Tensor::host(DType::kBFloat16, {batch.layout.total_key_tokens, kWidth});
  const Tensor head_weights = Tensor::host(DType::kFloat32, {t_q, heads});
  for_each_token(keys, states, [&](std::int64_t row, const RowPlace& place, const Hidden& x) {
    model.write_index_key(x, place.offset, index_k.view().as<BFloat16>() + row * kWidth);
  });
  for_each_token(queries, states, [&](std::int64_t row, const RowPlace& place, const Hidden& x) {
    model.write_index_query(x, place.offset, index_q.view().as<BFloat16>() + row * heads * kWidth,
                            head_weights.view().as<float>() + row * heads);
  });
  fill_padding_rows(index_k, keys);
  fill_padding_rows(index_q, queries);
  fill_padding_rows(head_weights, queries);
  batch.tensors.insert(
      batch.tensors.end(),
      {{"index_q", index_q}, {"index_k", index_k}, {"head_weights", head_weights}});
}

void add_attention(Batch& batch, const TextModel& model, const TextStates& states,
                   const RowFill& queries, const RowFill& keys) {
  const auto t_q = static_cast<std::int64_t>(queries.places.size());
  const std::int64_t heads = batch.shape.heads, head_dim = batch.shape.head_dim;
  const Tensor q = Tensor::host(DType::kBFloat16, {t_q, heads, head_dim});
  const Tensor kv = Tensor::host(DType::kBFloat16, {batch.layout.total_key_tokens, 1, head_dim});
  for_each_token(keys, states, [&](std::int64_t row, const RowPlace& place, const Hidden& x) {
    model.write_key(x, row, place.offset, kv.view().as<BFloat16>() + row * head_dim);
  });
  for_each_token(queries, states, [&](std::int64_t row, const RowPlace& place, const Hidden& x) {
    model.write_query(x, place.offset, q.view().as<BFloat16>() + row * heads * head_dim);
  });
  fill_padding_rows(kv, keys);
  fill_padding_rows(q, queries);
  batch.tensors.insert(batch.tensors.end(), {{"q", q}, {"kv", kv}});
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) {
    throw Error(ErrorCode::kValue, fmt::format("synth: --text must name readable files, got {}: {}",
                                               path, std::strerror(errno)));
  }
  std::string text;
  std::array<char, 65536> piece;
  while (file.read(piece.data(), piece.size()) || file.gcount() > 0) {
    text.append(piece.data(), static_cast<std::size_t>(file.gcount()));
  }
  if (text.empty()) {
    throw Error(ErrorCode::kValue,
                fmt::format("synth: --text must name files that hold text, got {}: empty or not a "
                            "regular file",
                            path));
  }
  return text;
}

}  // namespace

std::vector<std::string> read_texts(std::span<const std::string> paths, std::int64_t tokens) {
  std::vector<std::string> texts;
  std::vector<std::size_t> sizes;
  for (const std::string& path : paths) {
    texts.push_back(read_text(path));
    sizes.push_back(texts.back().size());
  }
  std::sort(sizes.begin(), sizes.end());
  // The largest common limit: short files whole, the rest shares what is left evenly.
  auto left = static_cast<std::size_t>(tokens);
  std::size_t limit = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    limit = left / (sizes.size() - i);
    if (sizes[i] > limit) break;
    limit = sizes[i];
    left -= sizes[i];
  }
  if (limit == 0) {
    throw Error(ErrorCode::kValue,
                fmt::format("synth: --tokens must give every one of {} texts a token, got {}",
                            texts.size(), tokens));
  }
  for (std::string& text : texts) text.resize(std::min(text.size(), limit));
  return texts;
}

Batch text_batch(const ModelShape& shape, PackedLayout layout, std::span<const std::string> texts,
                 const BatchOptions& options) {
  Batch batch = begin_batch(shape, std::move(layout), options);
  batch.metadata["text"] = "true";
  const std::vector<RowPlace> rows = query_places(batch.layout);
  const std::vector<RowPlace> storage = key_places(batch.layout);
  std::vector<std::int32_t> positions(storage.size());
  std::iota(positions.begin(), positions.end(), 0);
  const float padding = options.poison_padding ? std::numeric_limits<float>::quiet_NaN() : 0;
  const RowFill queries{batch.layout.query_positions, rows, padding, options.threads};
  const RowFill keys{positions, storage, padding, options.threads};

  const TextModel model(shape, options.seed);
  const TextStates states(texts, options);
  if (options.indexer) add_indexer(batch, model, states, queries, keys);
  if (options.attention) add_attention(batch, model, states, queries, keys);
  add_gradient_and_sink(batch, queries, options);
  return batch;
}

}  // namespace flashdsa::tools
