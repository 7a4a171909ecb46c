// Indexer top-k in float64, as SPEC section 3 writes it: the oracle that ships. All scores of a
// row, then a sort by the total order.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/parallel.h"
#include "core/progress.h"
#include "indexer/backends.h"

namespace flashdsa::indexer::reference {
namespace {

double read(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    default:
      return static_cast<const double*>(data)[i];
  }
}

// Eight partial sums let the compiler use vectors.
double dot(const double* a, const double* b) {
  constexpr std::int64_t kSums = 8;
  double sums[kSums] = {};
  for (std::int64_t c = 0; c < kIndexDim; c += kSums) {
    for (std::int64_t i = 0; i < kSums; ++i) sums[i] += a[c + i] * b[c + i];
  }
  return std::accumulate(sums, sums + kSums, 0.0);
}

// sum_h w * max(0, q . k) of row t and one key; max(0, NaN) is NaN.
double score(const TopkParams& p, std::int64_t t, const std::vector<double>& q, std::int64_t key) {
  double k[kIndexDim];
  for (std::int64_t c = 0; c < kIndexDim; ++c) {
    k[c] = read(p.index_k, p.real, key * p.index_k_row_stride + c);
  }
  double sum = 0;
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const double product = dot(q.data() + h * kIndexDim, k);
    const double weight = read(p.head_weights, p.weights_dtype, t * p.head_weights_row_stride + h);
    sum += weight * (product < 0 ? 0 : product);
  }
  return sum;
}

// Strict total order: NaN first, then higher scores, then smaller keys; -0 equals +0.
bool ranks_before(double score_a, std::int64_t key_a, double score_b, std::int64_t key_b) {
  const bool nan_a = std::isnan(score_a), nan_b = std::isnan(score_b);
  if (nan_a != nan_b) return nan_a;
  if (!nan_a && score_a != score_b) return score_a > score_b;
  return key_a < key_b;
}

void select_row(const TopkParams& p, std::int64_t t) {
  // Keys outside the storage are not seen.
  const std::int64_t start = p.starts[t];
  const std::int64_t length = std::max(p.causal_lengths[t], 0);
  const std::int64_t begin = std::max<std::int64_t>(start, 0);
  const std::int64_t end = std::max(begin, std::min(start + length, p.t_k));
  const std::int64_t visible = end - begin;
  const std::int64_t chosen = std::min(visible, p.topk);

  std::vector<std::int64_t> order(static_cast<std::size_t>(visible));
  std::iota(order.begin(), order.end(), 0);
  std::vector<double> scores;
  if (visible > p.topk || p.topk_scores != nullptr) {
    std::vector<double> q(static_cast<std::size_t>(p.index_heads * kIndexDim));
    for (std::int64_t i = 0; i < p.index_heads * kIndexDim; ++i) {
      q[static_cast<std::size_t>(i)] =
          read(p.index_q, p.real,
               t * p.index_q_row_stride + i / kIndexDim * p.index_q_head_stride + i % kIndexDim);
    }
    for (std::int64_t s = begin; s < end; ++s) scores.push_back(score(p, t, q, s));
    std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
      return ranks_before(scores[static_cast<std::size_t>(a)], a,
                          scores[static_cast<std::size_t>(b)], b);
    });
    order.resize(static_cast<std::size_t>(chosen));
    std::sort(order.begin(), order.end());
  }
  if (p.topk_length != nullptr) p.topk_length[t] = static_cast<std::int32_t>(chosen);
  for (std::int64_t j = 0; j < p.topk; ++j) {
    const std::int64_t at = t * p.topk + j;
    const bool filled = j < chosen;
    const std::int64_t pick = filled ? order[static_cast<std::size_t>(j)] : 0;
    p.topk_indices[at] = filled ? static_cast<std::int32_t>(begin + pick) : -1;
    if (p.topk_scores == nullptr) continue;
    const double value =
        filled ? scores[static_cast<std::size_t>(pick)] : -std::numeric_limits<double>::infinity();
    if (p.real == DType::kFloat64) {
      static_cast<double*>(p.topk_scores)[at] = value;
    } else {
      static_cast<float*>(p.topk_scores)[at] = static_cast<float>(value);
    }
  }
}

}  // namespace

std::string refusal(const TopkParams& params) {
  return params.device.kind == DeviceKind::kCpu ? "" : "the tensors are not on the host";
}

void topk(const TopkParams& params, const Runtime& runtime) {
  core::ProgressReporter progress(runtime, params.t_q);
  core::parallel_for(core::thread_count(runtime, params.t_q), params.t_q, [&](std::int64_t t, int) {
    select_row(params, t);
    progress.advance();
  });
}

}  // namespace flashdsa::indexer::reference
