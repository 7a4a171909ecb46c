#include "indexer/reference/rows.h"

#include <numeric>

namespace flashdsa::indexer::reference {

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

void write(void* data, DType dtype, std::int64_t i, double value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[i] = BFloat16(static_cast<float>(value));
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(data)[i] = value;
  }
}

Key read_key(const CommonParams& params, std::int64_t key) {
  Key k;
  std::int64_t from = key * params.index_k_row_stride;
  for (double& channel : k) channel = read(params.index_k, params.real, from++);
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
      *to++ = read(params.index_q, params.real, from + c);
    }
    weights[static_cast<std::size_t>(h)] =
        read(params.head_weights, params.weights_dtype, t * params.head_weights_row_stride + h);
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
