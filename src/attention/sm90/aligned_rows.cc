#include "attention/sm90/aligned_rows.h"

#include <cstddef>

namespace flashdsa::attention::sm90 {

AlignedRows::AlignedRows(const StridedRows& rows, const Runtime& runtime, Device device,
                         cudaStream_t stream)
    : data(rows.data), outer_stride(rows.outer_stride), inner_stride(rows.inner_stride) {
  const std::int64_t count = rows.outer * rows.inner;
  if (count == 0 || rows_are_aligned(rows)) return;
  const auto bytes = static_cast<std::size_t>(count * rows.width) * sizeof(__nv_bfloat16);
  copy_ = std::make_unique<core::Scratch>(runtime, bytes, device);
  auto* packed = static_cast<__nv_bfloat16*>(copy_->data());
  launch_pack_rows(rows, packed, stream);
  data = packed;
  inner_stride = rows.width;
  outer_stride = rows.width * rows.inner;
}

}  // namespace flashdsa::attention::sm90
