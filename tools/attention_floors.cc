#include "tools/attention_floors.h"

#include <algorithm>
#include <cmath>

#include "tools/verify.h"

namespace flashdsa::tools {
namespace {

constexpr std::size_t kValueDim = 512;

double square(double x) { return x * x; }

double norm(std::span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

// Eight sums side by side: the order of a plain sum would keep the compiler from vector code.
template <typename Term>
double sum_of(std::size_t count, const Term& term) {
  constexpr std::size_t kLanes = 8;
  double lanes[kLanes] = {};
  for (std::size_t c = 0; c < count; c += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(c + lane);
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// ln(exp(lse) + exp(sink)).
double log_denominator(double lse, double sink) {
  const double top = std::max(lse, sink);
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(lse - top) + std::exp(sink - top));
}

// Everything that concerns one head of the row.
class HeadFloors {
 public:
  HeadFloors(const AttentionRow& row, std::size_t head)
      : row_(row), head_(head), dim_(static_cast<std::size_t>(row.head_dim)) {
    const double sink = row.attn_sink.empty() ? -INFINITY : row.attn_sink[head];
    const double denominator = log_denominator(row.lse[head], sink);
    p_.resize(row.slots.size());
    for (std::size_t j = 0; j < p_.size(); ++j) {
      const double* q = row.q.data() + head * dim_;
      const double* k = key(j);
      const double logit =
          row.softmax_scale * sum_of(dim_, [&](std::size_t c) { return q[c] * k[c]; });
      p_[j] = std::exp(logit - denominator);  // a sink of +inf makes it 0
    }
    p_sink_ = std::isinf(sink) ? (sink > 0 ? 1.0 : 0.0) : std::exp(sink - denominator);
  }

  void add_to(AttentionFloors& floors) const {
    double squares = 0;
    for (std::size_t j = 0; j < p_.size(); ++j)
      squares += square(p_[j]) * row_.value_squares[slot(j)];
    floors.out[head_] = kBf16Rounding * std::sqrt(squares);
    if (!row_.grad_out.empty()) add_gradients(floors);
  }

 private:
  void add_gradients(AttentionFloors& floors) const {
    const double* g = row_.grad_out.data() + head_ * kValueDim;
    const double* out = row_.out.data() + head_ * kValueDim;
    const double d = sum_of(kValueDim, [&](std::size_t c) { return g[c] * out[c]; });
    const double d_squares =
        sum_of(kValueDim, [&](std::size_t c) { return square(g[c] * out[c]); });
    const double d_error = kBf16Rounding * std::sqrt(d_squares);
    const double q_size = norm(row_.q.subspan(head_ * dim_, dim_));
    const double g_size = norm(row_.grad_out.subspan(head_ * kValueDim, kValueDim));
    const double scale = row_.softmax_scale;
    double* terms = floors.kv_terms.data() + head_ * p_.size();
    std::vector<double> absolute(dim_), mean_key(dim_);
    double d_s_squares = 0;
    for (std::size_t j = 0; j < p_.size(); ++j) {
      const double* k = key(j);
      const double d_p = sum_of(kValueDim, [&](std::size_t c) { return g[c] * k[c]; });
      const double size = sum_of(kValueDim, [&](std::size_t c) { return std::abs(g[c] * k[c]); });
      const double d_s = scale * p_[j] * (d_p - d);
      terms[j] = scale * p_[j] * size;
      for (std::size_t c = 0; c < dim_; ++c) absolute[c] += terms[j] * std::abs(k[c]);
      for (std::size_t c = 0; c < dim_; ++c) mean_key[c] += p_[j] * k[c];
      d_s_squares += square(d_s) * row_.key_squares[slot(j)];
      floors.rounded_kv[j] += square(kBf16Rounding * d_s * q_size) +
                              square(kBf16Rounding * p_[j] * g_size) +
                              square(scale * p_[j] * d_error * q_size);
    }
    floors.absolute_q[head_] = norm(absolute);
    floors.rounded_q[head_] =
        kBf16Rounding * std::sqrt(d_s_squares) + scale * d_error * norm(mean_key);
    floors.sink_squares += square(p_sink_) * d_squares;
  }

  std::size_t slot(std::size_t j) const { return static_cast<std::size_t>(row_.slots[j]); }
  const double* key(std::size_t j) const { return row_.keys.data() + slot(j) * dim_; }

  const AttentionRow& row_;
  std::size_t head_;
  std::size_t dim_;
  std::vector<double> p_;  // [n]
  double p_sink_ = 0;
};

}  // namespace

AttentionFloors attention_floors(const AttentionRow& row) {
  const auto heads = static_cast<std::size_t>(row.heads);
  AttentionFloors floors;
  floors.out.resize(heads);
  if (!row.grad_out.empty()) {
    floors.absolute_q.resize(heads);
    floors.rounded_q.resize(heads);
    floors.kv_terms.resize(heads * row.slots.size());
    floors.rounded_kv.resize(row.slots.size());
  }
  for (std::size_t head = 0; head < heads; ++head) HeadFloors(row, head).add_to(floors);
  return floors;
}

}  // namespace flashdsa::tools
