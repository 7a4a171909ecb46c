#include "tests/support/attention_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tests/support/attention_allowance.h"
#include "tests/support/compare.h"
#include "tests/support/engines.h"
#include "tests/support/placement.h"
#include "tests/support/random.h"

namespace flashdsa::test {
namespace {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

constexpr std::int64_t kValueDim = 512;

DType single_beside(const AttentionProblem& problem) {
  return problem.q.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

std::optional<TensorView> optional_view(const std::optional<HostTensor>& tensor) {
  return tensor ? std::optional(tensor->view()) : std::nullopt;
}

void expect_bands(const AttentionProblem& problem, const AttentionResult& result) {
  const auto expect_intact = [&](const char* name, const HostTensor& tensor) {
    EXPECT_TRUE(tensor.bands_intact()) << "guard band of " << name << "; " << problem.describe();
  };
  expect_intact("q", problem.q);
  expect_intact("kv", problem.kv);
  expect_intact("topk_indices", problem.topk_indices);
  expect_intact("grad_out", problem.grad_out);
  expect_intact("out", result.out);
  expect_intact("lse", result.lse);
  expect_intact("max_logits", result.max_logits);
  expect_intact("grad_q", result.grad_q);
  expect_intact("grad_kv", result.grad_kv);
  if (result.grad_attn_sink) expect_intact("grad_attn_sink", *result.grad_attn_sink);
}

// Collects the sentences of failed comparisons.
class Verdict {
 public:
  void add(const AssertionResult& result) {
    if (!result) text_ += fmt::format("{}\n", result.message());
  }
  void add_bits(const char* name, const HostTensor& got, const HostTensor& want) {
    const AssertionResult result = same_bits(got, want);
    if (!result) add(AssertionFailure() << name << ": " << result.message());
  }
  AssertionResult result() const {
    return text_.empty() ? AssertionSuccess() : AssertionFailure() << text_;
  }

 private:
  std::string text_;
};

// The sub-tensor of the vectors of the last `inner` elements whose number `keep` accepts.
Values selected(const Values& values, std::size_t inner,
                const std::function<bool(std::int64_t)>& keep) {
  Values result{values.name, values.problem, {0, static_cast<std::int64_t>(inner)}, {}};
  for (std::size_t v = 0; v * inner < values.data.size(); ++v) {
    if (!keep(static_cast<std::int64_t>(v))) continue;
    result.data.insert(result.data.end(),
                       values.data.begin() + static_cast<std::ptrdiff_t>(v * inner),
                       values.data.begin() + static_cast<std::ptrdiff_t>((v + 1) * inner));
    ++result.shape[0];
  }
  return result;
}

bool row_is_empty(const AttentionProblem& problem, std::int64_t t) {
  return problem.keys_of_row(t).empty();
}

void judge_forward(Verdict& verdict, const AttentionProblem& problem, const AttentionResult& got,
                   const AttentionResult& want, const Allowance& allowance) {
  const std::string text = problem.describe();
  const Values out = values_of("out", got.out, text);
  const Values want_out = values_of("out", want.out, text);
  verdict.add(relative_rmse_within(out, want_out, kOutRmse, kTiny));
  verdict.add(cosine_at_least(out, want_out, kOutCosine));
  verdict.add(vectors_within(out, want_out, kVectorFactor * kOutRmse, allowance.out));
  const double absolute = log_absolute(got.backend);
  verdict.add(elements_within(values_of("lse", got.lse, text), values_of("lse", want.lse, text),
                              absolute, kLogRelative));
  verdict.add(elements_within(values_of("max_logits", got.max_logits, text),
                              values_of("max_logits", want.max_logits, text), absolute,
                              kLogRelative));
  const auto empty = [&](std::int64_t t) { return row_is_empty(problem, t); };
  const auto row = static_cast<std::size_t>(problem.heads() * kValueDim);
  verdict.add(all_zero(selected(values_of("out of rows without keys", got.out, text), row, empty)));
}

void judge_backward(Verdict& verdict, const AttentionProblem& problem, const AttentionResult& got,
                    const AttentionResult& want, const Allowance& allowance) {
  const std::string text = problem.describe();
  const Values grad_q = values_of("grad_q", got.grad_q, text);
  const Values want_q = values_of("grad_q", want.grad_q, text);
  verdict.add(
      relative_rmse_within(grad_q, want_q, kGradRmse, norm(allowance.grad_q_tensor) + kTiny));
  verdict.add(vectors_within(grad_q, want_q, kVectorFactor * kGradRmse, allowance.grad_q));
  const Values grad_kv = values_of("grad_kv", got.grad_kv, text);
  const Values want_kv = values_of("grad_kv", want.grad_kv, text);
  verdict.add(
      relative_rmse_within(grad_kv, want_kv, kGradRmse, norm(allowance.grad_kv_tensor) + kTiny));
  verdict.add(vectors_within(grad_kv, want_kv, kVectorFactor * kGradRmse, allowance.grad_kv));
  if (problem.attn_sink) {
    verdict.add(relative_rmse_within(values_of("grad_attn_sink", *got.grad_attn_sink, text),
                                     values_of("grad_attn_sink", *want.grad_attn_sink, text),
                                     kGradRmse, allowance.grad_attn_sink));
  }

  std::vector<bool> is_selected(static_cast<std::size_t>(problem.t_k()));
  for (std::int64_t t = 0; t < problem.t_q(); ++t) {
    for (const std::int64_t key : problem.keys_of_row(t))
      is_selected[static_cast<std::size_t>(key)] = true;
  }
  const auto empty = [&](std::int64_t t) { return row_is_empty(problem, t); };
  const auto unselected = [&](std::int64_t s) { return !is_selected[static_cast<std::size_t>(s)]; };
  const auto dim = static_cast<std::size_t>(problem.head_dim());
  verdict.add(all_zero(selected(values_of("grad_q of rows without keys", got.grad_q, text),
                                static_cast<std::size_t>(problem.heads()) * dim, empty)));
  verdict.add(all_zero(
      selected(values_of("grad_kv of keys nobody selected", got.grad_kv, text), dim, unselected)));
}

}  // namespace

std::string AttentionProblem::describe() const {
  return fmt::format("seed {}, T_q {}, T_k {}, H {}, K {}, D {}, {}{}", seed, t_q(), t_k(), heads(),
                     topk(), head_dim(), dtype_name(q.dtype()), attn_sink ? ", sink" : "");
}

std::vector<std::int64_t> AttentionProblem::keys_of_row(std::int64_t t) const {
  std::int64_t slots = topk();
  if (topk_length) slots = std::min(slots, static_cast<std::int64_t>(topk_length->get(t)));
  std::vector<std::int64_t> keys;
  for (std::int64_t j = 0; j < slots; ++j) {
    const auto key = static_cast<std::int64_t>(topk_indices.get(t * topk() + j));
    if (key >= 0 && key < t_k()) keys.push_back(key);
  }
  return keys;
}

void AttentionProblem::set_row(std::int64_t t, const std::vector<std::int32_t>& slots) {
  for (std::int64_t j = 0; j < topk(); ++j) {
    const auto i = static_cast<std::size_t>(j);
    topk_indices.set(t * topk() + j, i < slots.size() ? slots[i] : -1);
  }
}

void AttentionProblem::set_lengths(const std::vector<std::int32_t>& lengths) {
  topk_length = HostTensor(DType::kInt32, {t_q()});
  for (std::int64_t t = 0; t < t_q(); ++t)
    topk_length->set(t, lengths.at(static_cast<std::size_t>(t)));
}

void AttentionProblem::set_sink(const std::vector<double>& sink) {
  attn_sink = HostTensor(single_beside(*this), {heads()});
  for (std::int64_t h = 0; h < heads(); ++h)
    attn_sink->set(h, sink.at(static_cast<std::size_t>(h)));
}

void AttentionProblem::set_key(std::int64_t key, double value) {
  for (std::int64_t c = 0; c < head_dim(); ++c) kv.set({key, 0, c}, value);
}

SparseAttentionInputs AttentionProblem::inputs() const {
  SparseAttentionInputs inputs;
  inputs.q = q;
  inputs.kv = kv;
  inputs.topk_indices = topk_indices;
  inputs.softmax_scale = softmax_scale;
  inputs.topk_length = optional_view(topk_length);
  inputs.attn_sink = optional_view(attn_sink);
  return inputs;
}

AttentionProblem random_attention(const AttentionShape& shape, std::uint64_t seed) {
  Random random(seed);
  AttentionProblem problem;
  problem.seed = seed;
  problem.q = HostTensor(DType::kBFloat16, {shape.t_q, shape.heads, shape.head_dim});
  problem.kv = HostTensor(DType::kBFloat16, {shape.t_k, 1, shape.head_dim});
  problem.grad_out = HostTensor(DType::kBFloat16, {shape.t_q, shape.heads, kValueDim});
  problem.topk_indices = HostTensor(DType::kInt32, {shape.t_q, 1, shape.topk});
  random.fill_normal(problem.q);
  random.fill_normal(problem.kv);
  random.fill_normal(problem.grad_out);
  for (std::int64_t t = 0; t < shape.t_q; ++t) {
    problem.set_row(t, random.subset(shape.t_k, std::min(shape.topk, shape.t_k)));
  }
  return problem;
}

AttentionProblem in_float64(const AttentionProblem& problem) {
  AttentionProblem result = problem;
  result.q = problem.q.as(DType::kFloat64);
  result.kv = problem.kv.as(DType::kFloat64);
  result.grad_out = problem.grad_out.as(DType::kFloat64);
  if (problem.attn_sink) result.attn_sink = problem.attn_sink->as(DType::kFloat64);
  return result;
}

AttentionProblem rows_of(const AttentionProblem& problem, std::int64_t begin, std::int64_t count) {
  AttentionProblem result = problem;
  result.q = problem.q.rows(begin, count);
  result.grad_out = problem.grad_out.rows(begin, count);
  result.topk_indices = problem.topk_indices.rows(begin, count);
  if (problem.topk_length) result.topk_length = problem.topk_length->rows(begin, count);
  return result;
}

AttentionResult empty_result(const AttentionProblem& problem, Backend backend,
                             std::optional<DType> grad_kv_dtype) {
  const DType real = problem.q.dtype(), single = single_beside(problem);
  AttentionResult result;
  result.backend = backend;
  result.out = HostTensor(real, {problem.t_q(), problem.heads(), kValueDim});
  result.lse = HostTensor(single, {problem.t_q(), problem.heads()});
  result.max_logits = HostTensor(single, {problem.t_q(), problem.heads()});
  result.grad_q = HostTensor(real, problem.q.shape());
  result.grad_kv = HostTensor(grad_kv_dtype.value_or(real), problem.kv.shape());
  if (problem.attn_sink) result.grad_attn_sink = HostTensor(single, {problem.heads()});
  return result;
}

AttentionForwardArgs forward_args(const AttentionProblem& problem, const AttentionResult& result) {
  AttentionForwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = problem.inputs();
  args.out = result.out;
  args.lse = result.lse;
  args.max_logits = result.max_logits;
  return args;
}

AttentionBackwardArgs backward_args(const AttentionProblem& problem,
                                    const AttentionResult& result) {
  AttentionBackwardArgs args;
  static_cast<SparseAttentionInputs&>(args) = problem.inputs();
  args.out = result.out;
  args.lse = result.lse;
  args.grad_out = problem.grad_out;
  args.grad_q = result.grad_q;
  args.grad_kv = result.grad_kv;
  args.grad_attn_sink = optional_view(result.grad_attn_sink);
  return args;
}

AttentionResult run_forward(const AttentionProblem& problem, const Runtime& runtime) {
  const AttentionResult result = empty_result(problem, runtime.backend);
  run_placed(forward_args(problem, result), runtime);
  expect_bands(problem, result);
  return result;
}

AttentionResult run_attention(const AttentionProblem& problem, const Runtime& runtime,
                              std::optional<DType> grad_kv_dtype) {
  const AttentionResult result = empty_result(problem, runtime.backend, grad_kv_dtype);
  run_placed(forward_args(problem, result), runtime);
  run_placed(backward_args(problem, result), runtime);
  expect_bands(problem, result);
  return result;
}

AttentionResult reference_attention(const AttentionProblem& problem) {
  return run_attention(in_float64(problem), reference_runtime());
}

AssertionResult forward_within_spec(const AttentionProblem& problem, const AttentionResult& got) {
  const AttentionResult want = reference_attention(problem);
  Verdict verdict;
  judge_forward(verdict, problem, got, want, allowance_of(problem, want));
  return verdict.result();
}

AssertionResult within_spec(const AttentionProblem& problem, const AttentionResult& got) {
  const AttentionResult want = reference_attention(problem);
  const Allowance allowance = allowance_of(problem, want);
  Verdict verdict;
  judge_forward(verdict, problem, got, want, allowance);
  judge_backward(verdict, problem, got, want, allowance);
  return verdict.result();
}

AssertionResult same_forward_bits(const AttentionResult& got, const AttentionResult& want) {
  Verdict verdict;
  verdict.add_bits("out", got.out, want.out);
  verdict.add_bits("lse", got.lse, want.lse);
  verdict.add_bits("max_logits", got.max_logits, want.max_logits);
  return verdict.result();
}

AssertionResult same_result_bits(const AttentionResult& got, const AttentionResult& want) {
  Verdict verdict;
  verdict.add(same_forward_bits(got, want));
  verdict.add_bits("grad_q", got.grad_q, want.grad_q);
  verdict.add_bits("grad_kv", got.grad_kv, want.grad_kv);
  if (got.grad_attn_sink || want.grad_attn_sink) {
    verdict.add_bits("grad_attn_sink", got.grad_attn_sink.value_or(HostTensor()),
                     want.grad_attn_sink.value_or(HostTensor()));
  }
  return verdict.result();
}

}  // namespace flashdsa::test
