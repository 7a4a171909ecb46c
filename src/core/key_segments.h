#pragma once

#include <cstdint>

namespace flashdsa::core {

/// Cuts T_k keys into segments of neighbours, for the phase of a backward in which many query rows
/// add to the same keys. A segment is one task: it walks the rows in ascending order and adds their
/// slots that lie in it. So the sums of a key are one chain of additions in the order of the rows,
/// whatever the threads and segments: no atomics, no copies of the sums.
class KeySegments {
 public:
  /// `key_bytes` is the size of one key's sums. A segment's sums should stay in second-level cache,
  /// and a row of `topk` slots should have enough of them in a segment to fill tiles; several
  /// threads get several segments each.
  KeySegments(std::int64_t t_k, std::int64_t key_bytes, std::int64_t topk, int threads);

  std::int64_t count() const { return count_; }

  /// Sorts a row's slots by segment: `slots` [key_count] receives positions into `keys`, ascending
  /// inside a segment; those of segment s are offsets[s] .. offsets[s+1] - 1, of count() segments.
  void sort(const std::int32_t* keys, std::int32_t key_count, std::int32_t* slots,
            std::int32_t* offsets) const;

 private:
  std::int64_t count_;
  std::int64_t keys_per_segment_;
};

}  // namespace flashdsa::core
