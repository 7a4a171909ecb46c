#include "tools/synth_options.h"

#include <fmt/format.h>

#include "flashdsa/error.h"
#include "tools/parse.h"

namespace flashdsa::tools {
namespace {

// Parses the option's text with `parse` and stores it when it lies in [low, high].
template <typename Number, typename Parse>
CLI::Option* add_number(CLI::App& command, const std::string& name, Number& target, Number low,
                        Number high, const std::string& help, const Parse& parse) {
  const std::string owner = command.get_name();
  const auto store = [=, &target](const std::string& text) {
    const auto value = parse(text);
    if (!value || !(*value >= low && *value <= high)) {
      throw Error(ErrorCode::kValue, fmt::format("{}: {} must be a number in {}..{}, got '{}'",
                                                 owner, name, low, high, text));
    }
    target = *value;
  };
  return command.add_option_function<std::string>(name, store, help)->type_name("N");
}

}  // namespace

CLI::Option* add_integer_option(CLI::App& command, const std::string& name, std::int64_t& target,
                                std::int64_t low, std::int64_t high, const std::string& help) {
  return add_number(command, name, target, low, high, help, parse_integer);
}

CLI::Option* add_real_option(CLI::App& command, const std::string& name, double& target, double low,
                             double high, const std::string& help) {
  return add_number(command, name, target, low, high, help, parse_real);
}

}  // namespace flashdsa::tools
