#include "tools/bench_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>

#include "flashdsa/error.h"
#include "tools/gpu.h"
#include "tools/report.h"

namespace flashdsa::tools {
namespace {

// Value of a line "name : value" of /proc/cpuinfo.
std::string cpuinfo(const std::string& name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(':');
    if (!line.starts_with(name) || colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

double load_average() {
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  return load;
}

std::ofstream open_appending(const std::string& path) {
  std::ofstream file(path, std::ios::app | std::ios::binary);
  if (!file) {
    throw Error(ErrorCode::kValue, fmt::format("bench: {} must be a file that can be appended to, "
                                               "got: {}",
                                               path, std::strerror(errno)));
  }
  return file;
}

void close_checked(std::ofstream& file, const std::string& path) {
  file.close();
  if (!file) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: {} could not be written: {}", path, std::strerror(errno)));
  }
}

std::string csv_cell(const nlohmann::ordered_json& value) {
  if (value.is_null()) return "";
  if (!value.is_string()) return value.dump();
  std::string quoted = "\"";
  for (const char c : value.get<std::string>()) {
    quoted += c;
    if (c == '"') quoted += '"';
  }
  return quoted + "\"";
}

std::string csv_line(const std::vector<std::string>& cells) {
  std::string line;
  for (const std::string& cell : cells) line += fmt::format("{}{}", line.empty() ? "" : ",", cell);
  return line + "\n";
}

void describe_cpu(BenchContext& context) {
  context.device = cpuinfo("model name");
  if (context.device.empty()) context.device = "unknown CPU";
  context.device += fmt::format(", {} threads", hardware_threads());
  context.clock = cpuinfo("cpu MHz");
  context.clock = context.clock.empty() ? "unknown" : context.clock + " MHz";
}

template <typename Value>
nlohmann::ordered_json or_null(const std::optional<Value>& value) {
  if (!value) return nullptr;
  return *value;
}

bool same_work(const BenchRecord& a, const BenchRecord& b) {
  return a.op == b.op && a.workload == b.workload && a.heads == b.heads && a.t_q == b.t_q &&
         a.regime == b.regime && a.plan == b.plan;
}

}  // namespace

BenchContext describe_run(const Placement& placement, const std::string& commit,
                          const std::string& command) {
  BenchContext context;
  if (placement.on_host()) {
    describe_cpu(context);
  } else {
    const GpuDescription gpu = describe_gpu(placement.device().index);
    context.device = gpu.name;
    context.clock = gpu.clock;
    context.driver = gpu.driver;
    context.cuda = gpu.cuda;
  }
  context.load = load_average();
  context.build = fmt::format("{} ({})", version(), build_description());
  context.commit = commit;
  context.command = command;
  return context;
}

nlohmann::ordered_json to_json(const BenchRecord& record, const BenchContext& context) {
  nlohmann::ordered_json json = {
      {"op", record.op},
      {"backend", record.backend},
      {"simd", record.simd},
      {"workload", record.workload},
      {"shape", record.shape},
      {"heads", record.heads},
      {"index_heads", record.index_heads},
      {"t_q", record.t_q},
      {"t_k", record.t_k},
      {"topk", record.topk},
      {"head_dim", record.head_dim},
      {"threads", record.threads},
      {"seed", record.seed},
      {"regime", record.regime},
      {"l2", record.l2},
      {"simulated", false},
      {"check", record.check},
      {"samples", record.samples},
      {"median_ms", record.median_ms},
      {"p10_ms", record.p10_ms},
      {"p90_ms", record.p90_ms},
      {"tflops", nullptr},
      {"bytes_per_s", record.bytes / record.median_ms * 1e3},
      {"peak_tflops", nullptr},
      {"ceiling_share", nullptr},
      {"scratch_bytes", record.scratch_bytes},
      {"overlap", or_null(record.overlap)},
      {"plan", record.plan},
      {"plan_bytes", or_null(record.plan_bytes)},
      {"plan_ms", or_null(record.plan_ms)},
      {"error", record.error.text()},
      {"peer", nullptr},
      {"peer_median_ms", nullptr},
      {"peer_error", nullptr},
      {"ratio", nullptr},
      {"device", context.device},
      {"clock", context.clock},
      {"driver", or_null(context.driver)},
      {"cuda", or_null(context.cuda)},
      {"load", context.load},
      {"build", context.build},
      {"commit", context.commit},
      {"command", context.command},
  };
  if (record.flop > 0) json["tflops"] = record.gflops() / 1e3;
  if (record.peak_gflops) json["peak_tflops"] = *record.peak_gflops / 1e3;
  if (record.has_share()) json["ceiling_share"] = record.ceiling_share();
  if (record.peer) {
    json["peer"] = record.peer->name;
    json["peer_median_ms"] = record.peer->median_ms;
    json["peer_error"] = record.peer->error.text();
    json["ratio"] = record.peer->median_ms / record.median_ms;
  }
  return json;
}

std::string format_rate(double gflops) {
  return gflops < 1e4 ? fmt::format("{:.1f} GFLOP/s", gflops)
                      : fmt::format("{:.1f} TFLOP/s", gflops / 1e3);
}

std::string to_table(const std::vector<BenchRecord>& records) {
  std::vector<std::vector<std::string>> rows = {
      {"op", "backend", "workload", "shape", "T_q", "T_k", "H", "threads", "regime", "n", "median",
       "p10", "p90", "rate", "peak", "GB/s", "scratch", "error / bound"}};
  const bool peers = std::any_of(records.begin(), records.end(),
                                 [](const BenchRecord& r) { return r.peer.has_value(); });
  const bool plans = std::any_of(records.begin(), records.end(),
                                 [](const BenchRecord& r) { return r.plan_bytes.has_value(); });
  if (plans) rows.front().insert(rows.front().end(), {"plan built in", "plan"});
  if (peers) rows.front().insert(rows.front().end(), {"peer", "ratio", "peer's error"});
  for (const BenchRecord& r : records) {
    rows.push_back({r.plan == "none" ? r.op : fmt::format("{}, plan {}", r.op, r.plan), r.backend,
                    r.workload, r.shape, fmt::format("{}", r.t_q), fmt::format("{}", r.t_k),
                    fmt::format("{}", r.heads), fmt::format("{}", r.threads),
                    r.l2 == "warm" ? r.regime : r.regime + ", L2 " + r.l2,
                    fmt::format("{}", r.samples), format_seconds(r.median_ms / 1e3),
                    format_seconds(r.p10_ms / 1e3), format_seconds(r.p90_ms / 1e3),
                    r.flop > 0 ? format_rate(r.gflops()) : "-",
                    r.has_share() ? fmt::format("{:.1f} %", 100 * r.ceiling_share()) : "-",
                    fmt::format("{:.2f}", r.bytes / r.median_ms / 1e6),
                    format_bytes(static_cast<double>(r.scratch_bytes)), r.error.text()});
    if (plans) {
      rows.back().insert(rows.back().end(),
                         {r.plan_ms ? format_seconds(*r.plan_ms / 1e3) : "-",
                          r.plan_bytes ? format_bytes(static_cast<double>(*r.plan_bytes)) : "-"});
    }
    if (!peers) continue;
    if (r.peer) {
      rows.back().insert(rows.back().end(), {format_seconds(r.peer->median_ms / 1e3),
                                             fmt::format("{:.2f}", r.peer->median_ms / r.median_ms),
                                             r.peer->error.text()});
    } else {
      rows.back().insert(rows.back().end(), {"-", "-", "-"});
    }
  }
  return format_table(rows);
}

std::string to_scaling_table(const std::vector<BenchRecord>& records) {
  std::vector<std::vector<std::string>> rows = {
      {"op", "workload", "threads", "speed-up", "products alone", "share of it"}};
  for (const BenchRecord& record : records) {
    const auto first = std::find_if(records.begin(), records.end(), [&](const BenchRecord& other) {
      return same_work(other, record);
    });
    if (record.threads == first->threads) continue;
    const double speedup = first->median_ms / record.median_ms;
    const double products = *record.peak_gflops / *first->peak_gflops;
    rows.push_back({record.op, record.workload,
                    fmt::format("{} -> {}", first->threads, record.threads),
                    fmt::format("{:.2f}", speedup), fmt::format("{:.2f}", products),
                    fmt::format("{:.0f} %", 100 * speedup / products)});
  }
  return rows.size() == 1 ? "" : format_table(rows);
}

void check_appendable(const std::string& path) { open_appending(path); }

void append_json_lines(const std::string& path, const std::vector<BenchRecord>& records,
                       const BenchContext& context) {
  std::ofstream file = open_appending(path);
  for (const BenchRecord& record : records) file << to_json(record, context).dump() << '\n';
  close_checked(file, path);
}

void append_csv(const std::string& path, const std::vector<BenchRecord>& records,
                const BenchContext& context) {
  std::ofstream file = open_appending(path);
  file.seekp(0, std::ios::end);
  bool needs_header = file.tellp() == std::streampos(0);
  for (const BenchRecord& record : records) {
    std::vector<std::string> names, cells;
    const auto json = to_json(record, context);
    for (const auto& [name, value] : json.items()) {
      names.push_back(name);
      cells.push_back(csv_cell(value));
    }
    if (needs_header) file << csv_line(names);
    needs_header = false;
    file << csv_line(cells);
  }
  close_checked(file, path);
}

double quantile(const std::vector<double>& sorted, double share) {
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - static_cast<double>(below));
}

}  // namespace flashdsa::tools
