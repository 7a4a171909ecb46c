#include "indexer/reference/rows.h"

#include <numeric>

#include "core/element.h"

namespace flashdsa::indexer::reference {

using core::read_element;

Key read_key(const CommonParams& params, std::int64_t key) {
  Key k;
  std::int64_t from = key * params.index_k_row_stride;
  for (double& channel : k) channel = read_element(params.index_k, params.real, from++);
  return k;
}

Query::Query(const CommonParams& params)
    : q(static_cast<std::size_t>(params.index_heads * kIndexDim)),
      weights(static_cast<std::size_t>(params.index_heads)) {}

void Query::read_row(const CommonParams& params, std::int64_t t) {
  auto to = q.begin();
  for (std::int64_t h = 0; h < params.index_heads; ++h) {
    const std::int64_t from = t * params.index_q_row_stride + h * params.index_q_head_stride;
    for (std::int64_t c = 0; c < kIndexDim; ++c) {
      *to++ = read_element(params.index_q, params.real, from + c);
    }
    weights[static_cast<std::size_t>(h)] = read_element(params.head_weights, params.weights_dtype,
                                                        t * params.head_weights_row_stride + h);
  }
}

// Eight partial sums let the compiler use vectors.
double Query::dot(std::int64_t h, const Key& key) const {
  constexpr std::size_t kSums = 8;
  const double* head = q.data() + h * kIndexDim;
  double sums[kSums] = {};
  for (std::size_t c = 0; c < key.size(); c += kSums) {
    for (std::size_t i = 0; i < kSums; ++i) sums[i] += head[c + i] * key[c + i];
  }
  return std::accumulate(sums, sums + kSums, 0.0);
}

}  // namespace flashdsa::indexer::reference
