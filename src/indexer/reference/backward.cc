// Gradients of the selected scores in float64, as SPEC section 3 writes them: the oracle that
// ships.
//
// Rows go over threads in parallel; grad_index_k is added up by one thread per stretch of channels,
// in the order of the rows, so that the result does not depend on the number of threads. Memory is
// taken before the first row, so that a call that runs out of it has written nothing.

#include <algorithm>
#include <vector>

#include "core/element.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "indexer/backends.h"
#include "indexer/reference/rows.h"

namespace flashdsa::indexer::reference {
namespace {

using core::read_element;
using core::write_element;

std::size_t product(std::int64_t a, std::int64_t b) { return static_cast<std::size_t>(a * b); }

// One row's inputs and what it contributes to grad_index_k.
struct Row {
  explicit Row(const BackwardParams& p)
      : query(p),
        keys(product(p.topk, 1)),
        grad_scores(product(p.topk, 1)),
        factors(product(p.topk, p.index_heads)),
        grad_q(product(p.index_heads, kIndexDim)),
        grad_weights(product(p.index_heads, 1)) {}

  Query query;
  std::int64_t n = 0;                // counted slots
  std::vector<std::int64_t> keys;    // [n], in slot order
  std::vector<double> grad_scores;   // [n]
  std::vector<double> factors;       // [n, H_index], g * w * 1[dot > 0]
  std::vector<double> grad_q;        // [H_index, 128]
  std::vector<double> grad_weights;  // [H_index]
};

// The keys of row t's counted slots and the gradients of their scores.
void find_keys(const BackwardParams& p, std::int64_t t, Row& row) {
  const std::int64_t slots =
      p.topk_length == nullptr ? p.topk : std::clamp<std::int64_t>(p.topk_length[t], 0, p.topk);
  row.n = 0;
  for (std::int64_t j = 0; j < slots; ++j) {
    const std::int64_t key = p.topk_indices[t * p.topk_indices_row_stride + j];
    if (key < 0 || key >= p.t_k) continue;
    const auto i = static_cast<std::size_t>(row.n++);
    row.keys[i] = key;
    row.grad_scores[i] =
        read_element(p.grad_scores, p.real == DType::kFloat64 ? p.real : DType::kFloat32,
                     t * p.grad_scores_row_stride + j);
  }
}

// Counted slot i: its factors, its part of grad_q and grad_weights.
void add_slot(const BackwardParams& p, std::int64_t i, Row& row) {
  const auto slot = static_cast<std::size_t>(i);
  const Key key = read_key(p, row.keys[slot]);
  const double g = row.grad_scores[slot];
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const auto head = static_cast<std::size_t>(h);
    const double dot = row.query.dot(h, key);
    const double factor = dot > 0 ? g * row.query.weights[head] : 0;
    row.factors[product(i, p.index_heads) + head] = factor;
    row.grad_weights[head] += g * (dot < 0 ? 0 : dot);  // max(0, NaN) is NaN
    double* grad_q = row.grad_q.data() + h * kIndexDim;
    for (std::size_t c = 0; c < key.size(); ++c) grad_q[c] += factor * key[c];
  }
}

// Row t: everything but grad_index_k. A row without keys is not read.
void backward_row(const BackwardParams& p, std::int64_t t, Row& row) {
  find_keys(p, t, row);
  if (row.n > 0) row.query.read_row(p, t);
  std::ranges::fill(row.grad_q, 0.0);
  std::ranges::fill(row.grad_weights, 0.0);
  for (std::int64_t i = 0; i < row.n; ++i) add_slot(p, i, row);
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const std::int64_t at = t * p.index_heads + h;
    write_element(p.grad_head_weights, p.weights_dtype, at,
                  row.grad_weights[static_cast<std::size_t>(h)]);
    for (std::int64_t c = 0; c < kIndexDim; ++c) {
      write_element(p.grad_index_q, p.real, at * kIndexDim + c,
                    row.grad_q[product(h, kIndexDim) + product(c, 1)]);
    }
  }
}

// Adds a row's part of the channels [begin, end) to grad_index_k [T_k, 128].
void add_to_grad_index_k(const BackwardParams& p, const Row& row, std::int64_t begin,
                         std::int64_t end, std::vector<double>& grad_index_k) {
  for (std::int64_t i = 0; i < row.n; ++i) {
    double* to = grad_index_k.data() + row.keys[static_cast<std::size_t>(i)] * kIndexDim;
    for (std::int64_t h = 0; h < p.index_heads; ++h) {
      const double factor = row.factors[static_cast<std::size_t>(i * p.index_heads + h)];
      const double* q = row.query.q.data() + h * kIndexDim;
      for (std::int64_t c = begin; c < end; ++c) to[c] += factor * q[c];
    }
  }
}

}  // namespace

void backward(const BackwardParams& params, const Runtime& runtime) {
  constexpr std::int64_t kChannels = 16;  // of a task that adds to grad_index_k
  constexpr std::int64_t kTasks = kIndexDim / kChannels;
  const int threads = core::thread_count(runtime, kTasks);
  std::vector<double> grad_index_k(product(params.t_k, kIndexDim));
  std::vector<Row> rows(static_cast<std::size_t>(threads), Row(params));
  core::ProgressReporter progress(runtime, params.t_q);
  for (std::int64_t first = 0; first < params.t_q; first += threads) {
    const std::int64_t count = std::min<std::int64_t>(threads, params.t_q - first);
    core::parallel_for(threads, count, [&](std::int64_t i, int) {
      backward_row(params, first + i, rows[static_cast<std::size_t>(i)]);
    });
    core::parallel_for(threads, kTasks, [&](std::int64_t task, int) {
      for (std::int64_t i = 0; i < count; ++i) {
        add_to_grad_index_k(params, rows[static_cast<std::size_t>(i)], task * kChannels,
                            (task + 1) * kChannels, grad_index_k);
      }
    });
    progress.advance(count);
  }
  for (std::int64_t i = 0; i < params.t_k * kIndexDim; ++i) {
    write_element(params.grad_index_k, params.grad_index_k_dtype, i,
                  grad_index_k[static_cast<std::size_t>(i)]);
  }
}

}  // namespace flashdsa::indexer::reference
