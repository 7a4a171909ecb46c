#pragma once

#include <algorithm>

#include "flashdsa/tensor_view.h"

/// Views that a call has to refuse, made of good ones.
namespace flashdsa::test {

inline TensorView with_dtype(TensorView view, DType dtype) {
  view.dtype = dtype;
  return view;
}

/// A contiguous view of the same memory in another shape; a refused call never reads it.
inline TensorView with_shape(const TensorView& view, const Shape& shape) {
  return TensorView::contiguous(view.data, view.dtype, shape);
}

inline TensorView with_strides(TensorView view, const Shape& strides) {
  std::copy(strides.begin(), strides.end(), view.strides.begin());
  return view;
}

inline TensorView null(TensorView view) {
  view.data = nullptr;
  return view;
}

}  // namespace flashdsa::test
