#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "flashdsa/runtime.h"

namespace flashdsa::tools {

/// The options that say where and how to compute; every command takes them.
class RuntimeOptions {
 public:
  explicit RuntimeOptions(std::string command) : command_(std::move(command)) {}

  void add_to(CLI::App& command);

  /// Checks the options, and that the chosen backend and instruction set are to be had; reads
  /// FLASHDSA_CHECK. Throws Error(kValue) or Error(kUnavailable).
  Runtime make() const;

  bool json() const { return json_; }

 private:
  std::string command_;
  std::string backend_ = "auto";
  std::string simd_ = "auto";
  std::optional<std::string> threads_;
  bool json_ = false;
};

/// Backend, instruction set and checking mode as make() finds them; `command` begins the sentences.
Runtime make_runtime(const std::string& command, const std::string& backend,
                     const std::string& simd);

/// Scalars that are options on the command line or strings in the file's __metadata__; the command
/// line wins. Names are those of SPEC section 9: "index_topk" is --index-topk.
class ScalarOptions {
 public:
  explicit ScalarOptions(std::string command) : command_(std::move(command)) {}

  void add_value(CLI::App& command, const std::string& name, const std::string& type,
                 const std::string& help);
  void add_flag(CLI::App& command, const std::string& name, const std::string& help);

  /// The strings of the input file, which must outlive this object's use.
  void use_file(const std::map<std::string, std::string>& strings) { file_ = &strings; }

  /// Each returns nothing when the scalar is given nowhere, and throws Error(kValue) naming the
  /// option when its text does not fit.
  std::optional<std::int64_t> integer(const std::string& name, std::int64_t low,
                                      std::int64_t high) const;
  std::optional<double> real(const std::string& name) const;
  bool flag(const std::string& name) const;  // false when given nowhere
  std::optional<std::string> word(const std::string& name,
                                  std::initializer_list<std::string_view> words) const;

  /// "attend: softmax_scale must be given as --softmax-scale or in __metadata__, got neither".
  [[noreturn]] void refuse_missing(const std::string& name) const;

 private:
  struct Text {
    std::string value;
    std::string origin;  // "--index-topk" or "__metadata__"
  };
  std::optional<Text> find(const std::string& name) const;
  [[noreturn]] void refuse(const std::string& name, const std::string& expected,
                           const Text& got) const;

  std::string command_;
  std::map<std::string, std::string> given_;  // on the command line
  std::map<std::string, std::string> flags_;  // likewise; empty when not given
  const std::map<std::string, std::string>* file_ = nullptr;
};

}  // namespace flashdsa::tools
