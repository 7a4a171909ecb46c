#include "tools/bench_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include "flashdsa/attention.h"
#include "flashdsa/indexer.h"
#include "selection/plan_format.h"
#include "tools/parallel.h"
#include "tools/synth_random.h"
#include "tools/verify.h"

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kValueDim = 512;
constexpr std::int64_t kIndexDim = 128;
constexpr std::size_t kSampledRows = 4;
constexpr std::size_t kSampledKeys = 4;

// Gradients of a row with few keys cancel; rows below this are not sampled for attention.
constexpr std::int64_t kEnoughKeys = 64;

double magnitude(double value) { return std::abs(value); }

// Up to `count` rows that fulfil `wanted`: the last one, and others at random.
template <typename Wanted>
std::vector<std::int64_t> sample_rows(std::int64_t rows, std::size_t count, const Wanted& wanted) {
  std::vector<std::int64_t> candidates;
  for (std::int64_t row = 0; row < rows; ++row) {
    if (wanted(row)) candidates.push_back(row);
  }
  std::set<std::int64_t> chosen;
  if (!candidates.empty()) chosen.insert(candidates.back());
  const RandomStream stream(1, StreamId::kSample);
  for (std::uint64_t i = 0; chosen.size() < std::min(count, candidates.size()); ++i) {
    const auto slot = stream.below(i, static_cast<std::int64_t>(candidates.size()));
    chosen.insert(candidates[static_cast<std::size_t>(slot)]);
  }
  return {chosen.begin(), chosen.end()};
}

/// |got - want| over vectors, as a whole and for the worst of them.
class RelativeError {
 public:
  template <typename Number>
  void add(const Number* got, const double* want, std::int64_t size) {
    double error = 0, norm = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      const double difference = static_cast<float>(got[i]) - want[i];
      error += difference * difference;
      norm += want[i] * want[i];
    }
    error_ += error;
    norm_ += norm;
    if (!(error <= worst_ * worst_ * norm)) worst_ = std::sqrt(error / norm);
  }

  // A vector may err four times as much as its tensor.
  Figure figure(const std::string& name, double bound) const {
    const Figure whole{name + " rmse", error_ == 0 ? 0 : std::sqrt(error_ / norm_), bound};
    return worst(whole, {name + " worst vector", worst_, kVectorFactor * bound});
  }

 private:
  double error_ = 0, norm_ = 0, worst_ = 0;
};

/// Sampled query rows and the keys that they select.
struct SampledSelection {
  std::vector<std::int64_t> rows, keys;
  Tensor topk_indices;  // [R, 1, K], places in `keys`
};

/// The sampled query rows in FP64, over the keys that they select.
struct SampledProblem {
  std::vector<std::int64_t> rows;
  SparseAttentionInputs inputs;
  Tensor q, kv, topk_indices, grad_out;  // grad_out [R, H, 512]
};

// Rows of a tensor [*, width] in FP64.
template <typename Number = BFloat16>
Tensor gather_rows(const Tensor& tensor, std::span<const std::int64_t> rows,
                   std::initializer_list<std::int64_t> shape) {
  const Tensor result = Tensor::host(DType::kFloat64, shape);
  const std::int64_t width = tensor.view().elements() / tensor.view().shape[0];
  double* target = result.view().as<double>();
  for (const std::int64_t row : rows) {
    const Number* source = tensor.view().as<Number>() + row * width;
    target = std::transform(source, source + width, target,
                            [](Number value) { return double{static_cast<float>(value)}; });
  }
  return result;
}

SampledSelection sample_selection(const Workload& workload, const Tensor& topk_indices,
                                  const Tensor& topk_length) {
  const std::int64_t topk = workload.shape.topk;
  const auto lengths = topk_length.span<std::int32_t>();
  const std::int32_t longest = *std::max_element(lengths.begin(), lengths.end());
  const auto enough = std::min<std::int64_t>(kEnoughKeys, longest);
  SampledSelection sample;
  sample.rows = sample_rows(workload.t_q, kSampledRows, [&](std::int64_t row) {
    return lengths[static_cast<std::size_t>(row)] >= enough;
  });
  const auto count = static_cast<std::int64_t>(sample.rows.size());

  std::set<std::int64_t> keys;
  for (const std::int64_t row : sample.rows) {
    const std::int32_t* slots = topk_indices.view().as<std::int32_t>() + row * topk;
    keys.insert(slots, slots + lengths[static_cast<std::size_t>(row)]);
  }
  sample.keys.assign(keys.begin(), keys.end());
  sample.topk_indices = Tensor::host(DType::kInt32, {count, 1, topk});
  std::int32_t* target = sample.topk_indices.view().as<std::int32_t>();
  for (const std::int64_t row : sample.rows) {
    const std::int32_t* slots = topk_indices.view().as<std::int32_t>() + row * topk;
    for (std::int64_t j = 0; j < topk; ++j, ++target) {
      const bool holds = j < lengths[static_cast<std::size_t>(row)];
      const auto place =
          std::lower_bound(sample.keys.begin(), sample.keys.end(), holds ? slots[j] : 0);
      *target = holds ? static_cast<std::int32_t>(place - sample.keys.begin()) : -1;
    }
  }
  return sample;
}

SampledProblem sample_attention(const Workload& workload, const Tensor& topk_indices,
                                const Tensor& topk_length) {
  const SampledSelection sample = sample_selection(workload, topk_indices, topk_length);
  const auto count = static_cast<std::int64_t>(sample.rows.size());
  const auto keys = static_cast<std::int64_t>(sample.keys.size());
  SampledProblem problem;
  problem.rows = sample.rows;
  problem.topk_indices = sample.topk_indices;
  const std::int64_t heads = workload.shape.heads;
  const std::int64_t head_dim = workload.shape.head_dim;
  problem.q = gather_rows(*workload.q, problem.rows, {count, heads, head_dim});
  problem.kv = gather_rows(*workload.kv, sample.keys, {keys, 1, head_dim});
  problem.grad_out = gather_rows(*workload.grad_out, problem.rows, {count, heads, kValueDim});
  problem.inputs = {problem.q, problem.kv, problem.topk_indices, workload.shape.softmax_scale,
                    {},        {}};
  return problem;
}

struct ReferenceForward {
  Tensor out, lse;
};

ReferenceForward reference_forward(const SampledProblem& problem) {
  const auto& shape = problem.q.view().shape;
  AttentionForwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = problem.inputs;
  const ReferenceForward result{Tensor::host(DType::kFloat64, {shape[0], shape[1], kValueDim}),
                                Tensor::host(DType::kFloat64, {shape[0], shape[1]})};
  args.out = result.out;
  args.lse = result.lse;
  Runtime runtime;
  runtime.backend = Backend::kReference;
  attention_forward(args, runtime);
  return result;
}

Tensor reference_grad_q(const SampledProblem& problem) {
  const ReferenceForward forward = reference_forward(problem);
  AttentionBackwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = problem.inputs;
  const auto& q = problem.q.view();
  const Tensor grad_q = Tensor::host(DType::kFloat64, std::span(q.shape).first(3));
  const Tensor grad_kv = Tensor::host(DType::kFloat64, std::span(problem.kv.view().shape).first(3));
  args.out = forward.out;
  args.lse = forward.lse;
  args.grad_out = problem.grad_out;
  args.grad_q = grad_q;
  args.grad_kv = grad_kv;
  Runtime runtime;
  runtime.backend = Backend::kReference;
  attention_backward(args, runtime);
  return grad_q;
}

// Adds one query row's part of grad_kv[s], by SPEC section 6, to `sum` [D].
void add_key_gradient(const Workload& workload, const ForwardOutputs& forward, std::int64_t row,
                      const std::vector<double>& key, std::vector<double>& sum) {
  const std::int64_t head_dim = workload.shape.head_dim;
  for (std::int64_t h = 0; h < workload.shape.heads; ++h) {
    const std::int64_t at = row * workload.shape.heads + h;
    const BFloat16* q = workload.q->view().as<BFloat16>() + at * head_dim;
    const BFloat16* out = forward.out.view().as<BFloat16>() + at * kValueDim;
    const BFloat16* grad_out = workload.grad_out->view().as<BFloat16>() + at * kValueDim;
    double logit = 0, d_p = 0, d = 0;
    for (std::int64_t c = 0; c < head_dim; ++c) {
      logit += static_cast<float>(q[c]) * key[static_cast<std::size_t>(c)];
    }
    for (std::int64_t c = 0; c < kValueDim; ++c) {
      d_p += static_cast<float>(grad_out[c]) * key[static_cast<std::size_t>(c)];
      d += double{static_cast<float>(grad_out[c])} * static_cast<float>(out[c]);
    }
    const double scale = workload.shape.softmax_scale;
    const double p = std::exp(scale * logit - forward.lse.view().as<float>()[at]);
    const double d_s = p * (d_p - d) * scale;
    for (std::int64_t c = 0; c < head_dim; ++c) {
      sum[static_cast<std::size_t>(c)] += d_s * static_cast<float>(q[c]);
    }
    for (std::int64_t c = 0; c < kValueDim; ++c) {
      sum[static_cast<std::size_t>(c)] += p * static_cast<float>(grad_out[c]);
    }
  }
}

// The query rows that select key `s`, and the slot in which: body(row, slot).
template <typename Body>
void for_each_row_of_key(const Workload& workload, const Tensor& topk_indices,
                         const Tensor& topk_length, std::int32_t s, const Body& body) {
  const std::int64_t topk = workload.shape.topk;
  for (std::int64_t row = 0; row < workload.t_q; ++row) {
    const std::int32_t* slots = topk_indices.view().as<std::int32_t>() + row * topk;
    const std::int32_t* end = slots + topk_length.view().as<std::int32_t>()[row];
    const std::int32_t* slot = std::lower_bound(slots, end, s);
    if (slot != end && *slot == s) body(row, slot - slots);
  }
}

// grad_kv[s] in FP64 over all query rows that select s.
std::vector<double> key_gradient(const Workload& workload, const Tensor& topk_indices,
                                 const Tensor& topk_length, const ForwardOutputs& forward,
                                 std::int32_t s) {
  const std::int64_t head_dim = workload.shape.head_dim;
  const BFloat16* source = workload.kv->view().as<BFloat16>() + s * head_dim;
  std::vector<double> key(static_cast<std::size_t>(head_dim)), sum(key.size());
  for (std::size_t c = 0; c < key.size(); ++c) key[c] = static_cast<float>(source[c]);
  for_each_row_of_key(workload, topk_indices, topk_length, s, [&](std::int64_t row, std::int64_t) {
    add_key_gradient(workload, forward, row, key, sum);
  });
  return sum;
}

// Up to four of the keys that `row` selects.
std::vector<std::int32_t> sample_keys(const Workload& workload, const Tensor& topk_indices,
                                      const Tensor& topk_length, std::int64_t row) {
  const std::int32_t* slots = topk_indices.view().as<std::int32_t>() + row * workload.shape.topk;
  const std::int32_t length = topk_length.span<std::int32_t>()[static_cast<std::size_t>(row)];
  std::vector<std::int32_t> keys;
  for (const std::int64_t place :
       sample_rows(length, kSampledKeys, [](std::int64_t) { return true; })) {
    keys.push_back(slots[place]);
  }
  return keys;
}

// Judges the rows of `keys` in BF16 [T_k, width] against want(key).
template <typename Want>
Figure check_key_gradients(const std::string& name, const std::vector<std::int32_t>& keys,
                           const Tensor& got, const Want& want) {
  std::vector<std::vector<double>> wanted(keys.size());
  parallel_for(hardware_threads(), static_cast<std::int64_t>(keys.size()), [&](std::int64_t i) {
    wanted[static_cast<std::size_t>(i)] = want(keys[static_cast<std::size_t>(i)]);
  });
  RelativeError error;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto width = static_cast<std::int64_t>(wanted[i].size());
    error.add(got.view().as<BFloat16>() + keys[i] * width, wanted[i].data(), width);
  }
  return error.figure(name, kGradRmse);
}

// Gradients of the sampled rows by the reference backend in FP64.
struct ReferenceScoreGradients {
  Tensor grad_index_q, grad_head_weights;
};

ReferenceScoreGradients reference_score_gradients(const Workload& workload,
                                                  const SampledSelection& sample,
                                                  const Tensor& grad_scores) {
  const auto count = static_cast<std::int64_t>(sample.rows.size());
  const auto keys = static_cast<std::int64_t>(sample.keys.size());
  const std::int64_t index_heads = workload.shape.index_heads, topk = workload.shape.topk;
  const Tensor index_q =
      gather_rows(*workload.index_q, sample.rows, {count, index_heads, kIndexDim});
  const Tensor index_k = gather_rows(*workload.index_k, sample.keys, {keys, kIndexDim});
  const Tensor weights =
      gather_rows<float>(*workload.head_weights, sample.rows, {count, index_heads});
  const Tensor grad = gather_rows<float>(grad_scores, sample.rows, {count, topk});
  const Tensor grad_index_k = Tensor::host(DType::kFloat64, {keys, kIndexDim});
  const ReferenceScoreGradients result{
      Tensor::host(DType::kFloat64, {count, index_heads, kIndexDim}),
      Tensor::host(DType::kFloat64, {count, index_heads})};
  IndexerBackwardArgs args;
  args.index_q = index_q;
  args.index_k = index_k;
  args.head_weights = weights;
  args.topk_indices = sample.topk_indices;
  args.grad_scores = grad;
  args.grad_index_q = result.grad_index_q;
  args.grad_index_k = grad_index_k;
  args.grad_head_weights = result.grad_head_weights;
  Runtime runtime;
  runtime.backend = Backend::kReference;
  indexer_backward(args, runtime);
  return result;
}

// grad_index_k[s] in FP64 over all query rows that select s, by SPEC section 3.
std::vector<double> index_key_gradient(const Workload& workload, const Tensor& topk_indices,
                                       const Tensor& topk_length, const Tensor& grad_scores,
                                       std::int32_t s) {
  const std::int64_t index_heads = workload.shape.index_heads;
  const BFloat16* key = workload.index_k->view().as<BFloat16>() + s * kIndexDim;
  std::vector<double> sum(static_cast<std::size_t>(kIndexDim));
  const auto add_row = [&](std::int64_t row, std::int64_t slot) {
    const float grad = grad_scores.view().as<float>()[row * workload.shape.topk + slot];
    for (std::int64_t h = 0; h < index_heads; ++h) {
      const std::int64_t at = row * index_heads + h;
      const BFloat16* q = workload.index_q->view().as<BFloat16>() + at * kIndexDim;
      double dot = 0;
      for (std::int64_t c = 0; c < kIndexDim; ++c) {
        dot += double{static_cast<float>(q[c])} * static_cast<float>(key[c]);
      }
      if (!(dot > 0)) continue;
      const double factor = double{grad} * workload.head_weights->view().as<float>()[at];
      for (std::int64_t c = 0; c < kIndexDim; ++c) {
        sum[static_cast<std::size_t>(c)] += factor * static_cast<float>(q[c]);
      }
    }
  };
  for_each_row_of_key(workload, topk_indices, topk_length, s, add_row);
  return sum;
}

// Rows whose form is wrong: not the right number of visible keys, ascending, then -1.
Figure check_selection_form(const Workload& workload, const Tensor& topk_indices,
                            const Tensor& topk_length) {
  const std::int64_t topk = workload.shape.topk;
  double wrong = 0;
  for (std::int64_t row = 0; row < workload.t_q; ++row) {
    const auto r = static_cast<std::size_t>(row);
    const std::int32_t start = workload.starts.span<std::int32_t>()[r];
    const std::int32_t visible = workload.causal_lengths.span<std::int32_t>()[r];
    const auto count = std::min<std::int64_t>(topk, visible);
    const std::int32_t* slots = topk_indices.view().as<std::int32_t>() + row * topk;
    bool right = topk_length.span<std::int32_t>()[r] == count;
    for (std::int64_t j = 0; j < topk; ++j) {
      const std::int32_t low = j == 0 ? start : slots[j - 1] + 1;
      right = right && (j < count ? slots[j] >= low && slots[j] < start + visible : slots[j] == -1);
    }
    wrong += right ? 0 : 1;
  }
  return {"malformed rows", wrong, 0};
}

// How far the scores of wrongly chosen or left keys are from the K-th, against what may be.
Figure check_choice(const Workload& workload, const Tensor& topk_indices, std::int64_t row) {
  const auto r = static_cast<std::size_t>(row);
  const auto start = workload.starts.span<std::int32_t>()[r];
  const auto visible = static_cast<std::int64_t>(workload.causal_lengths.span<std::int32_t>()[r]);
  const std::int64_t index_heads = workload.shape.index_heads;
  const auto as_real = [](const BFloat16* source, std::int64_t size) {
    std::vector<double> values(static_cast<std::size_t>(size));
    std::transform(source, source + size, values.begin(),
                   [](BFloat16 value) { return double{static_cast<float>(value)}; });
    return values;
  };
  const std::int64_t width = index_heads * kIndexDim;
  const auto query = as_real(workload.index_q->view().as<BFloat16>() + row * width, width);
  const auto keys =
      as_real(workload.index_k->view().as<BFloat16>() + start * kIndexDim, visible * kIndexDim);
  const float* weight = workload.head_weights->view().as<float>() + row * index_heads;
  const std::vector<double> weights(weight, weight + index_heads);
  const ScoreRow score_row{query, weights, keys};
  const std::vector<double> scores = exact_scores(score_row);

  const auto topk = static_cast<std::size_t>(workload.shape.topk);
  std::vector<double> sorted = scores;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(topk) - 1,
                   sorted.end(), std::greater<>());
  const double last = sorted[topk - 1];
  const std::int32_t* slots = topk_indices.view().as<std::int32_t>() + row * workload.shape.topk;
  double distance = 0;
  for (std::size_t s = 0; s < scores.size(); ++s) {
    const auto key = start + static_cast<std::int32_t>(s);
    const bool chosen = std::binary_search(slots, slots + topk, key);
    const bool wrong = chosen ? scores[s] < last : scores[s] > last;
    if (wrong) distance = std::max(distance, magnitude(scores[s] - last));
  }
  return {"selection", distance, 2 * score_slack(score_row)};
}

// The keys of row r of a plan's item. Those of slots are `row` itself.
void keys_of_plan(const selection::PlanView& plan, const selection::PlanItem& item, std::int32_t r,
                  std::span<const std::int32_t> row, std::vector<std::int32_t>& keys) {
  const std::int64_t t = item.first_row;
  keys.clear();
  if (item.kind == selection::ItemKind::kSlots) {
    keys.assign(row.begin(), row.begin() + std::min<std::ptrdiff_t>(item.keys, std::ssize(row)));
  } else if (item.kind == selection::ItemKind::kRange) {
    for (std::int32_t i = 0; i < plan.row_keys[t + r]; ++i) {
      keys.push_back(plan.row_first[t + r] + i);
    }
  } else {
    const std::int32_t* list = plan.lists + t * plan.topk;
    const std::uint32_t* masks = plan.masks + t * plan.group * ((plan.topk + 31) / 32);
    for (std::int32_t i = 0; i < item.keys; ++i) {
      if ((masks[i / 32 * item.rows + r] >> (i % 32) & 1) != 0) keys.push_back(list[i]);
    }
  }
}

}  // namespace

std::string Figure::text() const {
  return fmt::format("{} {:.1e} / {:.1e}{}", name, value, bound, ok() ? "" : " FAIL");
}

Figure worst(const Figure& a, const Figure& b) {
  if (a.ok() != b.ok()) return a.ok() ? b : a;
  const auto share = [](const Figure& figure) {
    return figure.bound > 0 ? figure.value / figure.bound : figure.value;
  };
  return share(a) >= share(b) ? a : b;
}

Figure check_forward(const Workload& workload, const Tensor& topk_indices,
                     const Tensor& topk_length, const ForwardOutputs& outputs, bool tight) {
  const SampledProblem problem = sample_attention(workload, topk_indices, topk_length);
  const ReferenceForward want = reference_forward(problem);
  const std::int64_t heads = workload.shape.heads;
  RelativeError out_error;
  Figure lse{"lse", 0, 1};
  for (std::size_t i = 0; i < problem.rows.size(); ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t got_at = problem.rows[i] * heads + h;
      const std::int64_t want_at = static_cast<std::int64_t>(i) * heads + h;
      out_error.add(outputs.out.view().as<BFloat16>() + got_at * kValueDim,
                    want.out.view().as<double>() + want_at * kValueDim, kValueDim);
      const double want_lse = want.lse.view().as<double>()[want_at];
      const double error = magnitude(outputs.lse.view().as<float>()[got_at] - want_lse);
      lse = worst(lse, {"lse", error, (tight ? 1e-5 : 1e-4) + 1e-6 * magnitude(want_lse)});
    }
  }
  return worst(out_error.figure("out", kOutRmse), lse);
}

Figure check_backward(const Workload& workload, const Tensor& topk_indices,
                      const Tensor& topk_length, const ForwardOutputs& forward,
                      const BackwardOutputs& outputs) {
  const SampledProblem problem = sample_attention(workload, topk_indices, topk_length);
  const Tensor want = reference_grad_q(problem);
  const std::int64_t heads = workload.shape.heads, head_dim = workload.shape.head_dim;
  RelativeError error;
  for (std::size_t i = 0; i < problem.rows.size(); ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t want_at = static_cast<std::int64_t>(i) * heads + h;
      error.add(outputs.grad_q.view().as<BFloat16>() + (problem.rows[i] * heads + h) * head_dim,
                want.view().as<double>() + want_at * head_dim, head_dim);
    }
  }
  return worst(
      error.figure("grad_q", kGradRmse),
      check_key_gradients("grad_kv",
                          sample_keys(workload, topk_indices, topk_length, problem.rows.front()),
                          outputs.grad_kv, [&](std::int32_t s) {
                            return key_gradient(workload, topk_indices, topk_length, forward, s);
                          }));
}

Figure check_indexer_backward(const Workload& workload, const Tensor& topk_indices,
                              const Tensor& topk_length, const Tensor& grad_scores,
                              const IndexerBackwardOutputs& outputs) {
  const SampledSelection sample = sample_selection(workload, topk_indices, topk_length);
  const ReferenceScoreGradients want = reference_score_gradients(workload, sample, grad_scores);
  const std::int64_t index_heads = workload.shape.index_heads, width = index_heads * kIndexDim;
  RelativeError queries, weights;
  for (std::size_t i = 0; i < sample.rows.size(); ++i) {
    const std::int64_t row = sample.rows[i], at = static_cast<std::int64_t>(i);
    for (std::int64_t h = 0; h < index_heads; ++h) {
      queries.add(outputs.grad_index_q.view().as<BFloat16>() + row * width + h * kIndexDim,
                  want.grad_index_q.view().as<double>() + at * width + h * kIndexDim, kIndexDim);
    }
    weights.add(outputs.grad_head_weights.view().as<float>() + row * index_heads,
                want.grad_head_weights.view().as<double>() + at * index_heads, index_heads);
  }
  const Figure keys = check_key_gradients(
      "grad_index_k", sample_keys(workload, topk_indices, topk_length, sample.rows.front()),
      outputs.grad_index_k, [&](std::int32_t s) {
        return index_key_gradient(workload, topk_indices, topk_length, grad_scores, s);
      });
  return worst(queries.figure("grad_index_q", kGradRmse),
               worst(weights.figure("grad_head_weights", kGradRmse), keys));
}

Figure check_selection(const Workload& workload, const Tensor& topk_indices,
                       const Tensor& topk_length) {
  Figure result = check_selection_form(workload, topk_indices, topk_length);
  const auto visible = workload.causal_lengths.span<std::int32_t>();
  const auto rows = sample_rows(workload.t_q, kSampledRows, [&](std::int64_t row) {
    return visible[static_cast<std::size_t>(row)] > workload.shape.topk;
  });
  std::vector<Figure> figures(rows.size());
  parallel_for(hardware_threads(), static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) {
    const auto slot = static_cast<std::size_t>(i);
    figures[slot] = check_choice(workload, topk_indices, rows[slot]);
  });
  for (const Figure& figure : figures) result = worst(figure, result);
  return result;
}

Figure check_metadata(const Workload& workload, const PackedMetadata& metadata) {
  const auto differing = [](const Tensor& a, const Tensor& b) {
    const auto x = a.span<std::int32_t>(), y = b.span<std::int32_t>();
    double count = 0;
    for (std::size_t i = 0; i < x.size(); ++i) count += x[i] == y[i] ? 0 : 1;
    return count;
  };
  return {"differing rows",
          differing(workload.starts, metadata.starts) +
              differing(workload.causal_lengths, metadata.causal_lengths),
          0};
}

Figure check_compact(const Workload& workload, const Tensor& indices, const Tensor& sorted,
                     const Tensor& lengths) {
  const auto topk = static_cast<std::size_t>(workload.shape.topk);
  double wrong = 0;
  for (const std::int64_t row : sample_rows(workload.t_q, 64, [](std::int64_t) { return true; })) {
    const auto first = static_cast<std::size_t>(row) * topk;
    const auto slots = indices.span<std::int32_t>().subspan(first, topk);
    std::vector<std::int32_t> want;
    std::copy_if(slots.begin(), slots.end(), std::back_inserter(want),
                 [&](std::int32_t key) { return key >= 0 && key < workload.t_k; });
    std::sort(want.begin(), want.end());
    const auto length = static_cast<std::int32_t>(want.size());
    want.resize(topk, -1);
    const auto got = sorted.span<std::int32_t>().subspan(first, topk);
    const bool right = std::equal(got.begin(), got.end(), want.begin()) &&
                       lengths.span<std::int32_t>()[static_cast<std::size_t>(row)] == length;
    wrong += right ? 0 : 1;
  }
  return {"differing rows", wrong, 0};
}

Figure check_plan(const Workload& workload, const SelectionPlan& plan) {
  const selection::PlanView view =
      selection::plan_view(plan.storage.view().data, {plan.query_rows, plan.topk, plan.group});
  const auto rows = static_cast<std::size_t>(workload.t_q);
  const auto topk = static_cast<std::size_t>(workload.shape.topk);
  const auto row_of = [&](std::size_t t) {
    return workload.topk_indices->span<std::int32_t>().subspan(
        t * topk, static_cast<std::size_t>(workload.topk_length->span<std::int32_t>()[t]));
  };
  std::size_t right = 0, next = 0;
  std::vector<std::int32_t> keys;
  for (std::int32_t i = 0; i < *view.item_count && next < rows; ++i) {
    const selection::PlanItem& item = view.items[i];
    if (static_cast<std::size_t>(item.first_row) != next) break;  // no row may be left out
    for (std::int32_t r = 0; r < item.rows; ++r) {
      keys_of_plan(view, item, r, row_of(next), keys);
      if (std::ranges::equal(keys, row_of(next))) ++right;
      ++next;
    }
  }
  return {"differing rows", static_cast<double>(rows - right), 0};
}

}  // namespace flashdsa::tools
