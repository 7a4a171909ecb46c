#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace flashdsa::tools {

/// Rows of cells as text, columns aligned and two blanks apart; the first row is underlined.
std::string format_table(const std::vector<std::vector<std::string>>& rows);

std::string format_bytes(double bytes);      ///< "1.5 MiB"
std::string format_seconds(double seconds);  ///< "12.3 ms"

/// What a command prints: aligned lines for people, or one JSON object with the same content.
class Report {
 public:
  explicit Report(std::string command) { json_["command"] = std::move(command); }

  /// One line `label  text`; a null `label` puts the value into the JSON object alone.
  void add(const char* label, const std::string& key, nlohmann::ordered_json value,
           std::string text);
  void add(const char* label, const std::string& key, nlohmann::ordered_json value);

  /// A block of text below the lines, with what it says in JSON.
  void add_block(const std::string& key, nlohmann::ordered_json value, std::string text);

  /// Prints to standard output and makes sure that it got there. Throws Error(kDevice).
  void print(bool as_json) const;

 private:
  std::vector<std::pair<std::string, std::string>> lines_;
  std::vector<std::string> blocks_;
  nlohmann::ordered_json json_;
};

/// Throws Error(kDevice) unless everything printed so far has reached standard output.
void flush_stdout();

}  // namespace flashdsa::tools
