#include "tools/synth_batch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "flashdsa/error.h"
#include "tools/synth_drift.h"
#include "tools/synth_fill.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kIndexDim = 128;
constexpr std::int64_t kValueDim = 512;
constexpr std::array<std::string_view, 3> kPresets = {"glm5.2", "glm5.2-tp8", "deepseek-v3.2"};

// Per indexer head: the query vector and, behind it, the head weight.
constexpr std::int64_t kDriftWidth = kIndexDim + 1;

/// One indexer head's queries, drifting from row to row of each document.
class DriftingHead {
 public:
  DriftingHead(const PackedLayout& layout, const ModelShape& shape, const DriftSchedule& schedule,
               const RandomStream& stream, std::int64_t head)
      : layout_(layout), shape_(shape), schedule_(schedule), stream_(stream), head_(head) {}

  // Walks every document from its start, so that a row is the same on whatever rank it lies.
  void write(const Tensor& index_q, const Tensor& head_weights) {
    std::int32_t position = 0;
    std::int64_t document = -1;
    for (std::size_t row = 0; row < layout_.query_positions.size(); ++row) {
      const std::int32_t target = layout_.query_positions[row];
      while (document < 0 || target >= padded(document + 1)) position = padded(++document);
      const std::int64_t offset = target - padded(document);
      if (offset >= layout_.length(document)) continue;
      for (; position <= target; ++position) step(position, position - padded(document));
      store(index_q, head_weights, static_cast<std::int64_t>(row));
    }
  }

 private:
  std::int32_t padded(std::int64_t document) const {
    return layout_.cu_seqlens_padded[static_cast<std::size_t>(document)];
  }

  void step(std::int64_t position, std::int64_t offset) {
    const double rho = offset == 0 ? 0 : schedule_.correlation(offset + 1);
    const auto keep = static_cast<float>(rho);
    const auto fresh = static_cast<float>(std::sqrt(1 - rho * rho));
    const auto counter =
        static_cast<std::uint64_t>((position * shape_.index_heads + head_) * kDriftWidth);
    for (std::size_t c = 0; c < state_.size(); ++c) {
      state_[c] = keep * state_[c] + fresh * stream_.normal(counter + c);
    }
  }

  void store(const Tensor& index_q, const Tensor& head_weights, std::int64_t row) const {
    BFloat16* query =
        index_q.view().as<BFloat16>() + (row * shape_.index_heads + head_) * kIndexDim;
    for (std::size_t c = 0; c < kIndexDim; ++c) query[c] = BFloat16(state_[c]);
    const double scale = 1 / std::sqrt(static_cast<double>(shape_.index_heads * kIndexDim));
    head_weights.view().as<float>()[row * shape_.index_heads + head_] =
        static_cast<float>(scale) *
        (1 + static_cast<float>(DriftSchedule::kWeightDeviation) * state_[kIndexDim]);
  }

  const PackedLayout& layout_;
  const ModelShape& shape_;
  const DriftSchedule& schedule_;
  const RandomStream& stream_;
  std::int64_t head_;
  std::array<float, kDriftWidth> state_{};
};

void add_indexer(Batch& batch, const RowFill& queries, const RowFill& keys,
                 const BatchOptions& options) {
  const ModelShape& shape = batch.shape;
  const auto t_q = static_cast<std::int64_t>(queries.positions.size());
  const Tensor index_q = Tensor::host(DType::kBFloat16, {t_q, shape.index_heads, kIndexDim});
  const Tensor index_k = Tensor::host(DType::kBFloat16, {batch.layout.total_key_tokens, kIndexDim});
  const Tensor head_weights = Tensor::host(DType::kFloat32, {t_q, shape.index_heads});
  const DriftSchedule schedule(options.overlap, shape.topk);
  const RandomStream stream(options.seed, StreamId::kIndexQ);
  parallel_ranges(options.threads, shape.index_heads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin; head < end; ++head) {
      DriftingHead(batch.layout, shape, schedule, stream, head).write(index_q, head_weights);
    }
  });
  fill_padding_rows(index_q, queries);
  fill_padding_rows(head_weights, queries);
  fill_normal_rows(index_k, keys, RandomStream(options.seed, StreamId::kIndexK), 1);
  batch.tensors.insert(
      batch.tensors.end(),
      {{"index_q", index_q}, {"index_k", index_k}, {"head_weights", head_weights}});
}

void add_attention(Batch& batch, const RowFill& queries, const RowFill& keys,
                   const BatchOptions& options) {
  const ModelShape& shape = batch.shape;
  const auto t_q = static_cast<std::int64_t>(queries.positions.size());
  const Tensor q = Tensor::host(DType::kBFloat16, {t_q, shape.heads, shape.head_dim});
  const Tensor kv =
      Tensor::host(DType::kBFloat16, {batch.layout.total_key_tokens, 1, shape.head_dim});
  fill_normal_rows(q, queries, RandomStream(options.seed, StreamId::kQ), 1);
  fill_normal_rows(kv, keys, RandomStream(options.seed, StreamId::kKv), 1);
  batch.tensors.insert(batch.tensors.end(), {{"q", q}, {"kv", kv}});
}

Tensor int32_tensor(std::span<const std::int32_t> values) {
  const Tensor tensor = Tensor::host(DType::kInt32, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.view().as<std::int32_t>());
  return tensor;
}

// The mask of the local rows; the storage behind the last document's tokens is counted as its own,
// as packers do that pad the batch at its end.
void add_padding_mask(Batch& batch, std::vector<std::int32_t>& cu_seqlens) {
  const std::vector<RowPlace> places = query_places(batch.layout);
  const Tensor mask = Tensor::host(DType::kBool, {static_cast<std::int64_t>(places.size())});
  for (std::size_t row = 0; row < places.size(); ++row) {
    mask.view().as<std::uint8_t>()[row] = places[row].real ? 0 : 1;
  }
  batch.tensors.emplace_back("padding_mask", mask);
  const auto& padded = batch.layout.cu_seqlens_padded;
  const std::size_t last = cu_seqlens.size() - 1;
  cu_seqlens[last] = cu_seqlens[last - 1] + padded[last] - padded[last - 1];
}

}  // namespace

std::span<const std::string_view> preset_names() { return kPresets; }

ModelShape preset(std::string_view name) {
  ModelShape shape;
  shape.name = name;
  if (name == "glm5.2" || name == "glm5.2-tp8") {
    shape.heads = name == "glm5.2" ? 64 : 8;
    shape.index_heads = 32;
    shape.softmax_scale = 0.0625;  // (192 + 64)^-0.5
    shape.rope_base = 1e6;
  } else if (name == "deepseek-v3.2") {
    shape.heads = 128;
    shape.index_heads = 64;
    // (128 + 64)^-0.5 times the square of YaRN's 0.1 ln 40 + 1.
    constexpr double kYarn = 1.3688879454113936;
    shape.softmax_scale = kYarn * kYarn / std::sqrt(192.0);
    shape.rope_base = 1e4;
  } else {
    throw Error(ErrorCode::kValue,
                fmt::format("preset must be one of {}, got '{}'", fmt::join(kPresets, ", "), name));
  }
  return shape;
}

const Tensor& Batch::at(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const auto& entry) { return entry.first == name; });
  if (found == tensors.end()) {
    throw Error(ErrorCode::kInternal,
                fmt::format("{}:{}: the batch has no tensor {}", __FILE__, __LINE__, name));
  }
  return found->second;
}

void fill_padding_rows(const Tensor& tensor, const RowFill& fill) {
  const std::int64_t rows = tensor.view().shape[0];
  const std::int64_t width = rows == 0 ? 0 : tensor.view().elements() / rows;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (fill.places[static_cast<std::size_t>(row)].real) continue;
    if (tensor.view().dtype == DType::kBFloat16) {
      std::fill_n(tensor.view().as<BFloat16>() + row * width, width, BFloat16(fill.padding));
    } else {
      std::fill_n(tensor.view().as<float>() + row * width, width, fill.padding);
    }
  }
}

void fill_normal_rows(const Tensor& tensor, const RowFill& fill, const RandomStream& stream,
                      float scale) {
  const std::int64_t rows = tensor.view().shape[0];
  const std::int64_t width = rows == 0 ? 0 : tensor.view().elements() / rows;
  parallel_ranges(fill.threads, rows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const auto position = fill.positions[static_cast<std::size_t>(row)];
      const auto counter = static_cast<std::uint64_t>(position * width);
      BFloat16* values = tensor.view().as<BFloat16>() + row * width;
      for (std::int64_t c = 0; c < width; ++c) {
        values[c] = BFloat16(scale * stream.normal(counter + static_cast<std::uint64_t>(c)));
      }
    }
  });
  fill_padding_rows(tensor, fill);
}

Batch begin_batch(const ModelShape& shape, PackedLayout layout, const BatchOptions& options) {
  Batch batch;
  batch.shape = shape;
  batch.layout = std::move(layout);
  std::vector<std::int32_t> cu_seqlens = batch.layout.cu_seqlens;
  const bool padded = cu_seqlens != batch.layout.cu_seqlens_padded;
  if (options.padding_mask) add_padding_mask(batch, cu_seqlens);
  batch.tensors.emplace_back("cu_seqlens", int32_tensor(cu_seqlens));
  if (padded) {
    batch.tensors.emplace_back("cu_seqlens_padded", int32_tensor(batch.layout.cu_seqlens_padded));
  }
  if (!batch.layout.all_rows()) {
    batch.tensors.emplace_back("query_indices", int32_tensor(batch.layout.query_positions));
  }
  std::int64_t longest = 0;
  for (std::size_t d = 0; d + 1 < cu_seqlens.size(); ++d) {
    longest = std::max<std::int64_t>(longest, cu_seqlens[d + 1] - cu_seqlens[d]);
  }
  batch.metadata = {
      {"total_key_tokens", fmt::format("{}", batch.layout.total_key_tokens)},
      {"max_seqlen", fmt::format("{}", longest)},
      {"index_topk", fmt::format("{}", shape.topk)},
      {"softmax_scale", fmt::format("{}", shape.softmax_scale)},
      {"query_mode", options.general_queries ? "general" : "contiguous"},
      {"preset", shape.name},
      {"seed", fmt::format("{}", options.seed)},
  };
  return batch;
}

void add_gradient_and_sink(Batch& batch, const RowFill& queries, const BatchOptions& options) {
  const std::int64_t heads = batch.shape.heads;
  if (options.grad) {
    const auto t_q = static_cast<std::int64_t>(queries.positions.size());
    const Tensor grad_out = Tensor::host(DType::kBFloat16, {t_q, heads, kValueDim});
    fill_normal_rows(grad_out, queries, RandomStream(options.seed, StreamId::kGradOut), 0.0625f);
    batch.tensors.emplace_back("grad_out", grad_out);
  }
  if (options.sink) {
    const Tensor sink = Tensor::host(DType::kFloat32, {heads});
    const RandomStream stream(options.seed, StreamId::kSink);
    for (std::int64_t h = 0; h < heads; ++h) {
      sink.view().as<float>()[h] = stream.normal(static_cast<std::uint64_t>(h));
    }
    batch.tensors.emplace_back("attn_sink", sink);
  }
}

Batch random_batch(const ModelShape& shape, PackedLayout layout, const BatchOptions& options) {
  Batch batch = begin_batch(shape, std::move(layout), options);
  batch.metadata["overlap"] = fmt::format("{}", options.overlap);
  const std::vector<RowPlace> rows = query_places(batch.layout);
  const std::vector<RowPlace> storage = key_places(batch.layout);
  std::vector<std::int32_t> positions(storage.size());
  std::iota(positions.begin(), positions.end(), 0);
  const float padding = options.poison_padding ? std::numeric_limits<float>::quiet_NaN() : 0;
  const RowFill queries{batch.layout.query_positions, rows, padding, options.threads};
  const RowFill keys{positions, storage, padding, options.threads};
  if (options.indexer) add_indexer(batch, queries, keys, options);
  if (options.attention) add_attention(batch, queries, keys, options);
  add_gradient_and_sink(batch, queries, options);
  return batch;
}

}  // namespace flashdsa::tools
