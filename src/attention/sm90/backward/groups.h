#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "attention/sm90/backward/config.h"
#include "attention/sm90/rows.h"
#include "selection/plan_format.h"

// The items that the kernel for groups walks, and the rows that the kernel for few heads takes: an
// item of several tokens is the former's, but its tokens stand alone where an input is not finite.
// A tile multiplies every key of an item with every row, with P = dS = 0 where the key is not the
// row's, and 0 * NaN is NaN.
//
// Only a key, a query and grad_out matter: the products multiply nothing else with zero. What lse,
// out or a sink spoil stays in their own rows of P and dS, and there in the keys of the row.

namespace flashdsa::attention::sm90::backward_pass {

/// What the items are made from. Rows are aligned to 16 bytes.
struct GroupInputs {
  selection::PlanView plan;
  StridedRows q;         // [T_q, H, D]
  StridedRows grad_out;  // [T_q, H, 512]
  StridedRows kv;        // [T_k, 1, D]
};

/// Device memory of the items and rows.
struct GroupItems {
  GroupItem* items;      // [T_q], counts->items of them
  int32_t* single_rows;  // [T_q], counts->rows of them
  GroupCounts* counts;   // [1]
  uint8_t* bad_keys;     // [T_k], 1 where the key is not finite
  int32_t* numbers;      // [T_k], 0, 1, ...; the keys of ranges
};

/// Queues both lists. Their order is about that of the plan and varies from run to run.
void launch_group_items(const GroupInputs& inputs, const GroupItems& to, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90::backward_pass
