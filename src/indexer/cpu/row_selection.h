#pragma once

#include <cstdint>

#include "indexer/cpu/kernels.h"

namespace flashdsa::indexer::cpu {

/// The running exact top-k of one row. Scores arrive in ascending key order; kept candidates stay
/// in that order, so nothing is ever sorted. When 2K candidates are held they are cut to the best
/// K, whose worst score becomes the threshold: a later key must beat it, since among equal scores
/// the smaller key wins.
class RowSelection {
 public:
  /// Entries of each of the buffers for selections of `topk` from blocks of at most `block_keys`.
  static std::int64_t capacity(std::int64_t topk, std::int64_t block_keys) {
    constexpr std::int64_t kSlack = 16;  // what append_above may write beyond its count
    return 2 * topk + block_keys + kSlack;
  }

  RowSelection() = default;

  /// All buffers have `capacity` entries; `ranks` is scratch that rows of one thread may share.
  RowSelection(std::int32_t topk, float* scores, std::int32_t* keys, std::uint32_t* ranks)
      : topk_(topk), scores_(scores), keys_(keys), ranks_(ranks) {}

  /// Takes the scores of the keys first_key, first_key + 1, ...
  void append(const Kernels& kernels, const float* scores, std::int32_t count,
              std::int32_t first_key);

  /// Cuts to the final selection; afterwards scores() and keys() hold size() <= K entries.
  void finish() { cut(); }

  std::int32_t size() const { return size_; }
  const float* scores() const { return scores_; }
  const std::int32_t* keys() const { return keys_; }

 private:
  void cut();

  std::int32_t topk_ = 0;
  std::int32_t size_ = 0;
  bool has_threshold_ = false;
  float threshold_ = 0;
  float* scores_ = nullptr;
  std::int32_t* keys_ = nullptr;
  std::uint32_t* ranks_ = nullptr;
};

}  // namespace flashdsa::indexer::cpu
