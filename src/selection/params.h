#pragma once

#include <cstdint>

#include "flashdsa/tensor_view.h"

namespace flashdsa::selection {

/// What every backend receives of `compact_and_sort`, validated. `sorted_indices` may be `indices`.
struct CompactParams {
  std::int64_t rows = 0;       // T
  std::int64_t topk = 0;       // K, 1..2048
  std::int64_t key_count = 0;  // T_k
  Device device;

  const std::int32_t* indices = nullptr;  // [T, K], last axis contiguous
  std::int64_t indices_row_stride = 0;
  std::int32_t* sorted_indices = nullptr;  // [T, K], contiguous
  std::int32_t* lengths = nullptr;         // [T], contiguous
};

}  // namespace flashdsa::selection
