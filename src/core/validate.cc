#include "core/validate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace flashdsa::core {
namespace {

// Bytes from the view's first to behind its last element.
std::size_t extent_bytes(const TensorView& view) {
  if (view.elements() == 0) return 0;
  std::int64_t last = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    last += (view.shape[i] - 1) * view.strides[i];
  }
  return static_cast<std::size_t>(last + 1) * dtype_size(view.dtype);
}

bool strides_fit(const TensorView& view, Layout layout) {
  if (view.elements() == 0) return true;
  if (layout == Layout::kContiguous) return view.is_contiguous();
  for (int axis = 0; axis < view.rank; ++axis) {
    const auto i = static_cast<std::size_t>(axis);
    if (view.shape[i] > 1 && view.strides[i] < 0) return false;
  }
  const auto last = static_cast<std::size_t>(view.rank - 1);
  return view.rank == 0 || view.shape[last] <= 1 || view.strides[last] == 1;
}

}  // namespace

std::optional<std::int64_t> Validator::bound(std::string_view symbol) const {
  for (const auto& [name, value] : symbols_) {
    if (name == symbol) return value;
  }
  return std::nullopt;
}

std::int64_t Validator::size(std::string_view symbol) const {
  const auto value = bound(symbol);
  if (!value) {
    throw Error(ErrorCode::kInternal, fmt::format("{}:{}: {} asked for the unbound size {}",
                                                  __FILE__, __LINE__, operation_, symbol));
  }
  return *value;
}

void Validator::refuse(const std::string& sentence) const {
  throw Error(ErrorCode::kValue, fmt::format("{}: {}", operation_, sentence));
}

// "int32 [T_q, 1, K] = [8, 1, 2048]", and the range of every size that nothing has bound yet.
std::string Validator::expectation(const ArgSpec& spec) const {
  std::vector<std::string> types, symbols, values, ranges;
  for (const DType dtype : spec.dtypes) types.emplace_back(dtype_name(dtype));
  bool any_bound = false;
  for (const Dim& dim : spec.shape) {
    if (dim.symbol.empty()) {
      symbols.push_back(fmt::format("{}", dim.low));
      values.push_back(symbols.back());
      continue;
    }
    symbols.emplace_back(dim.symbol);
    if (const auto value = bound(dim.symbol)) {
      any_bound = true;
      values.push_back(fmt::format("{}", *value));
      continue;
    }
    values.emplace_back(dim.symbol);
    if (dim.step > 1) {
      ranges.push_back(fmt::format("{} {} or {}", dim.symbol, dim.low, dim.high));
    } else {
      ranges.push_back(fmt::format("{} in {}..{}", dim.symbol, dim.low, dim.high));
    }
  }
  std::string text = fmt::format("{} [{}]", fmt::join(types, " or "), fmt::join(symbols, ", "));
  if (any_bound) text += fmt::format(" = [{}]", fmt::join(values, ", "));
  if (!ranges.empty()) text += fmt::format(" with {}", fmt::join(ranges, ", "));
  return text;
}

void Validator::check(const ArgSpec& spec) {
  if (spec.tensor == nullptr) return;
  const TensorView& view = *spec.tensor;
  const auto wrong = [&](ErrorCode code) {
    throw Error(code, fmt::format("{}: {} must be {}, got {}", operation_, spec.name,
                                  expectation(spec), describe(view)));
  };
  if (std::find(spec.dtypes.begin(), spec.dtypes.end(), view.dtype) == spec.dtypes.end()) {
    wrong(ErrorCode::kType);
  }
  if (view.rank != static_cast<int>(spec.shape.size())) wrong(ErrorCode::kValue);
  for (std::size_t axis = 0; axis < spec.shape.size(); ++axis) {
    const Dim& dim = spec.shape[axis];
    const std::int64_t size = view.shape[axis];
    const auto known = dim.symbol.empty() ? std::optional(dim.low) : bound(dim.symbol);
    const bool fits = known
                          ? size == *known
                          : size >= dim.low && size <= dim.high && (size - dim.low) % dim.step == 0;
    if (!fits) wrong(ErrorCode::kValue);
  }
  for (std::size_t axis = 0; axis < spec.shape.size(); ++axis) {
    const Dim& dim = spec.shape[axis];
    if (!dim.symbol.empty() && !bound(dim.symbol)) {
      symbols_.emplace_back(dim.symbol, view.shape[axis]);
    }
  }
  if (!strides_fit(view, spec.layout)) {
    refuse(fmt::format(
        "{} must be contiguous{}, got {} with strides [{}]", spec.name,
        spec.layout == Layout::kContiguous ? "" : " in its last axis and have no negative stride",
        describe(view), fmt::join(view.strides.begin(), view.strides.begin() + view.rank, ", ")));
  }
  if (!device_) {
    device_ = view.device;
    device_owner_ = spec.name;
  } else if (view.device != *device_) {
    refuse(fmt::format("{} must be on {} as {} is, got {}", spec.name, device_name(*device_),
                       device_owner_, device_name(view.device)));
  }
  if (view.data == nullptr && view.elements() > 0) {
    refuse(fmt::format("{} must point to {} elements, got a null pointer", spec.name,
                       view.elements()));
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
  extents_.push_back({spec.name, spec.role, begin, begin + extent_bytes(view)});
}

void Validator::check(std::initializer_list<ArgSpec> table) {
  for (const ArgSpec& spec : table) check(spec);
}

void Validator::check_outputs_disjoint(std::string_view output, std::string_view input) const {
  for (const Extent& out : extents_) {
    if (out.role != Role::kOutput || out.begin == out.end) continue;
    for (const Extent& other : extents_) {
      if (&other == &out || other.begin == other.end) continue;
      if (out.begin >= other.end || other.begin >= out.end) continue;
      const bool same = out.begin == other.begin && out.end == other.end;
      if (same && out.name == output && other.name == input) continue;
      refuse(fmt::format("{} must not overlap {}, got memory that both use", out.name, other.name));
    }
  }
}

}  // namespace flashdsa::core
