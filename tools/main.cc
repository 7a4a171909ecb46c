// flashdsa: the command line of the library. SPEC sections 7 and 9.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <new>
#include <string>
#include <vector>

#include "flashdsa/flashdsa.h"
#include "tools/command.h"
#include "tools/output_file.h"
#include "tools/report.h"

namespace flashdsa::tools {
namespace {

int exit_code_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kType:
    case ErrorCode::kValue:
    case ErrorCode::kData:
      return kBadInput;
    case ErrorCode::kUnavailable:
      return kNoBackend;
    case ErrorCode::kMemory:
    case ErrorCode::kDevice:
    case ErrorCode::kInternal:
      return kFailure;
  }
  return kFailure;
}

// One line on standard error, whatever the message holds: names out of files may hold anything.
int fail(int exit_code, std::string message) {
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == '\x7f'; };
  std::replace_if(message.begin(), message.end(), is_control, ' ');
  const std::string line = fmt::format("flashdsa: {}\n", message);
  std::fwrite(line.data(), 1, line.size(), stderr);
  return exit_code;
}

// A descriptor that the caller closed would be given to the next file opened, and what is printed
// would land in it.
void open_standard_streams() {
  while (true) {
    const int file = open("/dev/null", O_RDWR);
    if (file > STDERR_FILENO) {
      close(file);
      return;
    }
    if (file < 0) return;
  }
}

// Option names in their one spelling: --index_topk becomes --index-topk. Values stay as they are.
std::vector<std::string> normalized(std::vector<std::string> arguments) {
  for (std::string& argument : arguments) {
    if (argument == "--") break;
    if (!argument.starts_with("--")) continue;
    const auto name_end = argument.begin() + static_cast<std::ptrdiff_t>(
                                                 std::min(argument.find('='), argument.size()));
    std::replace(argument.begin(), name_end, '_', '-');
    if (argument.ends_with('=') && argument.find('=') + 1 == argument.size()) {
      argument.pop_back();
      throw Error(ErrorCode::kValue, fmt::format("{} needs a value after =, got none", argument));
    }
  }
  return arguments;
}

void check_command_name(const CLI::App& app, const std::vector<std::string>& arguments) {
  const auto names = app.get_subcommands([](const CLI::App*) { return true; });
  std::string list;
  for (const CLI::App* command : names) {
    if (!arguments.empty() && command->get_name() == arguments.front()) return;
    list += fmt::format("{}{}", list.empty() ? "" : ", ", command->get_name());
  }
  if (arguments.empty()) {
    throw Error(ErrorCode::kValue, fmt::format("expected a command, one of {}, got none", list));
  }
  if (!arguments.front().starts_with("-")) {
    throw Error(ErrorCode::kValue,
                fmt::format("unknown command '{}', expected one of {}", arguments.front(), list));
  }
}

int run(std::vector<std::string> arguments) {
  int exit_code = kSuccess;
  CLI::App app(
      "DeepSeek Sparse Attention on safetensors files: packed metadata, indexer top-k, "
      "sparse MLA attention.",
      "flashdsa");
  app.set_version_flag("--version", std::string(version()));
  app.require_subcommand(1);
  app.footer(
      R"(Exit codes: 0 success, 1 a verification failed, 2 bad usage or input, 3 the backend is not
available, 4 any other failure. A scalar may stand as a string in the file's __metadata__ instead;
the command line wins. FLASHDSA_CHECK=1 reports bad indices and lengths with their row.
`flashdsa COMMAND --help` tells each command's options and tensors.)");
  add_info_command(app, exit_code);
  add_synth_command(app, exit_code);
  add_metadata_command(app, exit_code);
  add_topk_command(app, exit_code);
  add_attend_command(app, exit_code);
  add_run_command(app, exit_code);
  add_verify_command(app, exit_code);
  add_bench_command(app, exit_code);
  try {
    arguments = normalized(std::move(arguments));
    check_command_name(app, arguments);
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
    app.parse(arguments);
  } catch (const CLI::Success& help) {
    app.exit(help);
  } catch (const CLI::ParseError& error) {
    return fail(kBadInput, error.what());
  }
  flush_stdout();
  return exit_code;
}

int guarded_run(std::vector<std::string> arguments) {
  try {
    return run(std::move(arguments));
  } catch (const Error& error) {
    return fail(exit_code_of(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(kFailure, "out of memory");
  } catch (const std::exception& error) {
    return fail(kFailure, error.what());
  }
}

}  // namespace
}  // namespace flashdsa::tools

int main(int argc, char** argv) {
  flashdsa::tools::open_standard_streams();
  flashdsa::tools::install_signal_handlers();
  return flashdsa::tools::guarded_run({argv + std::min(argc, 1), argv + argc});
}
