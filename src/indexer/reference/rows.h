#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "indexer/params.h"

namespace flashdsa::indexer::reference {

using Key = std::array<double, kIndexDim>;

Key read_key(const CommonParams& params, std::int64_t key);

/// A query row and its weights. Memory is taken when it is made, not when a row is read.
struct Query {
  explicit Query(const CommonParams& params);

  void read_row(const CommonParams& params, std::int64_t t);
  double dot(std::int64_t h, const Key& key) const;

  std::vector<double> q;        // [H_index, 128]
  std::vector<double> weights;  // [H_index]
};

}  // namespace flashdsa::indexer::reference
