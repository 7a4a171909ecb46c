#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "flashdsa/error.h"

namespace flashdsa::core {

/// T_q and T_k stay below 2^31 - 1, so that positions fit int32 and -1 stays free.
inline constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() - 1;

/// Checking mode (SPEC section 7): throws Error(kData) naming the row unless `ok`. `expected` is
/// formatted by the caller only when needed, hence a callable.
template <typename Expected>
void check_data(bool ok, std::string_view operation, std::string_view tensor, std::int64_t row,
                const Expected& expected, std::int64_t got) {
  if (ok) return;
  throw Error(ErrorCode::kData, fmt::format("{}: {} row {} must hold {}, got {}", operation, tensor,
                                            row, expected(), got));
}

}  // namespace flashdsa::core
