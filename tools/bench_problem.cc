#include "tools/bench_problem.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "flashdsa/error.h"
#include "tools/synth_batch.h"
#include "tools/synth_random.h"

namespace flashdsa::tools {
namespace {

constexpr float kScale = 1.0f / 16;    // of q, kv and grad_out
constexpr double kKept = 0.9;          // share of its predecessor's keys that a drifting row keeps
constexpr std::uint64_t kSftSeed = 7;  // of the document lengths of sft4k

enum class Keys : std::uint8_t {
  kIndependent,  // every row draws from all T_k keys
  kDrift,        // likewise, keeping most of its predecessor's
  kCausal,       // a row sees its document up to itself; rows with more than K keys drift
};

struct Workload {
  std::string_view name;
  std::int64_t t_q;
  std::int64_t t_k;
  Keys keys;
};

constexpr std::array kWorkloads = {
    Workload{"random", 8192, 8192, Keys::kIndependent},
    Workload{"random32k", 32768, 32768, Keys::kIndependent},
    Workload{"drift90", 8192, 8192, Keys::kDrift},
    Workload{"drift90-128k", 4096, 131072, Keys::kDrift},
    Workload{"long32k", 32768, 32768, Keys::kCausal},
    Workload{"long128k", 4096, 131072, Keys::kCausal},
    Workload{"sft4k", 32768, 32768, Keys::kCausal},
    Workload{"single8k", 8192, 8192, Keys::kCausal},
    Workload{"single32k", 32768, 32768, Keys::kCausal},
    Workload{"text", 8192, 8192, Keys::kCausal},
};

constexpr auto kNames = [] {
  std::array<std::string_view, kWorkloads.size()> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kWorkloads[i].name;
  return names;
}();

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorCode::kValue, "bench: " + sentence);
}

const Workload& find_workload(std::string_view name) {
  for (const Workload& workload : kWorkloads) {
    if (workload.name == name) return workload;
  }
  refuse(fmt::format("--workload must be one of {}, got {}", fmt::join(kNames, ", "), name));
}

Tensor normal_tensor(std::initializer_list<std::int64_t> shape, const RandomStream& stream,
                     float scale, int threads) {
  Tensor tensor = Tensor::host(DType::kBFloat16, shape);
  const auto values = tensor.span<BFloat16>();
  parallel_ranges(threads, std::ssize(values), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      values[static_cast<std::size_t>(i)] =
          BFloat16(scale * stream.normal(static_cast<std::uint64_t>(i)));
    }
  });
  return tensor;
}

// A sequence of uniform numbers.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : stream_(seed, StreamId::kSelection) {}
  std::int64_t below(std::int64_t bound) { return stream_.below(counter_++, bound); }

 private:
  RandomStream stream_;
  std::uint64_t counter_ = 0;
};

// The keys of one row after the other.
class RowSampler {
 public:
  RowSampler(std::int64_t t_k, std::uint64_t seed)
      : chosen_(static_cast<std::size_t>(t_k)), dice_(seed) {}

  // min(count, size) distinct keys of [begin, begin + size), ascending. When `keep` is above 0, that
  // many of the previous row's keys stay, as far as they lie in the range.
  const std::vector<std::int32_t>& next(std::int64_t begin, std::int64_t size, std::int64_t count,
                                        std::int64_t keep) {
    std::vector<std::int32_t> kept;
    for (const std::int32_t key : keys_) {
      if (key >= begin && key < begin + size) kept.push_back(key);
    }
    while (std::ssize(kept) > std::min(keep, count)) {  // a uniform choice of those that go
      kept[static_cast<std::size_t>(dice_.below(std::ssize(kept)))] = kept.back();
      kept.pop_back();
    }
    for (const std::int32_t key : kept) chosen_[static_cast<std::size_t>(key)] = true;
    const std::int64_t wanted = std::min(count, size);
    while (std::ssize(kept) < wanted && wanted < size) {
      const auto key = static_cast<std::int32_t>(begin + dice_.below(size));
      if (chosen_[static_cast<std::size_t>(key)]) continue;
      chosen_[static_cast<std::size_t>(key)] = true;
      kept.push_back(key);
    }
    for (const std::int32_t key : kept) chosen_[static_cast<std::size_t>(key)] = false;
    if (wanted == size) {
      kept.resize(static_cast<std::size_t>(size));
      std::iota(kept.begin(), kept.end(), static_cast<std::int32_t>(begin));
    }
    std::sort(kept.begin(), kept.end());
    keys_ = std::move(kept);
    return keys_;
  }

 private:
  std::vector<bool> chosen_;
  std::vector<std::int32_t> keys_;
  Dice dice_;
};

// Packed rows: the last t_q positions of documents that fill t_k.
void lay_out(BenchProblem& problem, std::string_view workload) {
  const BenchShape& shape = problem.shape;
  std::vector<std::int64_t> lengths = {shape.t_k};
  if (workload == "sft4k") lengths = draw_lengths(shape.t_k, 100, 4000, kSftSeed);
  problem.cu_seqlens = {0};
  for (const std::int64_t length : lengths) {
    problem.cu_seqlens.push_back(problem.cu_seqlens.back() + static_cast<std::int32_t>(length));
  }
  problem.positions.resize(static_cast<std::size_t>(shape.t_q));
  std::iota(problem.positions.begin(), problem.positions.end(),
            static_cast<std::int32_t>(shape.t_k - shape.t_q));
  PackedMetadataArgs args;
  args.cu_seqlens = TensorView::contiguous(problem.cu_seqlens.data(), DType::kInt32,
                                           {std::ssize(problem.cu_seqlens)});
  args.total_key_tokens = shape.t_k;
  args.query_indices =
      TensorView::contiguous(problem.positions.data(), DType::kInt32, {shape.t_q});
  problem.metadata = prepare_packed_metadata(args);
}

void draw_selection(BenchProblem& problem, Keys keys, std::uint64_t seed) {
  const BenchShape& shape = problem.shape;
  Selection& selection = problem.attention.selection;
  selection.topk_indices = Tensor::host(DType::kInt32, {shape.t_q, 1, shape.topk});
  selection.topk_length = Tensor::host(DType::kInt32, {shape.t_q});
  const auto starts = problem.metadata.starts.span<std::int32_t>();
  const auto visible = problem.metadata.causal_lengths.span<std::int32_t>();
  const std::int64_t keep =
      keys == Keys::kIndependent ? 0
                                 : static_cast<std::int64_t>(kKept * static_cast<double>(shape.topk));
  RowSampler sampler(shape.t_k, seed);
  auto slot = selection.topk_indices.span<std::int32_t>().begin();
  for (std::size_t t = 0; t < visible.size(); ++t) {
    if (keys != Keys::kCausal) {
      starts[t] = 0;
      visible[t] = static_cast<std::int32_t>(shape.t_k);
    }
    const auto& row = sampler.next(starts[t], visible[t], shape.topk, keep);
    std::fill(std::copy(row.begin(), row.end(), slot), slot + shape.topk, -1);
    slot += shape.topk;
    selection.topk_length->span<std::int32_t>()[t] = static_cast<std::int32_t>(row.size());
  }
}

void count(BenchProblem& problem) {
  for (const std::int32_t visible : problem.metadata.causal_lengths.span<std::int32_t>()) {
    problem.picks += std::min<std::int64_t>(visible, problem.shape.topk);
    if (visible > problem.shape.topk) problem.scored_pairs += visible;
  }
}

// Inputs of normal random numbers.
void fill_random(BenchProblem& problem, const BenchOptions& options, const BenchNeeds& needs,
                 int threads) {
  const BenchShape& s = problem.shape;
  const auto stream = [&](StreamId id) { return RandomStream(options.seed, id); };
  if (needs.attention) {
    AttentionTensors& a = problem.attention;
    a.q = normal_tensor({s.t_q, s.heads, s.head_dim}, stream(StreamId::kQ), kScale, threads);
    a.kv = normal_tensor({s.t_k, 1, s.head_dim}, stream(StreamId::kKv), kScale, threads);
    a.grad_out = normal_tensor({s.t_q, s.heads, 512}, stream(StreamId::kGradOut), kScale, threads);
  }
  if (needs.indexer) {
    IndexerTensors& i = problem.indexer;
    i.index_q = normal_tensor({s.t_q, s.index_heads, 128}, stream(StreamId::kIndexQ), 1, threads);
    i.index_k = normal_tensor({s.t_k, 128}, stream(StreamId::kIndexK), 1, threads);
    i.head_weights = normal_tensor({s.t_q, s.index_heads}, stream(StreamId::kHeadWeights), 1, 1);
  }
}

// Real text, and the selection that the indexer makes of it.
BenchProblem text_problem(BenchProblem problem, const BenchOptions& options,
                          const Runtime& runtime) {
  if (options.texts.empty()) refuse("workload text needs --text FILE..., got none");
  BenchShape& shape = problem.shape;
  ModelShape model = preset(preset_names().front());
  model.heads = shape.heads;
  model.index_heads = shape.index_heads;
  model.head_dim = shape.head_dim;
  model.topk = shape.topk;
  const std::vector<std::string> texts = read_texts(options.texts, shape.t_k);
  std::vector<std::int64_t> lengths;
  for (const std::string& text : texts) lengths.push_back(std::ssize(text));
  BatchOptions batch_options;
  batch_options.seed = options.seed;
  batch_options.threads = runtime.threads;
  const Batch batch = text_batch(model, pack_documents(lengths, 1), texts, batch_options);
  shape.t_k = batch.layout.total_key_tokens;
  shape.t_q = shape.t_k;
  problem.cu_seqlens = batch.layout.cu_seqlens;
  problem.positions = batch.layout.query_positions;
  PackedMetadataArgs args;
  args.cu_seqlens = batch.at("cu_seqlens");
  args.total_key_tokens = shape.t_k;
  problem.metadata = prepare_packed_metadata(args);
  problem.indexer = {batch.at("index_q"), batch.at("index_k"), batch.at("head_weights")};
  AttentionTensors& attention = problem.attention;
  attention.q = batch.at("q");
  attention.kv = batch.at("kv");
  attention.grad_out = batch.at("grad_out");
  attention.selection =
      select_keys(problem.indexer, problem.metadata, shape.topk, /*scores=*/false, runtime);
  return problem;
}

// Rows of the first axis of a tensor.
Tensor take_rows(const Tensor& tensor, std::span<const std::int64_t> rows) {
  TensorView view = tensor.view();
  view.shape[0] = std::ssize(rows);
  Tensor taken = Tensor::host(
      view.dtype, std::span(view.shape.data(), static_cast<std::size_t>(view.rank)));
  if (rows.empty()) return taken;
  const std::size_t bytes = taken.view().bytes() / rows.size();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(taken.view().as<std::byte>() + i * bytes,
                tensor.view().as<std::byte>() + static_cast<std::size_t>(rows[i]) * bytes, bytes);
  }
  return taken;
}

// The sampled rows' keys alone, indices renumbered.
AttentionTensors sample_attention(const BenchProblem& problem, std::span<const std::int64_t> rows) {
  const AttentionTensors& from = problem.attention;
  AttentionTensors sample;
  sample.softmax_scale = from.softmax_scale;
  sample.q = take_rows(from.q, rows);
  sample.grad_out = take_rows(*from.grad_out, rows);
  sample.selection.topk_indices = take_rows(from.selection.topk_indices, rows);
  sample.selection.topk_length = take_rows(*from.selection.topk_length, rows);
  const auto slots = sample.selection.topk_indices.span<std::int32_t>();
  std::vector<std::int64_t> keys(slots.begin(), slots.end());
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  if (!keys.empty() && keys.front() < 0) keys.erase(keys.begin());
  for (std::int32_t& slot : slots) {
    if (slot < 0) continue;
    slot = static_cast<std::int32_t>(std::lower_bound(keys.begin(), keys.end(), slot) -
                                     keys.begin());
  }
  sample.kv = take_rows(from.kv, keys);
  return sample;
}

}  // namespace

std::span<const std::string_view> workload_names() { return kNames; }

BenchProblem make_bench_problem(const BenchOptions& options, const BenchNeeds& needs,
                                const Runtime& runtime) {
  const Workload& workload = find_workload(options.workload);
  BenchProblem problem;
  problem.workload = options.workload;
  problem.shape = options.shape;
  BenchShape& shape = problem.shape;
  if (shape.t_k == 0) shape.t_k = workload.t_k;
  if (shape.t_q == 0) shape.t_q = std::min(workload.t_q, shape.t_k);
  if (options.rows > 0) shape.t_q = std::min(shape.t_q, options.rows);
  if (shape.t_q > shape.t_k) {
    refuse(fmt::format("--t-q must be at most T_k = {}, got {}", shape.t_k, shape.t_q));
  }
  problem.attention.softmax_scale = 1.0 / 16;
  if (workload.name == "text") {
    problem = text_problem(std::move(problem), options, runtime);
  } else {
    lay_out(problem, workload.name);
    draw_selection(problem, workload.keys, options.seed);
    fill_random(problem, options, needs, runtime.threads);
  }
  count(problem);
  return problem;
}

BenchProblem sample_rows(const BenchProblem& problem, std::span<const std::int64_t> rows,
                         const BenchNeeds& needs) {
  BenchProblem sample;
  sample.workload = problem.workload;
  sample.shape = problem.shape;
  sample.shape.t_q = std::ssize(rows);
  sample.metadata.starts = take_rows(problem.metadata.starts, rows);
  sample.metadata.causal_lengths = take_rows(problem.metadata.causal_lengths, rows);
  sample.metadata.total_key_tokens = problem.metadata.total_key_tokens;
  if (needs.attention) sample.attention = sample_attention(problem, rows);
  if (needs.indexer) {
    sample.indexer = {take_rows(problem.indexer.index_q, rows), problem.indexer.index_k,
                      take_rows(problem.indexer.head_weights, rows)};
  }
  count(sample);
  return sample;
}

}  // namespace flashdsa::tools
