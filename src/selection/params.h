#pragma once

#include <cstdint>

#include "flashdsa/tensor_view.h"
#include "selection/plan_format.h"

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

/// The arrays of a plan, as its builders write them; PlanView says what they hold.
struct PlanArrays {
  PlanItem* items = nullptr;           // [T_q]
  std::int32_t* item_count = nullptr;  // [1]
  std::int32_t* row_first = nullptr;   // [T_q]
  std::int32_t* row_keys = nullptr;    // [T_q]
  std::int32_t* lists = nullptr;       // [T_q, K], where G > 1
  std::uint32_t* masks = nullptr;      // [T_q, G, ceil(K / 32)], where G > 1
};

/// What every backend receives of `build_selection_plan`, validated.
struct PlanParams {
  PlanSizes sizes;
  std::int64_t t_k = 0;
  Device device;

  const std::int32_t* topk_indices = nullptr;  // [T_q, 1, K], last axis contiguous
  std::int64_t topk_indices_row_stride = 0;
  const std::int32_t* topk_length = nullptr;  // [T_q], contiguous, or null
  PlanArrays plan;
};

}  // namespace flashdsa::selection
