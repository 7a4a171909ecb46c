#include "indexer/cpu/row_selection.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

namespace flashdsa::indexer::cpu {
namespace {

// SPEC section 3's order of scores as an order of integers: NaN above +inf, -0 equal to +0.
std::uint32_t rank(float score) {
  if (std::isnan(score)) return std::numeric_limits<std::uint32_t>::max();
  const auto bits = std::bit_cast<std::uint32_t>(score + 0.0f);  // -0 + 0 is +0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

}  // namespace

void RowSelection::append(const Kernels& kernels, const float* scores, std::int32_t count,
                          std::int32_t first_key) {
  if (has_threshold_) {
    size_ +=
        kernels.append_above(scores, count, threshold_, first_key, scores_ + size_, keys_ + size_);
  } else {
    std::copy_n(scores, count, scores_ + size_);
    for (std::int32_t j = 0; j < count; ++j) keys_[size_ + j] = first_key + j;
    size_ += count;
  }
  if (size_ >= 2 * topk_) cut();
}

void RowSelection::cut() {
  if (size_ <= topk_) return;
  std::transform(scores_, scores_ + size_, ranks_, rank);
  std::nth_element(ranks_, ranks_ + topk_ - 1, ranks_ + size_, std::greater<>());
  const std::uint32_t last = ranks_[topk_ - 1];
  // nth_element leaves only ranks >= last in front of the K-th.
  std::int64_t ties = std::count(ranks_, ranks_ + topk_, last);
  std::int32_t kept = 0;
  for (std::int32_t i = 0; i < size_; ++i) {
    const std::uint32_t mine = rank(scores_[i]);
    if (mine < last || (mine == last && ties-- <= 0)) continue;
    if (mine == last) threshold_ = scores_[i];
    scores_[kept] = scores_[i];
    keys_[kept++] = keys_[i];
  }
  size_ = kept;
  has_threshold_ = true;
}

}  // namespace flashdsa::indexer::cpu
