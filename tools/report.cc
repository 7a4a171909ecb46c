#include "tools/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "flashdsa/error.h"

namespace flashdsa::tools {

std::string format_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  const auto append = [&](std::string& text, const std::vector<std::string>& row) {
    std::string line;
    for (std::size_t column = 0; column < row.size(); ++column) {
      line += fmt::format("{:<{}}  ", row[column], widths[column]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  std::string text;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    append(text, rows[row]);
    if (row > 0) continue;
    std::vector<std::string> rule;
    for (const std::size_t width : widths) rule.emplace_back(width, '-');
    append(text, rule);
  }
  return text;
}

std::string format_bytes(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

void Report::add(const char* label, const std::string& key, nlohmann::ordered_json value,
                 std::string text) {
  json_[key] = std::move(value);
  if (label != nullptr) lines_.emplace_back(label, std::move(text));
}

void Report::add(const char* label, const std::string& key, nlohmann::ordered_json value) {
  std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  add(label, key, std::move(value), std::move(text));
}

void Report::add_block(const std::string& key, nlohmann::ordered_json value, std::string text) {
  json_[key] = std::move(value);
  blocks_.push_back(std::move(text));
}

void Report::print(bool as_json) const {
  if (as_json) {
    fmt::print("{}\n", json_.dump());
  } else {
    std::size_t width = 0;
    for (const auto& line : lines_) width = std::max(width, line.first.size());
    for (const auto& [label, text] : lines_) fmt::print("{:<{}}  {}\n", label, width, text);
    for (const std::string& block : blocks_) fmt::print("\n{}", block);
  }
  flush_stdout();
}

void flush_stdout() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw Error(ErrorCode::kDevice,
                fmt::format("standard output: cannot write: {}", std::strerror(errno)));
  }
}

}  // namespace flashdsa::tools
