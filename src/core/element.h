#pragma once

#include <cstdint>

#include "flashdsa/tensor_view.h"

namespace flashdsa::core {

/// Element `i` of a BF16, FP32 or FP64 array, for code that takes all three and is in no hurry.
inline double read_element(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return static_cast<float>(static_cast<const BFloat16*>(data)[i]);
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    default:
      return static_cast<const double*>(data)[i];
  }
}

/// Sets it, rounded once for each narrower type on the way from FP64.
inline void write_element(void* data, DType dtype, std::int64_t i, double value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<BFloat16*>(data)[i] = BFloat16(static_cast<float>(value));
      break;
    case DType::kFloat32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    default:
      static_cast<double*>(data)[i] = value;
  }
}

}  // namespace flashdsa::core
