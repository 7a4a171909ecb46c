#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "attention/sm90/rows.h"
#include "core/scratch.h"

namespace flashdsa::attention::sm90 {

/// BF16 rows as the kernels read them, see rows_are_aligned: the caller's, or a dense copy in
/// scratch, which is queued.
class AlignedRows {
 public:
  AlignedRows(const StridedRows& rows, const Runtime& runtime, Device device, cudaStream_t stream);

  const __nv_bfloat16* data;
  std::int64_t outer_stride;
  std::int64_t inner_stride;

 private:
  std::unique_ptr<core::Scratch> copy_;
};

}  // namespace flashdsa::attention::sm90
