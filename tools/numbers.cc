#include "tools/numbers.h"

#include <fmt/format.h>

#include <algorithm>

#include "flashdsa/error.h"

namespace flashdsa::tools {
namespace {

template <typename T>
void convert(const T* source, std::int64_t count, double* target) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    std::transform(source, source + count, target,
                   [](BFloat16 value) { return static_cast<double>(static_cast<float>(value)); });
  } else {
    std::copy(source, source + count, target);
  }
}

// Elements [first, first + count) of the tensor in memory order.
void copy_elements(const TensorView& tensor, std::int64_t first, std::int64_t count,
                   double* target) {
  switch (tensor.dtype) {
    case DType::kBFloat16:
      return convert(tensor.as<BFloat16>() + first, count, target);
    case DType::kFloat32:
      return convert(tensor.as<float>() + first, count, target);
    case DType::kFloat64:
      return convert(tensor.as<double>() + first, count, target);
    default:
      throw Error(ErrorCode::kInternal, fmt::format("{}:{}: expected real numbers, got {}",
                                                    __FILE__, __LINE__, describe(tensor)));
  }
}

}  // namespace

std::int64_t row_elements(const TensorView& tensor) {
  std::int64_t count = 1;
  for (int axis = 1; axis < tensor.rank; ++axis) {
    count *= tensor.shape[static_cast<std::size_t>(axis)];
  }
  return count;
}

std::vector<double> to_double(const TensorView& tensor, std::int64_t begin, std::int64_t end) {
  const std::int64_t row = row_elements(tensor);
  std::vector<double> values(static_cast<std::size_t>((end - begin) * row));
  copy_elements(tensor, begin * row, (end - begin) * row, values.data());
  return values;
}

void copy_row(const TensorView& tensor, std::int64_t row, double* target) {
  const std::int64_t elements = row_elements(tensor);
  copy_elements(tensor, row * elements, elements, target);
}

}  // namespace flashdsa::tools
