#pragma once

#include <cstdint>
#include <vector>

#include "flashdsa/tensor_view.h"

namespace flashdsa::tools {

/// Rows [begin, end) of the first axis as FP64, row-major. The tensor is contiguous and holds
/// bfloat16, float32 or float64; throws Error(kInternal) for anything else.
std::vector<double> to_double(const TensorView& tensor, std::int64_t begin, std::int64_t end);

/// One row of the first axis, written to `target`.
void copy_row(const TensorView& tensor, std::int64_t row, double* target);

/// Elements of one row of the first axis.
std::int64_t row_elements(const TensorView& tensor);

}  // namespace flashdsa::tools
