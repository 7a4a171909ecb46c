#include "tools/workloads.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "flashdsa/error.h"
#include "flashdsa/indexer.h"
#include "tools/synth_fill.h"
#include "tools/synth_random.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kValueDim = 512;
constexpr float kInputScale = 0.0625f;
constexpr double kKeptShare = 0.9;  // of the predecessor's keys in drifting workloads
constexpr std::uint64_t kSftSeed = 7;
constexpr std::int64_t kTextTokens = 8192;

enum class Keys : std::uint8_t { kFull, kCausal };
enum class Picks : std::uint8_t { kIndependent, kDrifting, kIndexer };

struct Definition {
  std::string_view name;
  std::int64_t rows;  // T_q; 0: given by the request
  std::int64_t keys;  // T_k
  Keys visible;
  Picks picks;
};

constexpr std::array kDefinitions = {
    Definition{"random", 8192, 8192, Keys::kFull, Picks::kIndependent},
    Definition{"random32k", 32768, 32768, Keys::kFull, Picks::kIndependent},
    Definition{"drift90", 8192, 8192, Keys::kFull, Picks::kDrifting},
    Definition{"drift90-128k", 4096, 131072, Keys::kFull, Picks::kDrifting},
    Definition{"long32k", 32768, 32768, Keys::kCausal, Picks::kDrifting},
    Definition{"long128k", 4096, 131072, Keys::kCausal, Picks::kDrifting},
    Definition{"sft4k", 32768, 32768, Keys::kCausal, Picks::kDrifting},
    Definition{"text", kTextTokens, kTextTokens, Keys::kCausal, Picks::kIndexer},
    Definition{"single8k", 8192, 8192, Keys::kCausal, Picks::kDrifting},
    Definition{"single32k", 32768, 32768, Keys::kCausal, Picks::kDrifting},
    Definition{"custom", 0, 0, Keys::kFull, Picks::kIndependent},
};

constexpr auto kNames = [] {
  std::array<std::string_view, kDefinitions.size()> names{};
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = kDefinitions[i].name;
  return names;
}();

/// A selection that drifts from row to row: `kKeptShare` of the keys stay, the others are drawn
/// anew from all keys that did not stay.
class DriftingSelection {
 public:
  DriftingSelection(std::int64_t keys, std::int64_t topk, std::uint64_t seed)
      : topk_(topk), stream_(seed, StreamId::kSelection), chosen_(static_cast<std::size_t>(keys)) {}

  /// Selects all of [begin, end), which must hold at most K keys.
  void take_all(std::int64_t begin, std::int64_t end) {
    clear();
    for (std::int64_t key = begin; key < end; ++key) add(static_cast<std::int32_t>(key));
  }

  /// K keys of [begin, end), independent of the row before.
  void redraw(std::int64_t begin, std::int64_t end) {
    clear();
    draw(begin, end);
  }

  /// K keys of [begin, end) that share the kept ones with the row before.
  void drift(std::int64_t begin, std::int64_t end) {
    const auto kept = static_cast<std::size_t>(kKeptShare * static_cast<double>(topk_));
    while (keys_.size() > kept) {
      const auto slot = static_cast<std::size_t>(
          stream_.below(counter_++, static_cast<std::int64_t>(keys_.size())));
      chosen_[static_cast<std::size_t>(keys_[slot])] = 0;
      keys_[slot] = keys_.back();
      keys_.pop_back();
    }
    draw(begin, end);
  }

  /// Writes the keys, ascending, and -1 behind them; returns their number.
  std::int32_t write(std::int32_t* row) const {
    std::copy(keys_.begin(), keys_.end(), row);
    std::sort(row, row + keys_.size());
    std::fill(row + keys_.size(), row + topk_, -1);
    return static_cast<std::int32_t>(keys_.size());
  }

 private:
  void clear() {
    for (const std::int32_t key : keys_) chosen_[static_cast<std::size_t>(key)] = 0;
    keys_.clear();
  }

  void add(std::int32_t key) {
    chosen_[static_cast<std::size_t>(key)] = 1;
    keys_.push_back(key);
  }

  void draw(std::int64_t begin, std::int64_t end) {
    while (static_cast<std::int64_t>(keys_.size()) < topk_) {
      const auto key = static_cast<std::int32_t>(begin + stream_.below(counter_++, end - begin));
      if (chosen_[static_cast<std::size_t>(key)] == 0) add(key);
    }
  }

  std::int64_t topk_;
  RandomStream stream_;
  std::uint64_t counter_ = 0;
  std::vector<std::int32_t> keys_;    // in no order
  std::vector<std::uint8_t> chosen_;  // [T_k]
};

const Definition& find_definition(const WorkloadRequest& request) {
  const auto found =
      std::find_if(kDefinitions.begin(), kDefinitions.end(),
                   [&](const Definition& entry) { return entry.name == request.name; });
  if (found == kDefinitions.end()) {
    throw Error(ErrorCode::kValue, fmt::format("bench: --workload must be among {}, got '{}'",
                                               fmt::join(kNames, ", "), request.name));
  }
  if ((found->keys == 0) != (request.t_q > 0 && request.t_k > 0)) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: workload custom, and no other, must come with --t-q and --t-k, "
                            "got {} with --t-q {} and --t-k {} (0: absent)",
                            request.name, request.t_q, request.t_k));
  }
  if ((found->picks == Picks::kIndexer) != !request.texts.empty()) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: workload text, and no other, must come with --text, got {} "
                            "with {} files",
                            request.name, request.texts.size()));
  }
  return *found;
}

std::vector<std::int64_t> lengths_of(const Definition& definition, const WorkloadRequest& request,
                                     const std::vector<std::string>& texts) {
  if (definition.picks == Picks::kIndexer) {
    std::vector<std::int64_t> lengths;
    for (const std::string& text : texts) lengths.push_back(static_cast<std::int64_t>(text.size()));
    return lengths;
  }
  if (definition.name == "sft4k") return draw_lengths(definition.keys, 100, 4000, kSftSeed);
  return {definition.keys > 0 ? definition.keys : request.t_k};
}

// Rows that the benchmark runs: the last ones of the workload's own.
PackedLayout layout_of(const Definition& definition, const WorkloadRequest& request,
                       const std::vector<std::string>& texts) {
  PackedLayout layout = pack_documents(lengths_of(definition, request, texts), 1);
  std::int64_t rows = definition.rows > 0 ? definition.rows : request.t_q;
  rows = std::min(rows, layout.total_key_tokens);
  if (request.rows > 0) rows = std::min(rows, request.rows);
  auto& positions = layout.query_positions;
  positions.erase(positions.begin(), positions.end() - static_cast<std::ptrdiff_t>(rows));
  return layout;
}

Tensor int32_rows(std::int64_t rows) { return Tensor::host(DType::kInt32, {rows}); }

void fill_visible_ranges(Workload& workload, const PackedLayout& layout) {
  workload.starts = int32_rows(workload.t_q);
  workload.causal_lengths = int32_rows(workload.t_q);
  const std::vector<RowPlace> places = query_places(layout);
  for (std::size_t row = 0; row < places.size(); ++row) {
    const auto document = static_cast<std::size_t>(places[row].document);
    workload.starts.span<std::int32_t>()[row] = layout.cu_seqlens_padded[document];
    workload.causal_lengths.span<std::int32_t>()[row] =
        workload.causal ? static_cast<std::int32_t>(places[row].offset + 1)
                        : static_cast<std::int32_t>(layout.total_key_tokens);
  }
}

// One row's step of the drifting selection.
void advance(DriftingSelection& selection, Picks picks, std::int64_t begin, std::int64_t visible,
             std::int64_t topk, bool first) {
  if (visible <= topk) {
    selection.take_all(begin, begin + visible);
  } else if (first || picks == Picks::kIndependent) {
    selection.redraw(begin, begin + visible);
  } else {
    selection.drift(begin, begin + visible);
  }
}

// Walks every document from its start, so that a row's keys do not depend on how many rows are run.
void fill_selection(Workload& workload, const Definition& definition, const PackedLayout& layout,
                    std::uint64_t seed) {
  const std::int64_t topk = workload.shape.topk;
  DriftingSelection selection(workload.t_k, topk, seed);
  const auto& positions = layout.query_positions;
  auto* indices = workload.topk_indices->view().as<std::int32_t>();
  std::size_t row = 0;
  for (std::int64_t d = 0; d < layout.documents(); ++d) {
    const std::int64_t start = layout.cu_seqlens_padded[static_cast<std::size_t>(d)];
    const std::int64_t length = layout.length(d);
    if (positions[row] >= start + length) continue;
    for (std::int64_t offset = 0; offset < length; ++offset) {
      const std::int64_t visible = workload.causal ? offset + 1 : workload.t_k;
      advance(selection, definition.picks, start, visible, topk, offset == 0);
      if (start + offset != positions[row]) continue;
      workload.topk_length->span<std::int32_t>()[row] =
          selection.write(indices + static_cast<std::int64_t>(row) * topk);
      if (++row == positions.size()) return;
    }
  }
}

void select_by_indexer(Workload& workload, int threads) {
  IndexerTopkArgs args;
  args.index_q = *workload.index_q;
  args.index_k = *workload.index_k;
  args.head_weights = *workload.head_weights;
  args.starts = workload.starts;
  args.causal_lengths = workload.causal_lengths;
  args.topk_indices = *workload.topk_indices;
  args.topk_length = *workload.topk_length;
  Runtime runtime;
  runtime.threads = threads;
  indexer_topk(args, runtime);
}

void add_attention(Workload& workload, const Definition& definition, const PackedLayout& layout,
                   const WorkloadRequest& request) {
  const ModelShape& shape = workload.shape;
  const std::int64_t t_q = workload.t_q;
  workload.q = Tensor::host(DType::kBFloat16, {t_q, shape.heads, shape.head_dim});
  workload.kv = Tensor::host(DType::kBFloat16, {workload.t_k, 1, shape.head_dim});
  workload.grad_out = Tensor::host(DType::kBFloat16, {t_q, shape.heads, kValueDim});
  const std::vector<RowPlace> rows = query_places(layout);
  const std::vector<RowPlace> storage = key_places(layout);
  std::vector<std::int32_t> positions(storage.size());
  std::iota(positions.begin(), positions.end(), 0);
  const RowFill queries{layout.query_positions, rows, 0, request.threads};
  const RowFill keys{positions, storage, 0, request.threads};
  fill_normal_rows(*workload.q, queries, {request.seed, StreamId::kQ}, kInputScale);
  fill_normal_rows(*workload.kv, keys, {request.seed, StreamId::kKv}, kInputScale);
  fill_normal_rows(*workload.grad_out, queries, {request.seed, StreamId::kGradOut}, kInputScale);

  workload.topk_indices = Tensor::host(DType::kInt32, {t_q, 1, shape.topk});
  workload.topk_length = int32_rows(t_q);
  if (definition.picks == Picks::kIndexer) {
    select_by_indexer(workload, request.threads);
  } else {
    fill_selection(workload, definition, layout, request.seed);
  }
}

void add_indexer(Workload& workload, const Batch& batch) {
  workload.index_q = batch.at("index_q");
  workload.index_k = batch.at("index_k");
  workload.head_weights = batch.at("head_weights");
}

std::int64_t shared_keys(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::int64_t shared = 0;
  for (std::size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (a[i] == b[j]) ++shared;
    const bool step_a = a[i] <= b[j], step_b = b[j] <= a[i];
    i += step_a ? 1 : 0;
    j += step_b ? 1 : 0;
  }
  return shared;
}

}  // namespace

std::span<const std::string_view> workload_names() { return kNames; }

Workload make_workload(const WorkloadRequest& request) {
  const Definition& definition = find_definition(request);
  std::vector<std::string> texts;
  if (!request.texts.empty()) texts = read_texts(request.texts, kTextTokens);
  const PackedLayout layout = layout_of(definition, request, texts);

  BatchOptions options;
  options.seed = request.seed;
  options.overlap = definition.picks == Picks::kIndependent ? 0 : kKeptShare;
  options.attention = options.grad = false;
  options.indexer = request.indexer || definition.picks == Picks::kIndexer;
  options.threads = request.threads;
  const Batch batch = texts.empty() ? random_batch(request.shape, layout, options)
                                    : text_batch(request.shape, layout, texts, options);

  Workload workload;
  workload.name = request.name;
  workload.shape = request.shape;
  workload.t_q = static_cast<std::int64_t>(layout.query_positions.size());
  workload.t_k = layout.total_key_tokens;
  workload.causal = definition.visible == Keys::kCausal;
  if (!workload.causal && workload.t_k < workload.shape.topk) {
    throw Error(ErrorCode::kValue, fmt::format("bench: workload {} must have at least K = {} keys, "
                                               "got {}",
                                               workload.name, workload.shape.topk, workload.t_k));
  }
  workload.cu_seqlens = batch.at("cu_seqlens");
  if (!layout.all_rows()) workload.query_indices = batch.at("query_indices");
  fill_visible_ranges(workload, layout);
  if (options.indexer) add_indexer(workload, batch);
  if (request.attention) add_attention(workload, definition, layout, request);
  return workload;
}

std::int64_t count_picks(const Tensor& topk_length) {
  const auto lengths = topk_length.span<std::int32_t>();
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

std::int64_t count_scored_pairs(const Workload& workload) {
  std::int64_t pairs = 0;
  for (const std::int32_t length : workload.causal_lengths.span<std::int32_t>()) {
    if (length > workload.shape.topk) pairs += length;
  }
  return pairs;
}

std::optional<double> neighbour_overlap(const Workload& workload, const Tensor& topk_indices) {
  const std::int64_t topk = workload.shape.topk;
  const auto starts = workload.starts.span<std::int32_t>();
  const auto lengths = workload.causal_lengths.span<std::int32_t>();
  const auto row_of = [&](std::size_t row) {
    return topk_indices.span<std::int32_t>().subspan(row * static_cast<std::size_t>(topk),
                                                     static_cast<std::size_t>(topk));
  };
  std::int64_t shared = 0, pairs = 0;
  for (std::size_t row = 1; row < starts.size(); ++row) {
    const bool counts = starts[row] == starts[row - 1] && lengths[row - 1] > topk;
    if (!counts) continue;
    shared += shared_keys(row_of(row - 1), row_of(row));
    ++pairs;
  }
  if (pairs == 0) return std::nullopt;
  return static_cast<double>(shared) / static_cast<double>(pairs * topk);
}

}  // namespace flashdsa::tools
