#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "flashdsa/tensor_view.h"

namespace flashdsa::test {

using Shape = std::vector<std::int64_t>;

/// Memory of a HostTensor: a payload between two bands, all filled with kSentinel. It is a block
/// that a device engine mirrors; a build with AddressSanitizer also traps whoever reads or writes a
/// band.
class GuardedMemory {
 public:
  /// As BF16, FP32 or FP64 the repeated word is a NaN, as an integer an unlikely number.
  static constexpr std::uint16_t kSentinel = 0xFFF5;
  static constexpr std::size_t kBandBytes = 256;

  GuardedMemory() = default;
  /// `payload_bytes` bytes, `shift_bytes` behind an address that is a multiple of 64.
  GuardedMemory(std::size_t payload_bytes, std::size_t shift_bytes);
  GuardedMemory(const GuardedMemory& other);
  GuardedMemory(GuardedMemory&& other) noexcept = default;
  GuardedMemory& operator=(GuardedMemory other) noexcept;
  ~GuardedMemory();

  std::byte* payload() const;
  std::size_t payload_bytes() const { return payload_bytes_; }
  bool bands_intact() const;
  bool payload_untouched() const;

 private:
  struct alignas(64) Line {
    std::uint16_t words[32];
  };

  std::uint16_t* words() const { return const_cast<std::uint16_t*>(lines_.data()->words); }
  std::size_t first_word() const { return (kBandBytes + shift_bytes_) / 2; }
  std::size_t last_word() const { return first_word() + payload_bytes_ / 2; }
  void poison_bands() const;
  void unpoison() const;
  void make_known() const;

  std::vector<Line> lines_;
  std::size_t payload_bytes_ = 0;
  std::size_t shift_bytes_ = 0;
};

/// A tensor of host memory between guard bands (SPEC: nothing outside an argument is read or
/// written). Elements are set and read as double and hold the sentinel, a NaN, until they are set.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, Shape shape);
  /// The gaps between the elements hold the sentinel.
  static HostTensor strided(DType dtype, Shape shape, Shape strides);
  /// Contiguous, one element behind an aligned address.
  static HostTensor unaligned(DType dtype, Shape shape);

  TensorView view() const;
  operator TensorView() const { return view(); }

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t size(std::size_t axis) const { return shape_[axis]; }
  std::int64_t elements() const;

  /// Place of an element in row-major order, whatever the strides.
  std::int64_t at(std::initializer_list<std::int64_t> index) const;
  double get(std::int64_t place) const;
  void set(std::int64_t place, double value);  // rounded to the dtype
  double get(std::initializer_list<std::int64_t> index) const { return get(at(index)); }
  void set(std::initializer_list<std::int64_t> index, double value) { set(at(index), value); }
  void fill(double value);
  std::vector<double> values() const;
  /// The bits of one element.
  std::uint64_t bits(std::int64_t place) const;

  /// The same elements in another dtype, with other strides, or in a slice of the first axis.
  HostTensor as(DType dtype) const;
  HostTensor with_strides(Shape strides) const;
  HostTensor with_unaligned_memory() const;
  HostTensor rows(std::int64_t begin, std::int64_t count) const;

  bool bands_intact() const { return memory_.bands_intact(); }
  bool untouched() const { return memory_.payload_untouched(); }

 private:
  HostTensor(DType dtype, Shape shape, Shape strides, std::size_t shift_bytes);
  std::byte* element(std::int64_t place) const;
  void copy_elements(const HostTensor& other);

  DType dtype_ = DType::kFloat32;
  Shape shape_;
  Shape strides_;
  bool row_major_ = true;
  GuardedMemory memory_;
};

/// "[3, 4]"
std::string shape_text(const Shape& shape);

/// "[1, 2]": where the element at a row-major place stands.
std::string place_text(const Shape& shape, std::int64_t place);

}  // namespace flashdsa::test
