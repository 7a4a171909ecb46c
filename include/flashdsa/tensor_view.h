#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "flashdsa/api.h"

namespace flashdsa {

/// Element types. Operations take few of them; the others exist so that a refusal can name them.
enum class DType : std::uint8_t {
  kBool,  ///< one byte, 0 or 1
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

/// Bytes of one element.
FLASHDSA_API std::size_t dtype_size(DType dtype) noexcept;

/// Name as NumPy and PyTorch spell it: "bfloat16", "int32", ...
FLASHDSA_API std::string_view dtype_name(DType dtype) noexcept;

/// The upper half of an FP32 number.
struct BFloat16 {
  std::uint16_t bits = 0;  ///< sign, 8 bits of exponent, 7 of mantissa

  BFloat16() = default;  ///< +0

  /// Rounds to nearest even; NaN stays NaN.
  explicit BFloat16(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = (word & 0x7FFFFFFFu) > 0x7F800000u;
    bits = is_nan ? static_cast<std::uint16_t>((word >> 16) | 0x40u)
                  : static_cast<std::uint16_t>((word + 0x7FFFu + ((word >> 16) & 1u)) >> 16);
  }

  /// The number of a bit pattern.
  static BFloat16 from_bits(std::uint16_t bits) noexcept {
    BFloat16 result;
    result.bits = bits;
    return result;
  }

  /// The same number, exactly.
  explicit operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// What memory a tensor may lie in.
enum class DeviceKind : std::uint8_t { kCpu, kCuda };

/// Where a tensor's memory lies.
struct Device {
  DeviceKind kind = DeviceKind::kCpu;  ///< host memory or a CUDA device's
  int index = 0;                       ///< ordinal among the devices of this kind

  /// Same kind and same ordinal.
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:0".
FLASHDSA_API std::string device_name(Device device);

/// A typed, strided view of memory that somebody else owns; the C++ face of a DLPack tensor.
/// Shape and strides count elements. An operation says for each argument which strides it takes.
struct FLASHDSA_API TensorView {
  static constexpr int kMaxRank = 8;  ///< most axes of a view

  void* data = nullptr;  ///< element [0, ..., 0]; may be null when the tensor has no element
  DType dtype = DType::kFloat32;                 ///< type of the elements
  Device device;                                 ///< where `data` points to
  int rank = 0;                                  ///< number of axes
  std::array<std::int64_t, kMaxRank> shape{};    ///< elements along each of the first `rank` axes
  std::array<std::int64_t, kMaxRank> strides{};  ///< elements from one index to the next

  /// A row-major (C-contiguous) view. `shape` has at most kMaxRank entries. Throws
  /// Error(kValue) for a negative size, too many axes or 2^63 bytes and more.
  static TensorView contiguous(void* data, DType dtype, std::span<const std::int64_t> shape,
                               Device device = {});

  /// The same with the sizes written out.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                               Device device = {});

  /// Product of the sizes; 0 for a rank outside 0..kMaxRank.
  std::int64_t elements() const noexcept;

  /// Bytes of the elements; gaps do not count.
  std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(elements()) * dtype_size(dtype);
  }
  bool is_contiguous() const noexcept;  ///< false for a rank outside 0..kMaxRank

  /// `data` as a pointer to elements of type T.
  template <typename T>
  T* as() const noexcept {
    return static_cast<T*>(data);
  }
};

/// "bfloat16 [8, 64, 576]", as error sentences print a tensor; a rank that no tensor has is named,
/// "bfloat16 of rank 9".
FLASHDSA_API std::string describe(const TensorView& view);

/// A contiguous tensor that owns its memory (shared between copies of the object). Results whose
/// size only the library knows are returned as Tensors.
class FLASHDSA_API Tensor {
 public:
  Tensor() = default;  ///< no element, no memory

  /// A view and what keeps its memory alive.
  Tensor(TensorView view, std::shared_ptr<void> storage)
      : view_(view), storage_(std::move(storage)) {}

  /// Uninitialised host memory, aligned to 64 bytes. Throws Error(kMemory).
  static Tensor host(DType dtype, std::span<const std::int64_t> shape);

  /// The same with the sizes written out.
  static Tensor host(DType dtype, std::initializer_list<std::int64_t> shape);

  /// The view, valid as long as a copy of this object lives.
  const TensorView& view() const noexcept { return view_; }

  /// A Tensor is usable as its view, but for a temporary, whose memory the view would outlive.
  operator const TensorView&() const& noexcept { return view_; }
  operator const TensorView&() const&& = delete;

  /// The elements, of type T.
  template <typename T>
  std::span<T> span() const noexcept {
    return {view_.as<T>(), static_cast<std::size_t>(view_.elements())};
  }

 private:
  TensorView view_;
  std::shared_ptr<void> storage_;
};

/// The same of a tensor, which may be a temporary.
inline std::string describe(const Tensor& tensor) { return describe(tensor.view()); }

}  // namespace flashdsa
