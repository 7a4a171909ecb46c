// flashdsa info: what this build is and what this machine offers it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <memory>

#include "flashdsa/flashdsa.h"
#include "tools/command.h"
#include "tools/gpu.h"
#include "tools/options.h"
#include "tools/placement.h"
#include "tools/report.h"

namespace flashdsa::tools {
namespace {

constexpr auto kName = "info";

// The processor's name as the kernel tells it.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

void add_backends(Report& report) {
  std::vector<std::vector<std::string>> rows = {{"backend", "available", "detail"}};
  auto list = nlohmann::ordered_json::array();
  for (const BackendStatus& status : backends()) {
    const std::string name(backend_name(status.backend));
    rows.push_back({name, status.available ? "yes" : "no", status.detail});
    list.push_back({{"name", name}, {"available", status.available}, {"detail", status.detail}});
  }
  report.add_block("backends", std::move(list), format_table(rows));
}

// "yes", "not here" for what needs another machine or build, "no" for what this version has not.
std::string_view support_of(const OperationSupport& operation, const BackendStatus& status) {
  if (std::ranges::count(operation.backends, status.backend) == 0) return "no";
  return status.available ? "yes" : "not here";
}

void add_operations(Report& report) {
  const std::vector<BackendStatus> statuses = backends();
  std::vector<std::vector<std::string>> rows = {{"operation"}};
  for (const BackendStatus& status : statuses) {
    rows.front().emplace_back(backend_name(status.backend));
  }
  rows.front().insert(rows.front().end(), {"sizes", "dtypes"});
  auto list = nlohmann::ordered_json::array();
  for (const OperationSupport& operation : operations()) {
    std::vector<std::string> row = {std::string(operation.name)};
    nlohmann::ordered_json support;
    for (const BackendStatus& status : statuses) {
      row.emplace_back(support_of(operation, status));
      support[std::string(backend_name(status.backend))] = row.back();
    }
    row.emplace_back(operation.sizes);
    row.emplace_back(operation.dtypes);
    rows.push_back(std::move(row));
    list.push_back({{"name", operation.name},
                    {"backends", std::move(support)},
                    {"sizes", operation.sizes},
                    {"dtypes", operation.dtypes}});
  }
  report.add_block("operations", std::move(list), format_table(rows));
}

void execute(const RuntimeOptions& options) {
  const Runtime runtime = options.make();
  std::vector<std::string> features;
  for (const SimdTarget target : simd_targets()) features.emplace_back(simd_target_name(target));
  Report report(kName);
  report.add("flashdsa", "version", std::string(version()));
  report.add("build", "build", std::string(build_description()));
  report.add("CPU features", "cpu_features", features,
             fmt::format("{}", fmt::join(features, ", ")));
  report.add("threads", "threads", runtime.threads > 0 ? runtime.threads : hardware_threads());
  std::vector<std::string> devices = gpu_lines();
  devices.insert(devices.begin(), cpu_name());
  report.add("devices", "devices", devices, fmt::format("{}", fmt::join(devices, "; ")));
  const bool is_free = runtime.backend == Backend::kAuto;
  report.add("chosen backend", "backend",
             std::string(backend_name(is_free ? best_backend() : runtime.backend)));
  add_backends(report);
  add_operations(report);
  report.print(options.json());
}

}  // namespace

void add_info_command(CLI::App& app, int&) {
  const auto options = std::make_shared<RuntimeOptions>(kName);
  CLI::App* command = app.add_subcommand(
      kName, "Show version, build, CPU features, devices, backends, and what runs where");
  options->add_to(*command);
  command->callback([options] { execute(*options); });
}

}  // namespace flashdsa::tools
