#include "tests/support/host_tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "tests/support/memory_blocks.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace flashdsa::test {
namespace {

Shape row_major_strides(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(shape[axis], 1);
  }
  return strides;
}

std::int64_t product(const Shape& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::size_t extent(const Shape& shape, const Shape& strides) {
  if (product(shape) == 0) return 0;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) last += (shape[axis] - 1) * strides[axis];
  return static_cast<std::size_t>(last + 1);
}

}  // namespace

GuardedMemory::GuardedMemory(std::size_t payload_bytes, std::size_t shift_bytes)
    : payload_bytes_((payload_bytes + 1) / 2 * 2), shift_bytes_(shift_bytes) {
  const std::size_t bytes = 2 * kBandBytes + shift_bytes_ + payload_bytes_;
  lines_.resize((bytes + sizeof(Line) - 1) / sizeof(Line));
  std::fill(words(), words() + lines_.size() * sizeof(Line) / 2, kSentinel);
  make_known();
}

GuardedMemory::GuardedMemory(const GuardedMemory& other)
    : payload_bytes_(other.payload_bytes_), shift_bytes_(other.shift_bytes_) {
  other.unpoison();
  lines_ = other.lines_;
  other.poison_bands();
  make_known();
}

GuardedMemory& GuardedMemory::operator=(GuardedMemory other) noexcept {
  lines_.swap(other.lines_);
  std::swap(payload_bytes_, other.payload_bytes_);
  std::swap(shift_bytes_, other.shift_bytes_);
  return *this;
}

GuardedMemory::~GuardedMemory() {
  if (lines_.empty()) return;  // moved away
  unpoison();
  forget_block(reinterpret_cast<const std::byte*>(words()));
}

void GuardedMemory::make_known() const {
  if (lines_.empty()) return;
  know_block(
      {reinterpret_cast<std::byte*>(words()), lines_.size() * sizeof(Line), MemoryKind::kWhole});
  poison_bands();
}

std::byte* GuardedMemory::payload() const {
  return reinterpret_cast<std::byte*>(words() + first_word());
}

bool GuardedMemory::bands_intact() const {
  if (lines_.empty()) return true;
  unpoison();
  const auto is_sentinel = [](std::uint16_t word) { return word == kSentinel; };
  const std::uint16_t* end = words() + lines_.size() * sizeof(Line) / 2;
  const bool intact = std::all_of(words(), words() + first_word(), is_sentinel) &&
                      std::all_of<const std::uint16_t*>(words() + last_word(), end, is_sentinel);
  poison_bands();
  return intact;
}

bool GuardedMemory::payload_untouched() const {
  if (lines_.empty()) return true;
  return std::all_of(words() + first_word(), words() + last_word(),
                     [](std::uint16_t word) { return word == kSentinel; });
}

void GuardedMemory::poison_bands() const {
#ifdef __SANITIZE_ADDRESS__
  if (lines_.empty()) return;
  const std::size_t words_total = lines_.size() * sizeof(Line) / 2;
  ASAN_POISON_MEMORY_REGION(words(), first_word() * 2);
  ASAN_POISON_MEMORY_REGION(words() + last_word(), (words_total - last_word()) * 2);
#endif
}

void GuardedMemory::unpoison() const {
#ifdef __SANITIZE_ADDRESS__
  if (!lines_.empty()) ASAN_UNPOISON_MEMORY_REGION(words(), lines_.size() * sizeof(Line));
#endif
}

HostTensor::HostTensor(DType dtype, Shape shape, Shape strides, std::size_t shift_bytes)
    : dtype_(dtype),
      shape_(std::move(shape)),
      strides_(std::move(strides)),
      row_major_(strides_ == row_major_strides(shape_)),
      memory_(extent(shape_, strides_) * dtype_size(dtype), shift_bytes) {}

HostTensor::HostTensor(DType dtype, Shape shape)
    : HostTensor(dtype, shape, row_major_strides(shape), 0) {}

HostTensor HostTensor::strided(DType dtype, Shape shape, Shape strides) {
  return HostTensor(dtype, std::move(shape), std::move(strides), 0);
}

HostTensor HostTensor::unaligned(DType dtype, Shape shape) {
  Shape strides = row_major_strides(shape);
  return HostTensor(dtype, std::move(shape), std::move(strides), dtype_size(dtype));
}

TensorView HostTensor::view() const {
  TensorView view = TensorView::contiguous(memory_.payload(), dtype_, shape_);
  std::copy(strides_.begin(), strides_.end(), view.strides.begin());
  return view;
}

std::int64_t HostTensor::elements() const { return product(shape_); }

std::int64_t HostTensor::at(std::initializer_list<std::int64_t> index) const {
  if (index.size() != shape_.size()) throw std::logic_error("an index of another rank");
  std::int64_t place = 0;
  std::size_t axis = 0;
  for (const std::int64_t i : index) {
    if (i < 0 || i >= shape_[axis]) throw std::logic_error("an index outside the tensor");
    place = place * shape_[axis] + i;
    ++axis;
  }
  return place;
}

std::byte* HostTensor::element(std::int64_t place) const {
  std::int64_t offset = row_major_ ? place : 0;
  for (std::size_t axis = row_major_ ? 0 : shape_.size(); axis-- > 0;) {
    offset += place % shape_[axis] * strides_[axis];
    place /= shape_[axis];
  }
  return memory_.payload() + static_cast<std::size_t>(offset) * dtype_size(dtype_);
}

double HostTensor::get(std::int64_t place) const {
  const std::byte* from = element(place);
  switch (dtype_) {
    case DType::kBFloat16:
      return static_cast<float>(*reinterpret_cast<const BFloat16*>(from));
    case DType::kFloat32:
      return *reinterpret_cast<const float*>(from);
    case DType::kFloat64:
      return *reinterpret_cast<const double*>(from);
    case DType::kInt32:
      return *reinterpret_cast<const std::int32_t*>(from);
    default:
      throw std::logic_error("HostTensor: a dtype that no test reads");
  }
}

void HostTensor::set(std::int64_t place, double value) {
  std::byte* to = element(place);
  switch (dtype_) {
    case DType::kBFloat16:
      *reinterpret_cast<BFloat16*>(to) = BFloat16(static_cast<float>(value));
      return;
    case DType::kFloat32:
      *reinterpret_cast<float*>(to) = static_cast<float>(value);
      return;
    case DType::kFloat64:
      *reinterpret_cast<double*>(to) = value;
      return;
    case DType::kInt32:
      *reinterpret_cast<std::int32_t*>(to) = static_cast<std::int32_t>(value);
      return;
    default:
      throw std::logic_error("HostTensor: a dtype that no test writes");
  }
}

void HostTensor::fill(double value) {
  for (std::int64_t i = 0; i < elements(); ++i) set(i, value);
}

std::vector<double> HostTensor::values() const {
  std::vector<double> result(static_cast<std::size_t>(elements()));
  for (std::int64_t i = 0; i < elements(); ++i) result[static_cast<std::size_t>(i)] = get(i);
  return result;
}

std::uint64_t HostTensor::bits(std::int64_t place) const {
  std::uint64_t result = 0;
  std::memcpy(&result, element(place), dtype_size(dtype_));
  return result;
}

void HostTensor::copy_elements(const HostTensor& other) {
  for (std::int64_t i = 0; i < elements(); ++i) {
    if (dtype_ == other.dtype_) {
      std::memcpy(element(i), other.element(i), dtype_size(dtype_));
    } else {
      set(i, other.get(i));
    }
  }
}

HostTensor HostTensor::as(DType dtype) const {
  HostTensor result(dtype, shape_);
  result.copy_elements(*this);
  return result;
}

HostTensor HostTensor::with_strides(Shape strides) const {
  HostTensor result = strided(dtype_, shape_, std::move(strides));
  result.copy_elements(*this);
  return result;
}

HostTensor HostTensor::with_unaligned_memory() const {
  HostTensor result = unaligned(dtype_, shape_);
  result.copy_elements(*this);
  return result;
}

HostTensor HostTensor::rows(std::int64_t begin, std::int64_t count) const {
  Shape shape = shape_;
  shape[0] = count;
  HostTensor result(dtype_, shape);
  const std::int64_t first = begin * (shape_[0] == 0 ? 0 : elements() / shape_[0]);
  for (std::int64_t i = 0; i < result.elements(); ++i) {
    std::memcpy(result.element(i), element(first + i), dtype_size(dtype_));
  }
  return result;
}

std::string shape_text(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::string place_text(const Shape& shape, std::int64_t place) {
  Shape index(shape.size());
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    index[axis] = place % shape[axis];
    place /= shape[axis];
  }
  return shape_text(index);
}

}  // namespace flashdsa::test
