#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace flashdsa::tools {

/// Adds an option that takes one integer in [low, high], read strictly. `target` keeps its value
/// when the option is not given.
CLI::Option* add_integer_option(CLI::App& command, const std::string& name, std::int64_t& target,
                                std::int64_t low, std::int64_t high, const std::string& help);

/// The same for a number of any kind in [low, high].
CLI::Option* add_real_option(CLI::App& command, const std::string& name, double& target, double low,
                             double high, const std::string& help);

}  // namespace flashdsa::tools
