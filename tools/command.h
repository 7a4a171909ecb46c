#pragma once

#include <CLI/CLI.hpp>

namespace flashdsa::tools {

/// Exit codes of the command. SPEC section 9.
enum ExitCode : int {
  kSuccess = 0,
  kVerificationFailed = 1,
  kBadInput = 2,
  kNoBackend = 3,
  kFailure = 4,
};

/// Each function adds one subcommand to `app`. Its callback does the work; it throws
/// flashdsa::Error or CLI::Error to fail, and otherwise leaves the exit code in `exit_code`.
void add_info_command(CLI::App& app, int& exit_code);
void add_synth_command(CLI::App& app, int& exit_code);
void add_metadata_command(CLI::App& app, int& exit_code);
void add_topk_command(CLI::App& app, int& exit_code);
void add_attend_command(CLI::App& app, int& exit_code);
void add_run_command(CLI::App& app, int& exit_code);
void add_verify_command(CLI::App& app, int& exit_code);
void add_bench_command(CLI::App& app, int& exit_code);

}  // namespace flashdsa::tools
