#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashdsa::attention::sm90 {

/// The slots of every row, as SPEC section 5 counts them.
struct SlotRows {
  const int32_t* topk_indices;  // [T_q, K]
  int64_t row_stride;
  const int32_t* topk_length;  // [T_q] or null
  int64_t t_q;
  int topk;
  int t_k;
};

/// Queues extents [T_q]: the row's last counted slot + 1, 0 for a row without keys.
void launch_row_extents(const SlotRows& rows, int32_t* extents, cudaStream_t stream);

/// BF16 [outer, inner, width] with any strides of the first two axes.
struct StridedRows {
  const __nv_bfloat16* data;
  int64_t outer;
  int64_t inner;
  int width;
  int64_t outer_stride;
  int64_t inner_stride;
};

/// Whether `data` lies at a multiple of 16 bytes.
bool is_aligned(const void* data);

/// Whether every row begins at a multiple of 16 bytes, and the outer stride is below 2^31 bytes.
bool rows_are_aligned(const StridedRows& rows);

/// Queues a dense copy of rows that are not. outer * inner > 0.
void launch_pack_rows(const StridedRows& rows, __nv_bfloat16* to, cudaStream_t stream);

}  // namespace flashdsa::attention::sm90
