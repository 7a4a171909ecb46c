#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace flashdsa::tools {

/// Strict readings of an option's text: the whole text counts, without blanks, signs other than a
/// leading minus, wrap-around or hexadecimal digits. Empty when it does not fit.
std::optional<std::int64_t> parse_integer(std::string_view text);
std::optional<double> parse_real(std::string_view text);   // "inf" and "nan" are numbers here
std::optional<bool> parse_boolean(std::string_view text);  // "true" or "false"

}  // namespace flashdsa::tools
