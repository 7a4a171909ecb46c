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
#include "indexer/reference/rows.h"

namespace flashdsa::indexer::reference {
namespace {

// The keys that row t sees; those outside the storage are not seen.
struct Range {
  std::int64_t begin;
  std::int64_t end;
};

Range visible_keys(const TopkParams& p, std::int64_t t) {
  const std::int64_t start = p.starts[t];
  const std::int64_t length = std::max(p.causal_lengths[t], 0);
  const std::int64_t begin = std::max<std::int64_t>(start, 0);
  return {begin, std::max(begin, std::min(start + length, p.t_k))};
}

// One thread's memory, taken before the first row, so that a call that runs out of it has written
// nothing.
struct Workspace {
  Workspace(const TopkParams& p, std::int64_t most_keys)
      : query(p),
        scores(static_cast<std::size_t>(most_keys)),
        order(static_cast<std::size_t>(most_keys)) {}

  Query query;
  std::vector<double> scores;       // of the visible keys
  std::vector<std::int64_t> order;  // their offsets from the first, best first
};

// sum_h w * max(0, q . k) of the row that was read and one key; max(0, NaN) is NaN.
double score(const TopkParams& p, std::int64_t key, const Query& query) {
  const Key k = read_key(p, key);
  double sum = 0;
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const double product = query.dot(h, k);
    sum += query.weights[static_cast<std::size_t>(h)] * (product < 0 ? 0 : product);
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

void select_row(const TopkParams& p, std::int64_t t, Workspace& work) {
  const Range keys = visible_keys(p, t);
  const std::int64_t visible = keys.end - keys.begin;
  const std::int64_t chosen = std::min(visible, p.topk);
  const auto order = work.order.begin();
  std::iota(order, order + visible, 0);
  if (visible > p.topk || p.topk_scores != nullptr) {
    work.query.read_row(p, t);
    for (std::int64_t i = 0; i < visible; ++i) {
      work.scores[static_cast<std::size_t>(i)] = score(p, keys.begin + i, work.query);
    }
    std::sort(order, order + visible, [&](std::int64_t a, std::int64_t b) {
      return ranks_before(work.scores[static_cast<std::size_t>(a)], a,
                          work.scores[static_cast<std::size_t>(b)], b);
    });
    std::sort(order, order + chosen);
  }
  if (p.topk_length != nullptr) p.topk_length[t] = static_cast<std::int32_t>(chosen);
  for (std::int64_t j = 0; j < p.topk; ++j) {
    const std::int64_t at = t * p.topk + j;
    const bool filled = j < chosen;
    const std::int64_t pick = filled ? order[j] : 0;
    p.topk_indices[at] = filled ? static_cast<std::int32_t>(keys.begin + pick) : -1;
    if (p.topk_scores == nullptr) continue;
    const double value = filled ? work.scores[static_cast<std::size_t>(pick)]
                                : -std::numeric_limits<double>::infinity();
    if (p.real == DType::kFloat64) {
      static_cast<double*>(p.topk_scores)[at] = value;
    } else {
      static_cast<float*>(p.topk_scores)[at] = static_cast<float>(value);
    }
  }
}

}  // namespace

std::string refusal(const CommonParams& params) {
  return params.device.kind == DeviceKind::kCpu ? "" : "the tensors are not on the host";
}

void topk(const TopkParams& params, const Runtime& runtime) {
  std::int64_t most_keys = 0;
  for (std::int64_t t = 0; t < params.t_q; ++t) {
    const Range keys = visible_keys(params, t);
    most_keys = std::max(most_keys, keys.end - keys.begin);
  }
  const int threads = core::thread_count(runtime, params.t_q);
  std::vector<Workspace> workspaces(static_cast<std::size_t>(threads),
                                    Workspace(params, most_keys));
  core::ProgressReporter progress(runtime, params.t_q);
  core::parallel_for(threads, params.t_q, [&](std::int64_t t, int worker) {
    select_row(params, t, workspaces[static_cast<std::size_t>(worker)]);
    progress.advance();
  });
}

}  // namespace flashdsa::indexer::reference
