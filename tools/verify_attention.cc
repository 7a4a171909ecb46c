#include "tools/verify_attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/attention_floors.h"
#include "tools/numbers.h"
#include "tools/parallel.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kValueDim = 512;
constexpr std::int64_t kMaxBlockRows = 1024;

// A range of query rows, the keys they count and the reference's FP64 answer.
struct Block {
  std::int64_t begin = 0;
  std::int64_t rows = 0;
  bool is_solved = false;
  std::vector<std::int32_t> keys;  // storage rows that the block counts, ascending: U of them
  std::vector<std::vector<std::int32_t>> slots;  // of each row: positions in keys, in slot order
  std::vector<double> q;                         // [rows, H, D]
  std::vector<double> kv;                        // [U, D]
  std::vector<double> grad_out;                  // [rows, H, 512], or empty
  std::vector<double> out;                       // [rows, H, 512]
  std::vector<double> lse;                       // [rows, H]
  std::vector<double> max_logits;
  std::vector<double> grad_q;           // [rows, H, D]
  std::vector<double> grad_kv;          // [U, D]
  std::vector<double> grad_attn_sink;   // [H]
  std::vector<AttentionFloors> floors;  // of each row; empty for rows without keys
};

// The storage rows [begin, end) and what the reference adds up for them.
struct KeyRange {
  KeyRange(std::int64_t first, std::int64_t last, std::int64_t head_dim)
      : begin(first),
        end(last),
        grad_kv(static_cast<std::size_t>((last - first) * head_dim)),
        absolute(grad_kv.size()),
        rounded(static_cast<std::size_t>(last - first)),
        selected(rounded.size(), false) {}

  std::int64_t begin;
  std::int64_t end;
  std::vector<double> grad_kv;   // [keys, D]
  std::vector<double> absolute;  // [keys, D], absolute terms
  std::vector<double> rounded;   // [keys], squares
  std::vector<bool> selected;    // [keys]
};

class AttentionVerifier {
 public:
  AttentionVerifier(const AttentionTensors& tensors, const AttentionResults& results, bool tight,
                    const Runtime& runtime, const VerifyBudget& budget)
      : tensors_(tensors),
        results_(results),
        runtime_(runtime),
        budget_(budget),
        threads_(runtime.threads > 0 ? runtime.threads : hardware_threads()),
        t_q_(tensors.q.view().shape[0]),
        heads_(tensors.q.view().shape[1]),
        head_dim_(tensors.q.view().shape[2]),
        t_k_(tensors.kv.view().shape[0]),
        topk_(tensors.selection.topk_indices.view().shape[2]),
        lse_("lse", tight),
        max_logits_("max_logits", tight) {
    if (tensors.attn_sink) attn_sink_ = to_double(*tensors.attn_sink, 0, heads_);
    grad_attn_sink_.resize(attn_sink_.size());
  }

  void verify(ErrorTable& table) {
    const std::int64_t key_bytes = 2 * 8 * head_dim_;  // of grad_kv and of its allowance
    const std::int64_t step = std::max<std::int64_t>(budget_.key_bytes / key_bytes, 1);
    std::int64_t passes = 1;
    if (has_backward()) passes = std::max<std::int64_t>((t_k_ + step - 1) / step, 1);
    if (runtime_.progress != nullptr) runtime_.progress->total = passes * t_q_;
    for (std::int64_t pass = 0; pass < passes; ++pass) {
      run_pass(pass * step, std::min((pass + 1) * step, t_k_), pass == 0);
    }
    report(table);
  }

 private:
  bool has_backward() const { return results_.grad_q.has_value(); }

  // Solves every block of rows, one on each thread at a time; judges the rows' own results in the
  // first pass, and the gradients of the keys [key_begin, key_end).
  void run_pass(std::int64_t key_begin, std::int64_t key_end, bool is_first) {
    KeyRange range(key_begin, has_backward() ? key_end : key_begin, head_dim_);
    const std::int64_t step = rows_per_block();
    std::vector<Block> blocks;
    for (std::int64_t first = 0; first < t_q_; first += step * threads_) {
      blocks.clear();
      blocks.resize(static_cast<std::size_t>(
          std::min<std::int64_t>(threads_, (t_q_ - first + step - 1) / step)));
      parallel_for(threads_, static_cast<std::int64_t>(blocks.size()), [&](std::int64_t i) {
        const std::int64_t begin = first + i * step;
        Block& block = blocks[static_cast<std::size_t>(i)];
        block = gather(begin, std::min(step, t_q_ - begin));
        if (is_first || touches(block, range)) solve(block);
      });
      for (const Block& block : blocks) {
        if (is_first) judge_rows(block);
        if (has_backward() && block.is_solved) accumulate(block, range);
        if (runtime_.progress != nullptr) runtime_.progress->done += block.rows;
      }
    }
    if (has_backward()) judge_keys(range);
  }

  std::int64_t rows_per_block() const {
    const std::int64_t row_doubles =
        2 * topk_ * head_dim_ + heads_ * (2 * head_dim_ + 3 * kValueDim + topk_);
    const std::int64_t block_bytes = budget_.block_bytes / threads_;
    return std::clamp<std::int64_t>(block_bytes / (8 * row_doubles), 1, kMaxBlockRows);
  }

  // SPEC section 5: the slots of a row that count.
  std::vector<std::int32_t> counted_slots(std::int64_t row) const {
    const auto& selection = tensors_.selection;
    const auto slots = selection.topk_indices.span<std::int32_t>().subspan(
        static_cast<std::size_t>(row * topk_), static_cast<std::size_t>(topk_));
    std::int64_t length = topk_;
    if (selection.topk_length) {
      length = selection.topk_length->span<std::int32_t>()[static_cast<std::size_t>(row)];
      length = std::clamp<std::int64_t>(length, 0, topk_);
    }
    std::vector<std::int32_t> counted;
    for (const std::int32_t key : slots.first(static_cast<std::size_t>(length))) {
      if (key >= 0 && key < t_k_) counted.push_back(key);
    }
    return counted;
  }

  // The block's keys, once each, and every row's slots as positions among them.
  Block gather(std::int64_t begin, std::int64_t rows) const {
    Block block;
    block.begin = begin;
    block.rows = rows;
    for (std::int64_t row = begin; row < begin + rows; ++row) {
      block.slots.push_back(counted_slots(row));
      block.keys.insert(block.keys.end(), block.slots.back().begin(), block.slots.back().end());
    }
    std::sort(block.keys.begin(), block.keys.end());
    block.keys.erase(std::unique(block.keys.begin(), block.keys.end()), block.keys.end());
    for (auto& slots : block.slots) {
      for (std::int32_t& slot : slots) {
        slot = static_cast<std::int32_t>(
            std::lower_bound(block.keys.begin(), block.keys.end(), slot) - block.keys.begin());
      }
    }
    return block;
  }

  static bool touches(const Block& block, const KeyRange& range) {
    const auto first = std::lower_bound(block.keys.begin(), block.keys.end(), range.begin);
    return first != block.keys.end() && *first < range.end;
  }

  void solve(Block& block) const {
    const auto row_heads = static_cast<std::size_t>(block.rows * heads_);
    const auto dim = static_cast<std::size_t>(head_dim_);
    block.q = to_double(tensors_.q, block.begin, block.begin + block.rows);
    block.kv.resize(block.keys.size() * dim);
    for (std::size_t i = 0; i < block.keys.size(); ++i) {
      copy_row(tensors_.kv, block.keys[i], block.kv.data() + i * dim);
    }
    block.out.resize(row_heads * kValueDim);
    block.lse.resize(row_heads);
    block.max_logits.resize(row_heads);
    if (has_backward()) {
      block.grad_out = to_double(*tensors_.grad_out, block.begin, block.begin + block.rows);
      block.grad_q.resize(block.q.size());
      block.grad_kv.resize(block.kv.size());
      block.grad_attn_sink.resize(attn_sink_.size());
    }
    call_reference(block);
    find_floors(block);
    block.is_solved = true;
  }

  void call_reference(Block& block) const {
    Runtime reference;
    reference.backend = Backend::kReference;
    reference.threads = 1;  // every thread has a block of its own
    const auto keys = static_cast<std::int64_t>(block.keys.size());
    const auto view = [](std::vector<double>& values, std::initializer_list<std::int64_t> shape) {
      return TensorView::contiguous(values.data(), DType::kFloat64, shape);
    };
    const Tensor indices = Tensor::host(DType::kInt32, {block.rows, 1, topk_});
    std::fill_n(indices.view().as<std::int32_t>(), indices.view().elements(), -1);
    for (std::size_t row = 0; row < block.slots.size(); ++row) {
      std::copy(block.slots[row].begin(), block.slots[row].end(),
                indices.view().as<std::int32_t>() + static_cast<std::int64_t>(row) * topk_);
    }
    std::vector<double> attn_sink = attn_sink_;
    SparseAttentionInputs inputs;
    inputs.q = view(block.q, {block.rows, heads_, head_dim_});
    inputs.kv = view(block.kv, {keys, 1, head_dim_});
    inputs.topk_indices = indices;
    inputs.softmax_scale = tensors_.softmax_scale;
    if (tensors_.attn_sink) inputs.attn_sink = view(attn_sink, {heads_});

    AttentionForwardArgs forward;
    static_cast<SparseAttentionInputs&>(forward) = inputs;
    forward.out = view(block.out, {block.rows, heads_, kValueDim});
    forward.lse = view(block.lse, {block.rows, heads_});
    forward.max_logits = view(block.max_logits, {block.rows, heads_});
    attention_forward(forward, reference);
    if (!has_backward()) return;

    AttentionBackwardArgs backward;
    static_cast<SparseAttentionInputs&>(backward) = inputs;
    backward.out = forward.out;
    backward.lse = forward.lse;
    backward.grad_out = view(block.grad_out, {block.rows, heads_, kValueDim});
    backward.grad_q = view(block.grad_q, {block.rows, heads_, head_dim_});
    backward.grad_kv = view(block.grad_kv, {keys, 1, head_dim_});
    if (tensors_.attn_sink) backward.grad_attn_sink = view(block.grad_attn_sink, {heads_});
    attention_backward(backward, reference);
  }

  void find_floors(Block& block) const {
    const auto dim = static_cast<std::size_t>(head_dim_);
    std::vector<double> value_squares(block.keys.size()), key_squares(block.keys.size());
    for (std::size_t i = 0; i < block.keys.size(); ++i) {
      for (std::size_t c = 0; c < dim; ++c) {
        const double square = block.kv[i * dim + c] * block.kv[i * dim + c];
        key_squares[i] += square;
        if (c < kValueDim) value_squares[i] += square;
      }
    }
    block.floors.resize(block.slots.size());
    for (std::size_t row = 0; row < block.slots.size(); ++row) {
      if (block.slots[row].empty()) continue;
      AttentionRow inputs;
      inputs.heads = heads_;
      inputs.head_dim = head_dim_;
      inputs.softmax_scale = tensors_.softmax_scale;
      inputs.q = row_of(block.q, row, head_dim_);
      inputs.keys = block.kv;
      inputs.value_squares = value_squares;
      inputs.key_squares = key_squares;
      inputs.slots = block.slots[row];
      inputs.attn_sink = attn_sink_;
      inputs.lse = row_of(block.lse, row, 1);
      inputs.out = row_of(block.out, row, kValueDim);
      if (has_backward()) inputs.grad_out = row_of(block.grad_out, row, kValueDim);
      block.floors[row] = attention_floors(inputs);
    }
  }

  void judge_rows(const Block& block) {
    for (std::size_t row = 0; row < block.slots.size(); ++row) {
      const std::int64_t t = block.begin + static_cast<std::int64_t>(row);
      const std::vector<double> out = to_double(results_.out, t, t + 1);
      const std::vector<double> lse = to_double(results_.lse, t, t + 1);
      const std::vector<double> max_logits = to_double(results_.max_logits, t, t + 1);
      std::vector<double> grad_q;
      if (has_backward()) grad_q = to_double(*results_.grad_q, t, t + 1);
      const bool is_empty = block.slots[row].empty();
      if (is_empty) out_zero_.add(out);
      if (is_empty) grad_q_zero_.add(grad_q);
      for (std::int64_t head = 0; head < heads_; ++head) {
        const auto h = static_cast<std::size_t>(head);
        const Place place{t, head};
        lse_.add(lse[h], row_of(block.lse, row, 1)[h], place);
        max_logits_.add(max_logits[h], row_of(block.max_logits, row, 1)[h], place);
        const AttentionFloors& floors = block.floors[row];
        out_.add(head_of(out, head, kValueDim),
                 head_of(row_of(block.out, row, kValueDim), head, kValueDim), 0,
                 (is_empty ? 0 : floors.out[h]) + kUnderflow, place);
        if (!has_backward()) continue;
        const double absolute = is_empty ? 0 : kFp32Floor * floors.absolute_q[h];
        const double rounded = is_empty ? 0 : floors.rounded_q[h];
        grad_q_.add(head_of(grad_q, head, head_dim_),
                    head_of(row_of(block.grad_q, row, head_dim_), head, head_dim_), absolute,
                    absolute + rounded + kUnderflow, place);
      }
      sink_squares_ += block.floors[row].sink_squares;
    }
    for (std::size_t h = 0; h < grad_attn_sink_.size() && has_backward(); ++h) {
      grad_attn_sink_[h] += block.grad_attn_sink[h];
    }
  }

  // Adds the block's share of the range's keys. The threads split the channels, so that none adds
  // to another's sums.
  void accumulate(const Block& block, KeyRange& range) const {
    const auto dim = static_cast<std::size_t>(head_dim_);
    const auto in_range = [&](std::int32_t key) { return key >= range.begin && key < range.end; };
    for (std::size_t i = 0; i < block.keys.size(); ++i) {
      if (!in_range(block.keys[i])) continue;
      const auto key = static_cast<std::size_t>(block.keys[i] - range.begin);
      range.selected[key] = true;
      for (std::size_t c = 0; c < dim; ++c) {
        range.grad_kv[key * dim + c] += block.grad_kv[i * dim + c];
      }
    }
    for (std::size_t row = 0; row < block.slots.size(); ++row) {
      for (std::size_t j = 0; j < block.slots[row].size(); ++j) {
        const std::int32_t key = block.keys[static_cast<std::size_t>(block.slots[row][j])];
        if (!in_range(key)) continue;
        range.rounded[static_cast<std::size_t>(key - range.begin)] +=
            block.floors[row].rounded_kv[j];
      }
    }
    constexpr std::int64_t kChannels = 64;  // of a thread's share; divides 512 and 576
    parallel_for(threads_, head_dim_ / kChannels, [&](std::int64_t share) {
      add_absolute_terms(block, range, static_cast<std::size_t>(share * kChannels), kChannels);
    });
  }

  void add_absolute_terms(const Block& block, KeyRange& range, std::size_t first,
                          std::size_t channels) const {
    const auto dim = static_cast<std::size_t>(head_dim_);
    for (std::size_t row = 0; row < block.slots.size(); ++row) {
      const auto& slots = block.slots[row];
      const auto q = row_of(block.q, row, head_dim_);
      for (std::size_t h = 0; h < static_cast<std::size_t>(heads_); ++h) {
        const double* q_head = q.data() + h * dim + first;
        for (std::size_t j = 0; j < slots.size(); ++j) {
          const std::int32_t key = block.keys[static_cast<std::size_t>(slots[j])];
          if (key < range.begin || key >= range.end) continue;
          double* sums =
              range.absolute.data() + static_cast<std::size_t>(key - range.begin) * dim + first;
          const double term = block.floors[row].kv_terms[h * slots.size() + j];
          for (std::size_t c = 0; c < channels; ++c) sums[c] += term * std::abs(q_head[c]);
        }
      }
    }
  }

  void judge_keys(const KeyRange& range) {
    const auto dim = static_cast<std::size_t>(head_dim_);
    std::vector<double> got(dim);
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      const auto i = static_cast<std::size_t>(key - range.begin);
      copy_row(*results_.grad_kv, key, got.data());
      if (!range.selected[i]) grad_kv_zero_.add(got);
      double absolute_squares = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        absolute_squares += range.absolute[i * dim + c] * range.absolute[i * dim + c];
      }
      const double absolute = kFp32Floor * std::sqrt(absolute_squares);
      grad_kv_.add(got, std::span(range.grad_kv).subspan(i * dim, dim), absolute,
                   absolute + std::sqrt(range.rounded[i]) + kUnderflow, {key, -1});
    }
  }

  void report(ErrorTable& table) const {
    out_zero_.report(table);
    out_.report(table, kOutCosine);
    lse_.report(table);
    max_logits_.report(table);
    if (!has_backward()) return;
    grad_q_zero_.report(table);
    grad_q_.report(table);
    grad_kv_zero_.report(table);
    grad_kv_.report(table);
    if (!results_.grad_attn_sink) return;
    VectorJudge sink("grad_attn_sink", kGradRmse, VectorJudge::Vectors::kNotJudged);
    sink.add(to_double(*results_.grad_attn_sink, 0, heads_), grad_attn_sink_,
             kBf16Rounding * std::sqrt(sink_squares_), 0, {});
    sink.report(table);
  }

  // Row `row` of values [rows, H, width], and head `head` of such a row.
  std::span<const double> row_of(const std::vector<double>& values, std::size_t row,
                                 std::int64_t width) const {
    const auto size = static_cast<std::size_t>(heads_ * width);
    return std::span(values).subspan(row * size, size);
  }
  static std::span<const double> head_of(std::span<const double> row, std::int64_t head,
                                         std::int64_t width) {
    return row.subspan(static_cast<std::size_t>(head * width), static_cast<std::size_t>(width));
  }

  const AttentionTensors& tensors_;
  const AttentionResults& results_;
  const Runtime& runtime_;
  const VerifyBudget& budget_;
  int threads_;
  std::int64_t t_q_;
  std::int64_t heads_;
  std::int64_t head_dim_;
  std::int64_t t_k_;
  std::int64_t topk_;
  std::vector<double> attn_sink_;  // [H], or empty

  ZeroJudge out_zero_{"out", "rows without keys"};
  VectorJudge out_{"out", kOutRmse};
  LogJudge lse_;
  LogJudge max_logits_;
  ZeroJudge grad_q_zero_{"grad_q", "rows without keys"};
  VectorJudge grad_q_{"grad_q", kGradRmse};
  ZeroJudge grad_kv_zero_{"grad_kv", "rows that nobody selected"};
  VectorJudge grad_kv_{"grad_kv", kGradRmse};
  std::vector<double> grad_attn_sink_;  // [H], of the reference
  double sink_squares_ = 0;
};

}  // namespace

void verify_attention(ErrorTable& table, const AttentionTensors& tensors,
                      const AttentionResults& results, bool tight, const Runtime& runtime,
                      const VerifyBudget& budget) {
  AttentionVerifier(tensors, results, tight, runtime, budget).verify(table);
}

}  // namespace flashdsa::tools
