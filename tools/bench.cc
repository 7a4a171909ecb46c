// flashdsa bench: times the library's calls on named workloads, after checking their results.
// docs/benchmarks.md explains workloads, formulae and fields.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flashdsa/error.h"
#include "tools/bench_operations.h"
#include "tools/bench_peak.h"
#include "tools/bench_record.h"
#include "tools/bench_svg.h"
#include "tools/command.h"
#include "tools/output_file.h"
#include "tools/parse.h"
#include "tools/report.h"
#include "tools/synth_options.h"
#include "tools/workloads.h"

#ifndef FLASHDSA_COMMIT
#define FLASHDSA_COMMIT "unknown"
#endif

namespace flashdsa::tools {
namespace {

constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - 2;

// Rows of a workload that are run when nothing is said: a second or so a call on few cores.
constexpr std::int64_t kDefaultRows = 512;

struct BenchArgs {
  std::vector<std::string> operations = {"metadata", "topk", "compact", "forward", "backward"};
  std::vector<std::string> workloads = {"random", "drift90", "sft4k"};
  std::vector<std::string> texts;
  std::string preset = "glm5.2";
  std::int64_t rows = kDefaultRows;
  std::int64_t t_q = 0, t_k = 0;
  std::int64_t heads = 0, index_heads = 0, topk = 0, head_dim = 0;  // 0: the preset's
  std::int64_t seed = 1;
  std::int64_t repeats = 5;
  double min_seconds = 0.5;
  std::vector<std::string> threads;
  std::string backend = "auto", simd = "auto";
  std::string csv, json, svg;
  std::string commit = FLASHDSA_COMMIT;
  bool explicit_operations = false;
};

ModelShape shape_of(const BenchArgs& args) {
  ModelShape shape = preset(args.preset);
  if (args.heads > 0) shape.heads = args.heads;
  if (args.index_heads > 0) shape.index_heads = args.index_heads;
  if (args.topk > 0) shape.topk = args.topk;
  if (args.head_dim > 0) shape.head_dim = args.head_dim;
  if (shape.head_dim != 512 && shape.head_dim != 576) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: --head-dim must be 512 or 576, got {}", shape.head_dim));
  }
  return shape;
}

// "glm5.2-32k": the model and T_k, in thousands where it is a multiple of 1024.
std::string shape_name(const ModelShape& shape, std::int64_t t_k) {
  return t_k % 1024 == 0 ? fmt::format("{}-{}k", shape.name, t_k / 1024)
                         : fmt::format("{}-{}", shape.name, t_k);
}

std::vector<int> thread_counts(const BenchArgs& args) {
  if (args.threads.empty()) return {hardware_threads()};
  std::vector<int> counts;
  for (const std::string& text : args.threads) {
    const auto count = parse_integer(text);
    if (!count || *count < 1 || *count > 1024) {
      throw Error(ErrorCode::kValue,
                  fmt::format("bench: --threads must be numbers in 1..1024, got '{}'", text));
    }
    counts.push_back(static_cast<int>(*count));
  }
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

std::vector<double> time_samples(const Operation& operation, const Runtime& runtime,
                                 const BenchArgs& args) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  double total = 0;
  while (static_cast<std::int64_t>(seconds.size()) < args.repeats || total < args.min_seconds) {
    const auto begin = Clock::now();
    operation.run(runtime);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
    total += seconds.back();
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

/// One run of the command: what all rows share, and the rows so far.
class Bench {
 public:
  explicit Bench(const BenchArgs& args, const Runtime& runtime)
      : args_(args), runtime_(runtime), counts_(thread_counts(args)) {}

  void measure_peaks() {
    for (const int threads : counts_) peaks_[threads] = measure_peak_gflops(threads, runtime_.simd);
  }

  void run_workload(const std::string& name) {
    const Workload workload = make_workload(request(name));
    for (const std::string& op : args_.operations) {
      const std::string reason = refusal(op, workload);
      if (!reason.empty()) {
        if (args_.explicit_operations)
          fmt::print(stderr, "flashdsa: bench: left out: {}\n", reason);
        continue;
      }
      const Operation operation = make_operation(op, workload, runtime_);
      for (const int threads : counts_) run_operation(op, operation, workload, threads);
    }
  }

  std::string peak_line() const {
    std::vector<std::string> parts;
    for (const auto& [threads, gflops] : peaks_) {
      parts.push_back(
          fmt::format("{:.1f} GFLOP/s on {} thread{}", gflops, threads, threads == 1 ? "" : "s"));
    }
    return fmt::format("{}", fmt::join(parts, ", "));
  }

  const std::vector<BenchRecord>& records() const { return records_; }

 private:
  WorkloadRequest request(const std::string& name) const {
    const auto any = [&](bool (*needs)(std::string_view)) {
      return std::any_of(args_.operations.begin(), args_.operations.end(), needs);
    };
    WorkloadRequest request;
    request.name = name;
    request.shape = shape_of(args_);
    request.rows = args_.rows;
    request.t_q = args_.t_q;
    request.t_k = args_.t_k;
    request.seed = static_cast<std::uint64_t>(args_.seed);
    if (name == "text") request.texts = args_.texts;
    request.attention = any(needs_attention);
    request.indexer = any(needs_indexer);
    return request;
  }

  // The check comes first: it judges an untimed call that also warms caches and pages.
  void run_operation(const std::string& op, const Operation& operation, const Workload& workload,
                     int threads) {
    Usage usage;
    Runtime runtime = runtime_;
    runtime.threads = threads;
    runtime.usage = &usage;
    operation.run(runtime);
    BenchRecord record;
    record.error = operation.check();
    const std::vector<double> seconds = time_samples(operation, runtime, args_);
    record.op = op;
    record.backend = backend_name(runtime.backend);
    record.simd = runtime.backend == Backend::kCpu ? simd_target_name(runtime.simd) : "none";
    record.workload = workload.name;
    record.shape = shape_name(workload.shape, workload.t_k);
    record.heads = workload.shape.heads;
    record.index_heads = workload.shape.index_heads;
    record.t_q = workload.t_q;
    record.t_k = workload.t_k;
    record.topk = workload.shape.topk;
    record.head_dim = workload.shape.head_dim;
    record.threads = threads;
    record.seed = static_cast<std::uint64_t>(args_.seed);
    record.samples = static_cast<std::int64_t>(seconds.size());
    record.median_ms = 1e3 * quantile(seconds, 0.5);
    record.p10_ms = 1e3 * quantile(seconds, 0.1);
    record.p90_ms = 1e3 * quantile(seconds, 0.9);
    record.flop = operation.flop;
    record.bytes = operation.bytes;
    record.peak_gflops = peaks_.at(threads);
    record.scratch_bytes = usage.peak_scratch_bytes;
    record.overlap = operation.overlap;
    records_.push_back(std::move(record));
  }

  const BenchArgs& args_;
  Runtime runtime_;
  std::vector<int> counts_;
  std::map<int, double> peaks_;
  std::vector<BenchRecord> records_;
};

// The value among `values` whose name is `text`. Throws Error(kValue).
template <typename Value>
Value by_name(std::string_view (*name)(Value) noexcept, std::initializer_list<Value> values,
              const std::string& option, const std::string& text) {
  std::vector<std::string_view> names;
  for (const Value value : values) {
    if (name(value) == text) return value;
    names.push_back(name(value));
  }
  throw Error(ErrorCode::kValue, fmt::format("bench: {} must be one of {}, got '{}'", option,
                                             fmt::join(names, ", "), text));
}

// The backend and instruction set, named, that all rows run on.
Runtime choose_runtime(const BenchArgs& args) {
  Runtime runtime;
  runtime.backend =
      by_name(backend_name,
              {Backend::kAuto, Backend::kCpu, Backend::kReference, Backend::kSm90, Backend::kSm80},
              "--backend", args.backend);
  runtime.simd = by_name(simd_target_name,
                         {SimdTarget::kAuto, SimdTarget::kBaseline, SimdTarget::kAvx2,
                          SimdTarget::kAvx512, SimdTarget::kAvx512Bf16},
                         "--simd", args.simd);
  if (runtime.backend == Backend::kAuto) runtime.backend = Backend::kCpu;
  if (runtime.backend != Backend::kCpu && runtime.backend != Backend::kReference) {
    throw Error(ErrorCode::kUnavailable,
                fmt::format("bench: backend {} is not available: bench times host backends",
                            backend_name(runtime.backend)));
  }
  if (runtime.simd == SimdTarget::kAuto) runtime.simd = simd_targets().front();
  return runtime;
}

void check_names(const BenchArgs& args) {
  const auto known = operation_names();
  for (const std::string& op : args.operations) {
    if (std::find(known.begin(), known.end(), op) == known.end()) {
      throw Error(ErrorCode::kValue, fmt::format("bench: --op must be among {}, got '{}'",
                                                 fmt::join(known, ", "), op));
    }
  }
}

void execute(BenchArgs& args, const std::string& command_line, int& exit_code) {
  check_names(args);
  if (args.t_q > 0 || args.t_k > 0) args.workloads = {"custom"};
  const Runtime runtime = choose_runtime(args);
  for (const std::string& path : {args.csv, args.json}) {
    if (!path.empty()) check_appendable(path);
  }
  if (!args.svg.empty()) OutputFile::check_writable(args.svg);

  const BenchContext context = describe_run(args.commit, command_line);
  Bench bench(args, runtime);
  bench.measure_peaks();
  fmt::print(
      "device   {}\nclock    {}, load {:.2f}\nbuild    {}, commit {}\ncommand  {}\npeak     {}\n\n",
      context.device, context.clock, context.load, context.build, context.commit, context.command,
      bench.peak_line());
  flush_stdout();
  for (const std::string& name : args.workloads) bench.run_workload(name);
  if (bench.records().empty()) {
    throw Error(ErrorCode::kValue,
                "bench: --op must name an operation that a workload of "
                "--workload has, got none");
  }
  fmt::print("{}", to_table(bench.records()));
  const std::string scaling = to_scaling_table(bench.records());
  if (!scaling.empty()) fmt::print("\n{}", scaling);
  if (!args.json.empty()) append_json_lines(args.json, bench.records(), context);
  if (!args.csv.empty()) append_csv(args.csv, bench.records(), context);
  if (!args.svg.empty()) write_svg(args.svg, to_svg(bench.records(), context));
  const bool good = std::all_of(bench.records().begin(), bench.records().end(),
                                [](const BenchRecord& record) { return record.error.ok(); });
  exit_code = good ? kSuccess : kVerificationFailed;
}

void add_work_options(CLI::App& command, BenchArgs& args) {
  const auto list = [&](const char* name, std::vector<std::string>& target, const char* help) {
    return command.add_option(name, target, help)->delimiter(',')->type_name("NAME,...");
  };
  list("--op", args.operations,
       "Operations: metadata, topk, compact, forward, backward, step; default: all but step")
      ->each([&args](const std::string&) { args.explicit_operations = true; });
  list("--workload", args.workloads, "Workloads by name; default random,drift90,sft4k");
  command.add_option("--text", args.texts, "Text files of workload text")->type_name("FILE");
  add_integer_option(command, "--rows", args.rows, 0, kMaxRows,
                     "Run the last N query rows of a workload, 0: all; default 512");
  add_integer_option(command, "--t-q", args.t_q, 1, kMaxRows, "T_q of workload custom");
  add_integer_option(command, "--t-k", args.t_k, 1, kMaxRows, "T_k of workload custom");
  command.add_option("--preset", args.preset, "Model whose sizes are used; default glm5.2")
      ->type_name("NAME");
  add_integer_option(command, "--heads", args.heads, 1, 128, "H, attention heads");
  add_integer_option(command, "--index-heads", args.index_heads, 1, 64, "H_index, indexer heads");
  add_integer_option(command, "--topk", args.topk, 1, 2048, "K, selection width");
  add_integer_option(command, "--head-dim", args.head_dim, 512, 576, "D, 576 or 512");
  add_integer_option(command, "--seed", args.seed, 0, kMaxRows, "Seed of all inputs; default 1");
}

void add_run_options(CLI::App& command, BenchArgs& args) {
  command.add_option("--backend", args.backend, "auto, cpu or reference")->type_name("NAME");
  command.add_option("--simd", args.simd, "Instruction set of the cpu backend")->type_name("NAME");
  command.add_option("--threads", args.threads, "Numbers of threads, each timed; default: all")
      ->delimiter(',')
      ->type_name("N,...");
  add_integer_option(command, "--repeats", args.repeats, 1, 1000000,
                     "Timed calls of a row at least; default 5");
  add_real_option(command, "--min-seconds", args.min_seconds, 0, 3600,
                  "Time of a row's calls at least; default 0.5");
  command.add_option("--csv", args.csv, "Append the rows to a CSV file")->type_name("FILE");
  command.add_option("--json", args.json, "Append the rows as JSON lines")->type_name("FILE");
  command.add_option("--svg", args.svg, "Draw the rows")->type_name("FILE");
  command.add_option("--commit", args.commit, "Commit that rows name; default: as built")
      ->type_name("TEXT");
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  const auto args = std::make_shared<BenchArgs>();
  CLI::App* command =
      app.add_subcommand("bench", "Check and time the library's calls on named workloads");
  add_work_options(*command, *args);
  add_run_options(*command, *args);
  command->footer("Exit code 1 when a result breaks its bound.");
  command->callback([args, command, &exit_code] {
    std::string line = "flashdsa bench";
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() == 0) continue;
      line += fmt::format(" {} {}", option->get_name(), fmt::join(option->results(), ","));
    }
    execute(*args, line, exit_code);
  });
}

}  // namespace flashdsa::tools
