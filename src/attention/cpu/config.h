#pragma once

namespace flashdsa::attention::cpu {

// Keys per block. A block's copied keys, its packed pairs, its logits and the row's accumulators
// together take about 0.6 MB at H = 64, which stays in a 1 MB second-level cache.
inline constexpr int kBlockKeys = 144;

}  // namespace flashdsa::attention::cpu
