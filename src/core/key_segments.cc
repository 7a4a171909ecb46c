#include "core/key_segments.h"

#include <algorithm>

namespace flashdsa::core {
namespace {

constexpr std::int64_t kSegmentBytes = std::int64_t{512} << 10;
constexpr std::int64_t kMinSlotsPerSegment = 64;

}  // namespace

KeySegments::KeySegments(std::int64_t t_k, std::int64_t key_bytes, std::int64_t topk, int threads) {
  const std::int64_t wanted = t_k * key_bytes / kSegmentBytes + 1;
  const std::int64_t most = std::max<std::int64_t>(topk / kMinSlotsPerSegment, 1);
  const std::int64_t least = threads > 1 ? 4 * threads : 1;
  count_ = std::max(std::min(wanted, most), least);
  keys_per_segment_ = std::max<std::int64_t>((t_k + count_ - 1) / count_, 1);
}

void KeySegments::sort(const std::int32_t* keys, std::int32_t key_count, std::int32_t* slots,
                       std::int32_t* offsets) const {
  // A stable counting sort.
  std::fill_n(offsets, count_ + 1, 0);
  for (std::int32_t j = 0; j < key_count; ++j) ++offsets[keys[j] / keys_per_segment_ + 1];
  for (std::int64_t s = 0; s < count_; ++s) offsets[s + 1] += offsets[s];
  for (std::int32_t j = 0; j < key_count; ++j) slots[offsets[keys[j] / keys_per_segment_]++] = j;
  // Every offset now stands at its segment's end: move them back by one.
  for (std::int64_t s = count_; s > 0; --s) offsets[s] = offsets[s - 1];
  offsets[0] = 0;
}

}  // namespace flashdsa::core
