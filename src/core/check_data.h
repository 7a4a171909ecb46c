#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "flashdsa/error.h"
#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// T_q and T_k stay below 2^31 - 1, so that positions fit int32 and -1 stays free.
inline constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() - 1;

/// Whether a call on tensors of `device` has to check their contents: checking mode is on, and some
/// backend can read them (where none can, dispatch says so). Throws Error(kValue) while the stream
/// is being captured, for checking waits for the device.
bool is_checking(std::string_view operation, Device device, const Runtime& runtime);

/// An int32 tensor whose last axis is contiguous, where the host can read its rows: itself, or a
/// copy of device memory, for which the constructor waits.
class HostRows {
 public:
  HostRows(const TensorView& view, const Runtime& runtime);

  /// Row of the first axis; a tensor of one axis is one row.
  const std::int32_t* row(std::int64_t t) const { return data_ + t * row_stride_; }

 private:
  Tensor copy_;
  const std::int32_t* data_;
  std::int64_t row_stride_;
};

/// Checking mode (SPEC section 7): throws Error(kData) naming the row unless `ok`. `expected` is
/// formatted by the caller only when needed, hence a callable.
template <typename Expected>
void check_data(bool ok, std::string_view operation, std::string_view tensor, std::int64_t row,
                const Expected& expected, std::int64_t got) {
  if (ok) return;
  throw Error(ErrorCode::kData, fmt::format("{}: {} row {} must hold {}, got {}", operation, tensor,
                                            row, expected(), got));
}

/// Checks the first `slots` slots of row `t` of an index tensor: each holds -1 or a key below
/// `key_count`.
void check_indices(const std::int32_t* row, std::int64_t slots, std::int64_t key_count,
                   std::string_view operation, std::string_view tensor, std::int64_t t);

/// Checks what query rows select when checking mode is on: `topk_length` [T_q], which may be null,
/// holds 0..K, and `topk_indices` [T_q, 1, K] in the slots that it leaves -1 or a key below
/// `key_count`.
void check_selection(std::string_view operation, const TensorView& topk_indices,
                     const TensorView* topk_length, std::int64_t key_count, const Runtime& runtime);

}  // namespace flashdsa::core
