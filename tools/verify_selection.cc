#include "tools/verify_selection.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/numbers.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kBlockBytes = std::int64_t{64} << 20;  // FP64 queries and scores of a block
constexpr std::int64_t kMaxBlockRows = 4096;

// The rows [begin, end) and the reference's answer for them. Keys are counted from first_key.
struct Block {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t first_key = 0;
  std::vector<double> index_q;
  std::vector<double> index_k;
  std::vector<double> weights;
  Selection best;
};

class SelectionVerifier {
 public:
  SelectionVerifier(const IndexerTensors& tensors, const PackedMetadata& metadata,
                    const Selection& selection, const Runtime& runtime)
      : tensors_(tensors),
        selection_(selection),
        starts_(metadata.starts.span<std::int32_t>()),
        visible_(metadata.causal_lengths.span<std::int32_t>()),
        topk_(selection.topk_indices.view().shape[2]),
        index_heads_(tensors.index_q.view().shape[1]),
        channels_(tensors.index_q.view().shape[2]),
        runtime_(runtime) {}

  void verify(ErrorTable& table) {
    const auto rows = static_cast<std::int64_t>(starts_.size());
    const std::int64_t step = rows_per_block();
    if (runtime_.progress != nullptr) runtime_.progress->total = rows;
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      const Block block = solve(begin, std::min(begin + step, rows));
      for (std::int64_t row = block.begin; row < block.end; ++row) judge_row(block, row);
      if (runtime_.progress != nullptr) runtime_.progress->done = block.end;
    }
    report(table);
  }

 private:
  std::int64_t rows_per_block() const {
    const std::int64_t row_bytes = 8 * (index_heads_ * channels_ + 2 * topk_);
    return std::clamp<std::int64_t>(kBlockBytes / row_bytes, 1, kMaxBlockRows);
  }

  Block solve(std::int64_t begin, std::int64_t end) const {
    Block block{begin, end, 0, {}, {}, {}, {}};
    std::int64_t last_key = 0;
    block.first_key = tensors_.index_k.view().shape[0];
    for (std::int64_t row = begin; row < end; ++row) {
      if (visible(row) == 0) continue;
      block.first_key = std::min(block.first_key, start(row));
      last_key = std::max(last_key, start(row) + visible(row));
    }
    block.first_key = std::min(block.first_key, last_key);
    block.index_q = to_double(tensors_.index_q, begin, end);
    block.index_k = to_double(tensors_.index_k, block.first_key, last_key);
    block.weights = to_double(tensors_.head_weights, begin, end);
    block.best = reference_selection(block, last_key - block.first_key);
    return block;
  }

  Selection reference_selection(Block& block, std::int64_t keys) const {
    const std::int64_t rows = block.end - block.begin;
    const Tensor starts = Tensor::host(DType::kInt32, {rows});
    const Tensor visible_keys = Tensor::host(DType::kInt32, {rows});
    for (std::int64_t row = block.begin; row < block.end; ++row) {
      const auto i = static_cast<std::size_t>(row - block.begin);
      const bool is_empty = visible(row) == 0;
      starts.span<std::int32_t>()[i] =
          is_empty ? 0 : static_cast<std::int32_t>(start(row) - block.first_key);
      visible_keys.span<std::int32_t>()[i] = static_cast<std::int32_t>(visible(row));
    }
    Selection best;
    best.topk_indices = Tensor::host(DType::kInt32, {rows, 1, topk_});
    if (selection_.topk_scores) best.topk_scores = Tensor::host(DType::kFloat64, {rows, topk_});
    IndexerTopkArgs args;
    args.index_q = TensorView::contiguous(block.index_q.data(), DType::kFloat64,
                                          {rows, index_heads_, channels_});
    args.index_k = TensorView::contiguous(block.index_k.data(), DType::kFloat64, {keys, channels_});
    args.head_weights =
        TensorView::contiguous(block.weights.data(), DType::kFloat64, {rows, index_heads_});
    args.starts = starts;
    args.causal_lengths = visible_keys;
    args.topk_indices = best.topk_indices;
    if (best.topk_scores) args.topk_scores = best.topk_scores->view();
    Runtime reference = runtime_;
    reference.backend = Backend::kReference;
    reference.progress = nullptr;
    reference.usage = nullptr;
    indexer_topk(args, reference);
    return best;
  }

  void judge_row(const Block& block, std::int64_t row) {
    const std::int64_t count = std::min(topk_, visible(row));
    const auto slots = indices(selection_, row);
    if (selection_.topk_length->span<std::int32_t>()[static_cast<std::size_t>(row)] != count) {
      ++wrong_lengths_;
    }
    if (!has_form(row, slots, count)) {
      ++out_of_form_;
      return;
    }
    std::vector<std::int32_t> mine;  // positions among the row's visible keys
    for (const std::int32_t key : slots.first(static_cast<std::size_t>(count))) {
      mine.push_back(static_cast<std::int32_t>(key - start(row)));
    }
    std::vector<std::int32_t> best;
    for (const std::int32_t key :
         indices(block.best, row - block.begin).first(static_cast<std::size_t>(count))) {
      best.push_back(static_cast<std::int32_t>(key + block.first_key - start(row)));
    }
    const std::string wrong = judge_choice(score_row(block, row), mine, best);
    if (!wrong.empty() && wrong_choices_++ == 0) {
      first_wrong_choice_ = fmt::format("row {}: {}", row, wrong);
    }
    if (selection_.topk_scores) judge_scores(block, row, mine, best);
  }

  // SPEC section 3: `count` visible keys, strictly ascending, then -1.
  bool has_form(std::int64_t row, std::span<const std::int32_t> slots, std::int64_t count) const {
    std::int64_t previous = start(row) - 1;
    for (std::int64_t j = 0; j < topk_; ++j) {
      const std::int32_t key = slots[static_cast<std::size_t>(j)];
      if (j >= count) {
        if (key != -1) return false;
        continue;
      }
      if (key <= previous || key >= start(row) + visible(row)) return false;
      previous = key;
    }
    return true;
  }

  void judge_scores(const Block& block, std::int64_t row, const std::vector<std::int32_t>& mine,
                    const std::vector<std::int32_t>& best) {
    const std::vector<double> got = to_double(*selection_.topk_scores, row, row + 1);
    const std::vector<double> ideal_scores =
        to_double(*block.best.topk_scores, row - block.begin, row - block.begin + 1);
    const ScoreRow inputs = score_row(block, row);
    const bool same_keys = mine == best;
    const std::vector<double> all = same_keys ? std::vector<double>() : exact_scores(inputs);
    double error = 0, largest = 0;
    bool special_wrong = false;
    for (std::size_t j = 0; j < got.size(); ++j) {
      if (j >= mine.size()) {
        special_wrong = special_wrong || !(std::isinf(got[j]) && got[j] < 0);
        continue;
      }
      const double ideal = same_keys ? ideal_scores[j] : all[static_cast<std::size_t>(mine[j])];
      if (!std::isfinite(ideal) || !std::isfinite(got[j])) {
        const bool same = std::isnan(ideal) ? std::isnan(got[j]) : ideal == got[j];
        special_wrong = special_wrong || !same;
        continue;
      }
      error = std::max(error, std::abs(got[j] - ideal));
      largest = std::max(largest, std::abs(ideal));
    }
    if (error > 0 && scores_are_exact(inputs)) special_wrong = true;
    wrong_scores_ += special_wrong ? 1 : 0;
    if (error == 0) return;
    double allowed = kScoreError * largest;  // no more than score_slack(), which costs more
    if (error > allowed) allowed = score_slack(inputs);
    worst_score_ratio_ = std::max(worst_score_ratio_, allowed > 0 ? error / allowed : INFINITY);
  }

  void report(ErrorTable& table) const {
    const auto count = [&](const char* tensor, const char* what, std::int64_t got) {
      table.add(tensor, what, fmt::format("{}", got), "0", got == 0);
    };
    count("topk_length", "rows that differ", wrong_lengths_);
    count("topk_indices", "rows out of form", out_of_form_);
    table.add("topk_indices", "rows with a wrong choice",
              wrong_choices_ == 0
                  ? "0"
                  : fmt::format("{}, first {}", wrong_choices_, first_wrong_choice_),
              "0", wrong_choices_ == 0);
    if (!selection_.topk_scores) return;
    table.add("topk_scores", "error over the allowed error",
              fmt::format("{:.3g}", worst_score_ratio_), "1", worst_score_ratio_ <= 1);
    count("topk_scores", "rows with wrong exact or special values", wrong_scores_);
  }

  ScoreRow score_row(const Block& block, std::int64_t row) const {
    const auto i = static_cast<std::size_t>(row - block.begin);
    const auto heads = static_cast<std::size_t>(index_heads_);
    const auto channels = static_cast<std::size_t>(channels_);
    const auto first =
        static_cast<std::size_t>(visible(row) == 0 ? 0 : start(row) - block.first_key);
    return {std::span(block.index_q).subspan(i * heads * channels, heads * channels),
            std::span(block.weights).subspan(i * heads, heads),
            std::span(block.index_k)
                .subspan(first * channels, static_cast<std::size_t>(visible(row)) * channels)};
  }

  std::span<const std::int32_t> indices(const Selection& selection, std::int64_t row) const {
    return selection.topk_indices.span<const std::int32_t>().subspan(
        static_cast<std::size_t>(row * topk_), static_cast<std::size_t>(topk_));
  }

  std::int64_t start(std::int64_t row) const { return starts_[static_cast<std::size_t>(row)]; }
  std::int64_t visible(std::int64_t row) const { return visible_[static_cast<std::size_t>(row)]; }

  const IndexerTensors& tensors_;
  const Selection& selection_;
  std::span<const std::int32_t> starts_;
  std::span<const std::int32_t> visible_;
  std::int64_t topk_;
  std::int64_t index_heads_;
  std::int64_t channels_;
  const Runtime& runtime_;

  std::int64_t wrong_lengths_ = 0;
  std::int64_t out_of_form_ = 0;
  std::int64_t wrong_choices_ = 0;
  std::string first_wrong_choice_;
  std::int64_t wrong_scores_ = 0;
  double worst_score_ratio_ = 0;
};

}  // namespace

void verify_selection(ErrorTable& table, const IndexerTensors& tensors,
                      const PackedMetadata& metadata, const Selection& selection,
                      const Runtime& runtime) {
  SelectionVerifier(tensors, metadata, selection, runtime).verify(table);
}

}  // namespace flashdsa::tools
