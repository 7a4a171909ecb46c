// Sparse MLA attention in float64, as SPEC sections 5 and 6 write it: the oracle that ships. Every
// intermediate result is float64 and made from the inputs alone: the backward takes neither `out`
// nor `lse` of the forward call, whose rounding would enter D and P.
//
// Rows go over threads in parallel; grad_kv is added up by one thread per stretch of channels, in
// the order of the rows, so that the result does not depend on the number of threads. Memory is
// taken before the first row, so that a call that runs out of it has written nothing.

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "attention/backends.h"
#include "core/element.h"
#include "core/parallel.h"
#include "core/progress.h"

namespace flashdsa::attention::reference {
namespace {

using core::read_element;
using core::write_element;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Of lse, max_logits, attn_sink and grad_attn_sink.
DType single(const CommonParams& p) {
  return p.real == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// `count` rows of `width` numbers, row i at offset(i), into a dense float64 matrix.
template <typename Offset>
void gather(const void* data, DType dtype, std::int64_t count, std::int64_t width, Offset offset,
            std::vector<double>& dense) {
  double* to = dense.data();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t from = offset(i);
    for (std::int64_t c = 0; c < width; ++c) *to++ = read_element(data, dtype, from + c);
  }
}

// `count` is a multiple of the partial sums, which let the compiler use vectors.
double dot(const double* a, const double* b, std::int64_t count) {
  constexpr std::int64_t kSums = 8;
  double sums[kSums] = {};
  for (std::int64_t c = 0; c < count; c += kSums) {
    for (std::int64_t i = 0; i < kSums; ++i) sums[i] += a[c + i] * b[c + i];
  }
  return std::accumulate(sums, sums + kSums, 0.0);
}

std::size_t product(std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); }

// One row's inputs and softmax. Matrices are dense, row-major, with room for K keys.
struct Row {
  explicit Row(const CommonParams& params)
      : keys(product(params.topk, 1)),
        q(product(params.heads, params.head_dim)),
        kv(product(params.topk, params.head_dim)),
        p(product(params.heads, params.topk)),
        lse(product(params.heads, 1)),
        max_logits(product(params.heads, 1)),
        p_sink(product(params.heads, 1)) {}

  std::int64_t n = 0;              // counted slots
  std::vector<std::int64_t> keys;  // [n], in slot order
  std::vector<double> q;           // [H, D]
  std::vector<double> kv;          // [n, D]
  std::vector<double> p;           // [H, n]
  std::vector<double> lse;         // [H], without the sink
  std::vector<double> max_logits;  // [H]
  std::vector<double> p_sink;      // [H]
};

// The keys of row t's counted slots.
void find_keys(const CommonParams& params, std::int64_t t, Row& row) {
  const std::int64_t slots = params.topk_length == nullptr
                                 ? params.topk
                                 : std::clamp<std::int64_t>(params.topk_length[t], 0, params.topk);
  row.n = 0;
  for (std::int64_t j = 0; j < slots; ++j) {
    const std::int64_t key = params.topk_indices[t * params.topk_indices_row_stride + j];
    if (key >= 0 && key < params.t_k) row.keys[static_cast<std::size_t>(row.n++)] = key;
  }
}

// P, lse, max_logits and P_sink of head h.
void softmax(const CommonParams& params, std::int64_t h, Row& row) {
  const std::int64_t n = row.n;
  const auto head = static_cast<std::size_t>(h);
  double* p = row.p.data() + h * n;
  double top = -kInfinity;
  for (std::int64_t j = 0; j < n; ++j) {
    p[j] = params.softmax_scale * dot(row.q.data() + h * params.head_dim,
                                      row.kv.data() + j * params.head_dim, params.head_dim);
    if (p[j] > top || std::isnan(p[j])) top = p[j];  // NaN stays: nothing is above it
  }
  double sum = 0;
  for (std::int64_t j = 0; j < n; ++j) sum += std::exp(p[j] - top);
  const double lse = top + std::log(sum);
  row.lse[head] = lse;
  row.max_logits[head] = top;

  double whole = lse;  // ln of the denominator, sink included
  row.p_sink[head] = 0;
  if (params.attn_sink != nullptr) {
    const double sink = read_element(params.attn_sink, single(params), h);
    const double larger = std::max(lse, sink);
    whole = std::isinf(sink) && sink > 0
                ? kInfinity
                : larger + std::log(std::exp(lse - larger) + std::exp(sink - larger));
    row.p_sink[head] = std::isinf(whole) ? 1 : std::exp(sink - whole);
  }
  for (std::int64_t j = 0; j < n; ++j) p[j] = std::exp(p[j] - whole);
}

// Reads row t and makes its softmax; a row without keys is not read.
void load_row(const CommonParams& params, std::int64_t t, Row& row) {
  find_keys(params, t, row);
  if (row.n == 0) return;
  gather(
      params.q, params.real, params.heads, params.head_dim,
      [&](std::int64_t h) { return t * params.q_row_stride + h * params.q_head_stride; }, row.q);
  gather(
      params.kv, params.real, row.n, params.head_dim,
      [&](std::int64_t j) { return row.keys[static_cast<std::size_t>(j)] * params.kv_row_stride; },
      row.kv);
  for (std::int64_t h = 0; h < params.heads; ++h) softmax(params, h, row);
}

using Value = std::array<double, kValueDim>;

// out of head h: sum_j P * value; 0 for a row without keys.
Value weighted_values(const CommonParams& params, const Row& row, std::int64_t h) {
  Value out{};
  for (std::int64_t j = 0; j < row.n; ++j) {
    const double p = row.p[static_cast<std::size_t>(h * row.n + j)];
    const double* value = row.kv.data() + j * params.head_dim;
    for (std::size_t c = 0; c < out.size(); ++c) out[c] += p * value[c];
  }
  return out;
}

void forward_row(const ForwardParams& params, std::int64_t t, Row& row) {
  load_row(params, t, row);
  const bool empty = row.n == 0;
  for (std::int64_t h = 0; h < params.heads; ++h) {
    const std::int64_t at = t * params.heads + h;
    const auto head = static_cast<std::size_t>(h);
    const Value out = weighted_values(params, row, h);
    for (std::size_t c = 0; c < out.size(); ++c) {
      write_element(params.out, params.real, at * kValueDim + static_cast<std::int64_t>(c), out[c]);
    }
    write_element(params.lse, single(params), at, empty ? -kInfinity : row.lse[head]);
    if (params.max_logits != nullptr) {
      write_element(params.max_logits, single(params), at,
                    empty ? -kInfinity : row.max_logits[head]);
    }
  }
}

// What a row contributes to grad_kv and grad_attn_sink.
struct RowGradients {
  explicit RowGradients(const BackwardParams& params)
      : row(params),
        grad_out(product(params.heads, kValueDim)),
        ds(product(params.heads, params.topk)),
        sink_terms(product(params.heads, 1)),
        grad_q(product(params.head_dim, 1)) {}

  Row row;
  std::vector<double> grad_out;    // [H, 512]
  std::vector<double> ds;          // [H, n]
  std::vector<double> sink_terms;  // [H], P_sink * D
  std::vector<double> grad_q;      // [D], of the head at work
};

// dS, grad_q and the sink's term of head h; zeros for a row without keys.
void backward_head(const BackwardParams& params, std::int64_t h, RowGradients& g) {
  std::ranges::fill(g.grad_q, 0.0);
  const auto head = static_cast<std::size_t>(h);
  g.sink_terms[head] = 0;
  if (g.row.n == 0) return;
  const double* grad_out = g.grad_out.data() + h * kValueDim;
  const double d = dot(grad_out, weighted_values(params, g.row, h).data(), kValueDim);
  g.sink_terms[head] = g.row.p_sink[head] * d;
  for (std::int64_t j = 0; j < g.row.n; ++j) {
    const auto slot = static_cast<std::size_t>(h * g.row.n + j);
    const double* key = g.row.kv.data() + j * params.head_dim;
    const double ds = g.row.p[slot] * (dot(grad_out, key, kValueDim) - d) * params.softmax_scale;
    g.ds[slot] = ds;
    for (std::size_t c = 0; c < g.grad_q.size(); ++c) g.grad_q[c] += ds * key[c];
  }
}

// Computes a row's dS and writes its grad_q.
void backward_row(const BackwardParams& params, std::int64_t t, RowGradients& g) {
  load_row(params, t, g.row);
  if (g.row.n > 0) {
    gather(
        params.grad_out, params.real, params.heads, kValueDim,
        [&](std::int64_t h) {
          return t * params.grad_out_row_stride + h * params.grad_out_head_stride;
        },
        g.grad_out);
  }
  for (std::int64_t h = 0; h < params.heads; ++h) {
    backward_head(params, h, g);
    const std::int64_t at = (t * params.heads + h) * params.head_dim;
    for (std::int64_t c = 0; c < params.head_dim; ++c) {
      write_element(params.grad_q, params.real, at + c, g.grad_q[static_cast<std::size_t>(c)]);
    }
  }
}

// Adds a row's part of the channels [begin, end) to grad_kv [T_k, D].
void add_to_grad_kv(const BackwardParams& params, const RowGradients& g, std::int64_t begin,
                    std::int64_t end, std::vector<double>& grad_kv) {
  const std::int64_t n = g.row.n;
  for (std::int64_t j = 0; j < n; ++j) {
    double* to = grad_kv.data() + g.row.keys[static_cast<std::size_t>(j)] * params.head_dim;
    for (std::int64_t h = 0; h < params.heads; ++h) {
      const double ds = g.ds[static_cast<std::size_t>(h * n + j)];
      const double p = g.row.p[static_cast<std::size_t>(h * n + j)];
      const double* q = g.row.q.data() + h * params.head_dim;
      const double* grad_out = g.grad_out.data() + h * kValueDim;
      for (std::int64_t c = begin; c < end; ++c) to[c] += ds * q[c];
      for (std::int64_t c = begin; c < std::min(end, kValueDim); ++c) to[c] += p * grad_out[c];
    }
  }
}

}  // namespace

std::string refusal(const CommonParams& params) {
  return params.device.kind == DeviceKind::kCpu ? "" : "the tensors are not on the host";
}

void forward(const ForwardParams& params, const Runtime& runtime) {
  const int threads = core::thread_count(runtime, params.t_q);
  std::vector<Row> rows(static_cast<std::size_t>(threads), Row(params));
  core::ProgressReporter progress(runtime, params.t_q);
  core::parallel_for(threads, params.t_q, [&](std::int64_t t, int worker) {
    forward_row(params, t, rows[static_cast<std::size_t>(worker)]);
    progress.advance();
  });
}

void backward(const BackwardParams& params, const Runtime& runtime) {
  constexpr std::int64_t kChannels = 64;  // of a task that adds to grad_kv
  const int threads = core::thread_count(runtime, params.head_dim / kChannels);
  std::vector<double> grad_kv(static_cast<std::size_t>(params.t_k * params.head_dim));
  std::vector<double> grad_sink(static_cast<std::size_t>(params.heads));
  std::vector<RowGradients> rows(static_cast<std::size_t>(threads), RowGradients(params));
  core::ProgressReporter progress(runtime, params.t_q);
  for (std::int64_t first = 0; first < params.t_q; first += threads) {
    const std::int64_t count = std::min<std::int64_t>(threads, params.t_q - first);
    core::parallel_for(threads, count, [&](std::int64_t i, int) {
      backward_row(params, first + i, rows[static_cast<std::size_t>(i)]);
    });
    core::parallel_for(threads, params.head_dim / kChannels, [&](std::int64_t task, int) {
      for (std::int64_t i = 0; i < count; ++i) {
        add_to_grad_kv(params, rows[static_cast<std::size_t>(i)], task * kChannels,
                       (task + 1) * kChannels, grad_kv);
      }
    });
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::size_t h = 0; h < grad_sink.size(); ++h) {
        grad_sink[h] -= rows[static_cast<std::size_t>(i)].sink_terms[h];
      }
    }
    progress.advance(count);
  }
  for (std::int64_t i = 0; i < params.t_k * params.head_dim; ++i) {
    write_element(params.grad_kv, params.grad_kv_dtype, i, grad_kv[static_cast<std::size_t>(i)]);
  }
  for (std::int64_t h = 0; h < params.heads && params.grad_attn_sink != nullptr; ++h) {
    write_element(params.grad_attn_sink, single(params), h, grad_sink[static_cast<std::size_t>(h)]);
  }
}

}  // namespace flashdsa::attention::reference
