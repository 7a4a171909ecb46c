#include "tests/support/attention_allowance.h"

#include <cmath>
#include <limits>

namespace flashdsa::test {
namespace {

constexpr double kFloat32Sum = 2e-6;  // of the absolute terms: what an FP32 sum resolves
constexpr double kBFloat16 = 0x1p-8;  // what one BF16 rounding may do to a term
constexpr std::size_t kValueDim = 512;

using Row = std::vector<double>;

double dot(const double* a, const double* b, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

double length_of(const double* a, std::size_t count) { return std::sqrt(dot(a, a, count)); }

double absolute_dot(const double* a, const double* b, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += std::abs(a[i] * b[i]);
  return sum;
}

// Probabilities of one row and head, and that of the sink behind them.
Row probabilities(const Row& logits, double sink) {
  Row p(logits.size() + 1, 0.0);
  double top = sink;
  for (const double logit : logits) top = std::max(top, logit);
  if (std::isinf(top)) {  // a sink of +inf takes everything
    p.back() = 1;
    return p;
  }
  double total = std::exp(sink - top);
  for (const double logit : logits) total += std::exp(logit - top);
  for (std::size_t j = 0; j < logits.size(); ++j) p[j] = std::exp(logits[j] - top) / total;
  p.back() = std::exp(sink - top) / total;
  return p;
}

// The sums of one problem while its rows and heads are walked.
class Sums {
 public:
  Sums(const AttentionProblem& problem, const AttentionResult& want)
      : problem_(problem),
        dim_(static_cast<std::size_t>(problem.head_dim())),
        q_(problem.q.values()),
        kv_(problem.kv.values()),
        grad_out_(problem.grad_out.values()),
        out_(want.out.values()),
        absolute_kv_(kv_.size(), 0.0) {
    const auto vectors = static_cast<std::size_t>(problem.t_q() * problem.heads());
    const auto keys = static_cast<std::size_t>(problem.t_k());
    result_.out.assign(vectors, kTiny);
    result_.grad_q.assign(vectors, kTiny);
    result_.grad_q_tensor.assign(vectors, 0.0);
    result_.grad_kv.assign(keys, 0.0);
    result_.grad_kv_tensor.assign(keys, 0.0);
  }

  void add_row(std::int64_t t) {
    const auto keys = problem_.keys_of_row(t);
    if (keys.empty()) return;
    for (std::int64_t h = 0; h < problem_.heads(); ++h) {
      add(static_cast<std::size_t>(t * problem_.heads() + h),
          problem_.attn_sink ? problem_.attn_sink->get(h)
                             : -std::numeric_limits<double>::infinity(),
          keys);
    }
  }

  Allowance finish() {
    for (std::size_t s = 0; s < result_.grad_kv.size(); ++s) {
      result_.grad_kv_tensor[s] = kFloat32Sum * length_of(&absolute_kv_[s * dim_], dim_);
      result_.grad_kv[s] = result_.grad_kv_tensor[s] + std::sqrt(result_.grad_kv[s]) + kTiny;
    }
    result_.grad_attn_sink = kBFloat16 * std::sqrt(sink_square_) + kTiny;
    return result_;
  }

 private:
  // `vector` = t * H + h.
  void add(std::size_t vector, double sink, const std::vector<std::int64_t>& keys) {
    const double* q = &q_[vector * dim_];
    const double* grad_out = &grad_out_[vector * kValueDim];
    const double* out = &out_[vector * kValueDim];
    const double scale = problem_.softmax_scale;
    Row logits;
    for (const std::int64_t key : keys) logits.push_back(scale * dot(q, row(key), dim_));
    const Row p = probabilities(logits, sink);

    const double d = dot(grad_out, out, kValueDim);
    double product_square = 0;  // of grad_out * out
    for (std::size_t c = 0; c < kValueDim; ++c) product_square += std::pow(grad_out[c] * out[c], 2);
    const double d_error = kBFloat16 * std::sqrt(product_square);
    const double q_length = length_of(q, dim_), grad_length = length_of(grad_out, kValueDim);

    double out_square = 0, d_s_square = 0;
    Row absolute(dim_, 0.0), mean(dim_, 0.0);
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double* key = row(keys[j]);
      const auto s = static_cast<std::size_t>(keys[j]);
      const double d_s = scale * p[j] * (dot(grad_out, key, kValueDim) - d);
      const double term = scale * p[j] * absolute_dot(grad_out, key, kValueDim);
      out_square += std::pow(p[j] * length_of(key, kValueDim), 2);
      d_s_square += std::pow(d_s * length_of(key, dim_), 2);
      for (std::size_t c = 0; c < dim_; ++c) {
        absolute[c] += term * std::abs(key[c]);
        mean[c] += p[j] * key[c];
        absolute_kv_[s * dim_ + c] += term * std::abs(q[c]);
      }
      result_.grad_kv[s] += std::pow(kBFloat16 * d_s * q_length, 2) +
                            std::pow(kBFloat16 * p[j] * grad_length, 2) +
                            std::pow(scale * p[j] * d_error * q_length, 2);
    }
    result_.out[vector] += kBFloat16 * std::sqrt(out_square);
    result_.grad_q_tensor[vector] = kFloat32Sum * length_of(absolute.data(), dim_);
    result_.grad_q[vector] += result_.grad_q_tensor[vector] + kBFloat16 * std::sqrt(d_s_square) +
                              scale * d_error * length_of(mean.data(), dim_);
    sink_square_ += std::pow(p.back(), 2) * product_square;
  }

  const double* row(std::int64_t key) const { return &kv_[static_cast<std::size_t>(key) * dim_]; }

  const AttentionProblem& problem_;
  std::size_t dim_;
  Row q_, kv_, grad_out_, out_;
  Row absolute_kv_;  // [T_k, D]
  double sink_square_ = 0;
  Allowance result_;
};

}  // namespace

double norm(const std::vector<double>& values) { return length_of(values.data(), values.size()); }

Allowance allowance_of(const AttentionProblem& problem, const AttentionResult& want) {
  Sums sums(problem, want);
  for (std::int64_t t = 0; t < problem.t_q(); ++t) sums.add_row(t);
  return sums.finish();
}

}  // namespace flashdsa::test
