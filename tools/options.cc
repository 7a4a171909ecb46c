#include "tools/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "flashdsa/error.h"
#include "tools/parse.h"

namespace flashdsa::tools {
namespace {

constexpr std::array kBackends = {Backend::kAuto, Backend::kCpu, Backend::kReference,
                                  Backend::kSm90, Backend::kSm80};
constexpr std::array kSimdTargets = {SimdTarget::kAuto, SimdTarget::kBaseline, SimdTarget::kAvx2,
                                     SimdTarget::kAvx512, SimdTarget::kAvx512Bf16};
constexpr std::int64_t kMaxThreads = 1024;

template <typename Range, typename Name>
std::string join_names(const Range& values, Name name, std::string_view separator) {
  std::vector<std::string> names;
  for (const auto& value : values) names.emplace_back(name(value));
  return fmt::format("{}", fmt::join(names, separator));
}

// The value whose name is `text`. Throws Error(kValue).
template <typename Range, typename Name>
auto find_by_name(const Range& values, Name name, const std::string& text,
                  const std::string& option) {
  const auto found = std::find_if(values.begin(), values.end(),
                                  [&](const auto& value) { return name(value) == text; });
  if (found == values.end()) {
    throw Error(ErrorCode::kValue, fmt::format("{} must be one of {}, got '{}'", option,
                                               join_names(values, name, ", "), text));
  }
  return *found;
}

void require_backend(const std::string& command, Backend backend) {
  if (backend == Backend::kAuto) return;
  for (const BackendStatus& status : backends()) {
    if (status.backend != backend) continue;
    if (status.available) return;
    throw Error(ErrorCode::kUnavailable, fmt::format("{}: backend {} is not available: {}", command,
                                                     backend_name(backend), status.detail));
  }
  throw Error(ErrorCode::kUnavailable,
              fmt::format("{}: backend {} is not available: not part of this build", command,
                          backend_name(backend)));
}

void require_simd(const std::string& command, SimdTarget simd) {
  const auto targets = simd_targets();
  if (simd == SimdTarget::kAuto ||
      std::find(targets.begin(), targets.end(), simd) != targets.end()) {
    return;
  }
  throw Error(
      ErrorCode::kUnavailable,
      fmt::format("{}: instruction set {} is not available: this CPU and build have {}", command,
                  simd_target_name(simd), join_names(targets, simd_target_name, ", ")));
}

bool check_requested(const std::string& command) {
  const char* value = std::getenv("FLASHDSA_CHECK");
  const std::string text = value == nullptr ? "" : value;
  if (text.empty() || text == "0") return false;
  if (text == "1") return true;
  throw Error(ErrorCode::kValue,
              fmt::format("{}: FLASHDSA_CHECK must be 0 or 1, got '{}'", command, text));
}

std::string option_name(const std::string& name) {
  std::string option = "--" + name;
  std::replace(option.begin(), option.end(), '_', '-');
  return option;
}

}  // namespace

void RuntimeOptions::add_to(CLI::App& command) {
  constexpr auto kGroup = "Runtime";
  command
      .add_option("--backend", backend_,
                  fmt::format("Backend that computes: {}; auto is the best one whose device is "
                              "present",
                              join_names(kBackends, backend_name, "|")))
      ->type_name("NAME")
      ->group(kGroup);
  command
      .add_option_function<std::string>(
          "--threads", [this](const std::string& text) { threads_ = text; },
          "Threads of the host backends, 1..1024; default: all")
      ->type_name("N")
      ->group(kGroup);
  command
      .add_option("--simd", simd_,
                  fmt::format("Instruction set of the cpu backend: {}; auto is the best one here",
                              join_names(kSimdTargets, simd_target_name, "|")))
      ->type_name("NAME")
      ->group(kGroup);
  command.add_flag("--json", json_, "Print one JSON object instead of text")->group(kGroup);
}

Runtime make_runtime(const std::string& command, const std::string& backend,
                     const std::string& simd) {
  Runtime runtime;
  runtime.backend = find_by_name(kBackends, backend_name, backend, command + ": --backend");
  runtime.simd = find_by_name(kSimdTargets, simd_target_name, simd, command + ": --simd");
  runtime.check = check_requested(command);
  require_backend(command, runtime.backend);
  require_simd(command, runtime.simd);
  return runtime;
}

Runtime RuntimeOptions::make() const {
  int threads = 0;
  if (threads_) {
    const auto given = parse_integer(*threads_);
    if (!given || *given < 1 || *given > kMaxThreads) {
      throw Error(ErrorCode::kValue,
                  fmt::format("{}: --threads must be an integer in 1..{}, got '{}'", command_,
                              kMaxThreads, *threads_));
    }
    threads = static_cast<int>(*given);
  }
  Runtime runtime = make_runtime(command_, backend_, simd_);
  runtime.threads = threads;
  return runtime;
}

void ScalarOptions::add_value(CLI::App& command, const std::string& name, const std::string& type,
                              const std::string& help) {
  command
      .add_option_function<std::string>(
          option_name(name), [this, name](const std::string& text) { given_[name] = text; }, help)
      ->type_name(type)
      ->group("Scalars");
}

void ScalarOptions::add_flag(CLI::App& command, const std::string& name, const std::string& help) {
  command.add_flag(option_name(name), flags_[name], help)->group("Scalars");
}

std::optional<ScalarOptions::Text> ScalarOptions::find(const std::string& name) const {
  if (const auto given = given_.find(name); given != given_.end()) {
    return Text{given->second, option_name(name)};
  }
  if (const auto flag = flags_.find(name); flag != flags_.end() && !flag->second.empty()) {
    return Text{flag->second, option_name(name)};
  }
  if (file_ == nullptr) return std::nullopt;
  const auto text = file_->find(name);
  if (text == file_->end()) return std::nullopt;
  return Text{text->second, "__metadata__"};
}

std::optional<std::int64_t> ScalarOptions::integer(const std::string& name, std::int64_t low,
                                                   std::int64_t high) const {
  const auto text = find(name);
  if (!text) return std::nullopt;
  const auto value = parse_integer(text->value);
  if (!value || *value < low || *value > high) {
    refuse(name, fmt::format("an integer in {}..{}", low, high), *text);
  }
  return value;
}

std::optional<double> ScalarOptions::real(const std::string& name) const {
  const auto text = find(name);
  if (!text) return std::nullopt;
  const auto value = parse_real(text->value);
  if (!value) refuse(name, "a number", *text);
  return value;
}

bool ScalarOptions::flag(const std::string& name) const {
  const auto text = find(name);
  if (!text) return false;
  const auto value = parse_boolean(text->value);
  if (!value) refuse(name, "true or false", *text);
  return *value;
}

std::optional<std::string> ScalarOptions::word(
    const std::string& name, std::initializer_list<std::string_view> words) const {
  const auto text = find(name);
  if (!text) return std::nullopt;
  if (std::find(words.begin(), words.end(), text->value) == words.end()) {
    refuse(name, fmt::format("{}", fmt::join(words, " or ")), *text);
  }
  return text->value;
}

void ScalarOptions::refuse_missing(const std::string& name) const {
  throw Error(ErrorCode::kValue,
              fmt::format("{}: {} must be given as {} or in __metadata__, got neither", command_,
                          name, option_name(name)));
}

void ScalarOptions::refuse(const std::string& name, const std::string& expected,
                           const Text& got) const {
  throw Error(ErrorCode::kValue, fmt::format("{}: {} must be {}, got '{}' from {}", command_, name,
                                             expected, got.value, got.origin));
}

}  // namespace flashdsa::tools
