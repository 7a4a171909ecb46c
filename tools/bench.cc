// flashdsa bench: times the library's calls on named workloads, after checking their results.
// docs/benchmarks.md explains workloads, formulae and fields.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flashdsa/error.h"
#include "tools/bench_operations.h"
#include "tools/bench_peak.h"
#include "tools/bench_peer.h"
#include "tools/bench_record.h"
#include "tools/bench_svg.h"
#include "tools/bench_timing.h"
#include "tools/command.h"
#include "tools/options.h"
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

// Rows of a workload that a host backend runs when nothing is said: a second or so a call on few
// cores. A GPU runs all.
constexpr std::int64_t kHostRows = 512;
constexpr std::int64_t kNotGiven = -1;

struct BenchArgs {
  std::vector<std::string> operations = {"metadata", "topk", "compact", "forward", "backward"};
  std::vector<std::string> workloads = {"random", "drift90", "sft4k"};
  std::vector<std::string> texts;
  std::string preset = "glm5.2";
  std::int64_t rows = kNotGiven;
  std::int64_t t_q = 0, t_k = 0;
  std::vector<std::string> heads;                        // empty: the preset's
  std::int64_t index_heads = 0, topk = 0, head_dim = 0;  // 0: the preset's
  std::int64_t seed = 1;
  TimingOptions timing;
  std::vector<std::string> regimes = {"warm"};
  std::string l2 = "warm";
  std::vector<std::string> plans = {"none"};
  std::string peer_library;
  std::vector<std::string> threads;
  std::string backend = "auto", simd = "auto";
  std::string csv, json, svg;
  std::string commit = FLASHDSA_COMMIT;
  bool explicit_operations = false;
};

// Numbers of an option's list, each in low..high.
std::vector<std::int64_t> numbers_of(const char* option, const std::vector<std::string>& texts,
                                     std::int64_t low, std::int64_t high) {
  std::vector<std::int64_t> numbers;
  for (const std::string& text : texts) {
    const auto number = parse_integer(text);
    if (!number || *number < low || *number > high) {
      throw Error(ErrorCode::kValue, fmt::format("bench: {} must be numbers in {}..{}, got '{}'",
                                                 option, low, high, text));
    }
    numbers.push_back(*number);
  }
  return numbers;
}

// The shapes whose rows are wanted: the preset's sizes as far as no option says otherwise, once for
// each number of heads.
std::vector<ModelShape> shapes_of(const BenchArgs& args) {
  const auto names = preset_names();
  if (std::find(names.begin(), names.end(), args.preset) == names.end()) {
    throw Error(ErrorCode::kValue, fmt::format("bench: --preset must be one of {}, got '{}'",
                                               fmt::join(names, ", "), args.preset));
  }
  ModelShape shape = preset(args.preset);
  if (args.index_heads > 0) shape.index_heads = args.index_heads;
  if (args.topk > 0) shape.topk = args.topk;
  if (args.head_dim > 0) shape.head_dim = args.head_dim;
  if (shape.head_dim != 512 && shape.head_dim != 576) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: --head-dim must be 512 or 576, got {}", shape.head_dim));
  }
  std::vector<ModelShape> shapes;
  for (const std::int64_t heads : numbers_of("--heads", args.heads, 1, 128)) {
    shapes.push_back(shape);
    shapes.back().heads = heads;
  }
  if (shapes.empty()) shapes.push_back(shape);
  return shapes;
}

// "glm5.2-32k": the model and T_k, in thousands where it is a multiple of 1024.
std::string shape_name(const ModelShape& shape, std::int64_t t_k) {
  return t_k % 1024 == 0 ? fmt::format("{}-{}k", shape.name, t_k / 1024)
                         : fmt::format("{}-{}", shape.name, t_k);
}

std::vector<int> thread_counts(const BenchArgs& args) {
  if (args.threads.empty()) return {hardware_threads()};
  std::vector<int> counts;
  for (const std::int64_t count : numbers_of("--threads", args.threads, 1, 1024)) {
    counts.push_back(static_cast<int>(count));
  }
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

/// One run of the command: what all rows share, and the rows so far.
class Bench {
 public:
  Bench(const BenchArgs& args, const Runtime& runtime, Placement placement)
      : args_(args),
        placement_(std::move(placement)),
        runtime_(runtime),
        counts_(placement_.on_host() ? thread_counts(args) : std::vector{1}) {
    runtime_.backend = placement_.backend();
    runtime_.stream = placement_.stream();
    if (!args.peer_library.empty()) peer_.emplace(args.peer_library);
  }

  void find_peaks(const BenchContext& context) {
    for (const int threads : counts_) {
      for (const Regime regime : regimes()) {
        peaks_[{threads, regime}] = placement_.on_host()
                                        ? measure_peak_gflops(threads, runtime_.simd)
                                        : gpu_peak_gflops(context.device, regime);
      }
    }
  }

  void run_workload(const std::string& name, const ModelShape& shape) {
    PlacedWorkload workload{make_workload(request(name, shape)), placement_, {}};
    workload.placed = placement_.place_all(workload.host);
    for (const std::string& op : args_.operations) {
      const std::string reason = refusal(op, workload.host);
      if (!reason.empty()) {
        left_out_.push_back(reason);
        continue;
      }
      const std::optional<Operation> peer = peer_operation(op, workload);
      for (const PlanUse plan : plans_of(op)) {
        const Operation operation = make_operation(op, workload, {}, plan, runtime_);
        for (const int threads : counts_) {
          run_operation(op, plan, operation, peer, workload.host, threads);
        }
      }
    }
  }

  std::string peak_line() const {
    std::vector<std::string> parts;
    for (const auto& [place, gflops] : peaks_) {
      const auto& [threads, regime] = place;
      const std::string where =
          placement_.on_host() ? fmt::format("on {} thread{}", threads, threads == 1 ? "" : "s")
                               : regime_name(regime);
      parts.push_back(gflops ? fmt::format("{} {}", format_rate(*gflops), where) : "unknown");
    }
    return fmt::format("{}", fmt::join(parts, ", "));
  }

  const std::vector<BenchRecord>& records() const { return records_; }

  /// Why operations that were asked for did not run.
  const std::vector<std::string>& left_out() const { return left_out_; }

 private:
  std::vector<PlanUse> plans_of(const std::string& op) const {
    if (!takes_plan(op)) return {PlanUse::kNone};
    std::vector<PlanUse> plans;
    for (const std::string& name : args_.plans) plans.push_back(parse_plan_use(name));
    return plans;
  }

  WorkloadRequest request(const std::string& name, const ModelShape& shape) const {
    const auto any = [&](bool (*needs)(std::string_view)) {
      return std::any_of(args_.operations.begin(), args_.operations.end(), needs);
    };
    WorkloadRequest request;
    request.name = name;
    request.shape = shape;
    request.rows = args_.rows;
    if (request.rows == kNotGiven) request.rows = placement_.on_host() ? kHostRows : 0;
    request.t_q = args_.t_q;
    request.t_k = args_.t_k;
    request.seed = static_cast<std::uint64_t>(args_.seed);
    if (name == "text") request.texts = args_.texts;
    request.attention = any(needs_attention);
    request.indexer = any(needs_indexer);
    return request;
  }

  // The peer's call, run once; nothing where it does not have the operation or take the problem.
  std::optional<Operation> peer_operation(const std::string& op,
                                          const PlacedWorkload& workload) const {
    if (!peer_ || !peer_->has(op)) return std::nullopt;
    try {
      Operation operation = make_operation(op, workload, peer_->calls(), PlanUse::kNone, runtime_);
      operation.run(runtime_);
      return operation;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kUnavailable) return std::nullopt;
      throw;
    }
  }

  std::vector<Regime> regimes() const {
    std::vector<Regime> regimes;
    for (const std::string& name : args_.regimes) regimes.push_back(parse_regime(name));
    return regimes;
  }

  // The checks come first: they judge untimed calls that also warm caches and pages.
  void run_operation(const std::string& op, PlanUse plan, const Operation& operation,
                     const std::optional<Operation>& peer, const Workload& workload, int threads) {
    Usage usage;
    Runtime runtime = runtime_;
    runtime.threads = threads;
    runtime.usage = &usage;
    operation.run(runtime);
    BenchRecord record = describe(op, operation, workload, threads);
    record.plan = plan_use_name(plan);
    record.error = operation.check();
    if (peer) record.peer = PeerRecord{peer_->name(), 0, peer->check()};
    for (const Regime regime : regimes()) {
      TimingOptions timing = args_.timing;
      timing.regime = regime;
      timing.flush_l2 = args_.l2 == "flushed";
      record.regime = regime_name(regime);
      record.peak_gflops = peaks_.at({threads, regime});
      time_row(record, operation, peer, runtime, timing);
      record.scratch_bytes = usage.peak_scratch_bytes;
      records_.push_back(record);
    }
  }

  BenchRecord describe(const std::string& op, const Operation& operation, const Workload& workload,
                       int threads) const {
    BenchRecord record;
    record.op = op;
    record.backend = backend_name(runtime_.backend);
    record.simd = runtime_.backend == Backend::kCpu ? simd_target_name(runtime_.simd) : "none";
    record.workload = workload.name;
    record.shape = shape_name(workload.shape, workload.t_k);
    record.heads = workload.shape.heads;
    record.index_heads = workload.shape.index_heads;
    record.t_q = workload.t_q;
    record.t_k = workload.t_k;
    record.topk = workload.shape.topk;
    record.head_dim = workload.shape.head_dim;
    record.threads = threads;
    record.l2 = args_.l2;
    record.check = runtime_.check;
    record.seed = static_cast<std::uint64_t>(args_.seed);
    record.flop = operation.flop;
    record.bytes = operation.bytes;
    record.overlap = operation.overlap;
    record.plan_bytes = operation.plan_bytes;
    return record;
  }

  void time_row(BenchRecord& record, const Operation& operation,
                const std::optional<Operation>& peer, const Runtime& runtime,
                const TimingOptions& timing) const {
    std::vector<std::function<void()>> calls = {[&] { operation.run(runtime); }};
    if (peer) calls.emplace_back([&] { peer->run(runtime); });
    const auto seconds = times_of(calls, timing);
    record.samples = static_cast<std::int64_t>(seconds.front().size());
    record.median_ms = 1e3 * quantile(seconds.front(), 0.5);
    record.p10_ms = 1e3 * quantile(seconds.front(), 0.1);
    record.p90_ms = 1e3 * quantile(seconds.front(), 0.9);
    if (peer) record.peer->median_ms = 1e3 * quantile(seconds.back(), 0.5);
    if (operation.build_plan) {
      const auto building = times_of({[&] { operation.build_plan(runtime); }}, timing);
      record.plan_ms = 1e3 * quantile(building.front(), 0.5);
    }
  }

  // Seconds of each call, which take turns; on the host there is one.
  std::vector<std::vector<double>> times_of(const std::vector<std::function<void()>>& calls,
                                            const TimingOptions& timing) const {
    if (!placement_.on_host()) return time_on_device(calls, placement_, timing);
    return {time_on_host(calls.front(), timing)};
  }

  const BenchArgs& args_;
  Placement placement_;
  Runtime runtime_;
  std::vector<int> counts_;
  std::optional<PeerLibrary> peer_;
  std::map<std::pair<int, Regime>, std::optional<double>> peaks_;
  std::vector<BenchRecord> records_;
  std::vector<std::string> left_out_;
};

Runtime choose_runtime(const BenchArgs& args) {
  Runtime runtime = make_runtime("bench", args.backend, args.simd);
  if (runtime.simd == SimdTarget::kAuto) runtime.simd = simd_targets().front();
  return runtime;
}

// Refuses what is for devices alone.
void check_host(const BenchArgs& args, const Placement& placement) {
  const auto refuse = [&](const char* option, const std::string& expected, const std::string& got) {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: {} must be {} on backend {}, got '{}'", option, expected,
                            backend_name(placement.backend()), got));
  };
  const std::string regimes = fmt::format("{}", fmt::join(args.regimes, ","));
  if (regimes != "warm") refuse("--regime", "warm", regimes);
  if (args.l2 != "warm") refuse("--l2", "warm", args.l2);
  if (!args.peer_library.empty()) refuse("--peer-library", "absent", args.peer_library);
}

void check_options(const BenchArgs& args) {
  const auto known = operation_names();
  for (const std::string& op : args.operations) {
    if (std::find(known.begin(), known.end(), op) == known.end()) {
      throw Error(ErrorCode::kValue, fmt::format("bench: --op must be among {}, got '{}'",
                                                 fmt::join(known, ", "), op));
    }
  }
  shapes_of(args);
  for (const std::string& regime : args.regimes) parse_regime(regime);
  for (const std::string& plan : args.plans) parse_plan_use(plan);
  if (args.l2 != "warm" && args.l2 != "flushed") {
    throw Error(ErrorCode::kValue,
                fmt::format("bench: --l2 must be warm or flushed, got '{}'", args.l2));
  }
}

void print_header(const BenchContext& context, const Bench& bench) {
  fmt::print("device   {}\nclock    {}, load {:.2f}\n", context.device, context.clock,
             context.load);
  if (context.driver) fmt::print("driver   {}, CUDA {}\n", *context.driver, *context.cuda);
  fmt::print("build    {}, commit {}\ncommand  {}\npeak     {}\n\n", context.build, context.commit,
             context.command, bench.peak_line());
  flush_stdout();
}

void execute(BenchArgs& args, const std::string& command_line, int& exit_code) {
  check_options(args);
  if (args.t_q > 0 || args.t_k > 0) args.workloads = {"custom"};
  const Runtime runtime = choose_runtime(args);
  const Placement placement(runtime, /*has_float64=*/false);
  if (placement.on_host()) check_host(args, placement);
  for (const std::string& path : {args.csv, args.json}) {
    if (!path.empty()) check_appendable(path);
  }
  if (!args.svg.empty()) OutputFile::check_writable(args.svg);

  const BenchContext context = describe_run(placement, args.commit, command_line);
  Bench bench(args, runtime, placement);
  bench.find_peaks(context);
  print_header(context, bench);
  for (const std::string& name : args.workloads) {
    for (const ModelShape& shape : shapes_of(args)) bench.run_workload(name, shape);
  }
  if (bench.records().empty()) {
    throw Error(ErrorCode::kValue, fmt::format("bench: --op must name an operation that a workload "
                                               "has, got none: {}",
                                               bench.left_out().front()));
  }
  fmt::print("{}", to_table(bench.records()));
  if (args.explicit_operations) {
    for (const std::string& reason : bench.left_out()) fmt::print("left out: {}\n", reason);
  }
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
       "Operations: metadata, topk, indexer_backward, compact, plan, forward, backward, "
       "backward_deterministic, step; "
       "default: all but indexer_backward, plan, backward_deterministic and step")
      ->each([&args](const std::string&) { args.explicit_operations = true; });
  list("--workload", args.workloads, "Workloads by name; default random,drift90,sft4k");
  command.add_option("--text", args.texts, "Text files of workload text")->type_name("FILE");
  add_integer_option(command, "--rows", args.rows, 0, kMaxRows,
                     "Run the last N query rows of a workload, 0: all; default 512, on a GPU all");
  add_integer_option(command, "--t-q", args.t_q, 1, kMaxRows, "T_q of workload custom");
  add_integer_option(command, "--t-k", args.t_k, 1, kMaxRows, "T_k of workload custom");
  command.add_option("--preset", args.preset, "Model whose sizes are used; default glm5.2")
      ->type_name("NAME");
  command.add_option("--heads", args.heads, "H, attention heads, 1..128, each timed")
      ->delimiter(',')
      ->type_name("N,...");
  add_integer_option(command, "--index-heads", args.index_heads, 1, 64, "H_index, indexer heads");
  add_integer_option(command, "--topk", args.topk, 1, 2048, "K, selection width");
  add_integer_option(command, "--head-dim", args.head_dim, 512, 576, "D, 576 or 512");
  add_integer_option(command, "--seed", args.seed, 0, kMaxRows, "Seed of all inputs; default 1");
}

void add_run_options(CLI::App& command, BenchArgs& args) {
  command
      .add_option("--backend", args.backend,
                  "auto, cpu, reference or sm90; auto is the best one whose device is present")
      ->type_name("NAME");
  command.add_option("--simd", args.simd, "Instruction set of the cpu backend")->type_name("NAME");
  command
      .add_option("--threads", args.threads,
                  "Numbers of threads of a host backend, each timed; default: all")
      ->delimiter(',')
      ->type_name("N,...");
  command
      .add_option("--regime", args.regimes,
                  "On a GPU, each timed: cold, warm (150 ms of calls before), sustained (1.5 s); "
                  "default warm")
      ->delimiter(',')
      ->type_name("NAME,...");
  command
      .add_option("--l2", args.l2,
                  "On a GPU: warm, or flushed before every timed call; default warm")
      ->type_name("NAME");
  command
      .add_option("--plan", args.plans,
                  "What forward and backward know of the selection, each timed: none, reused (a "
                  "plan built once), built (by every call); default none")
      ->delimiter(',')
      ->type_name("NAME,...");
  command
      .add_option("--peer-library", args.peer_library,
                  "On a GPU: shared library (bench/peer.h) whose calls take turns with ours")
      ->type_name("FILE");
  add_integer_option(command, "--repeats", args.timing.repeats, 1, 1000000,
                     "Timed calls of a row at least; default 5, on a GPU what 100 ms hold");
  add_real_option(command, "--min-seconds", args.timing.min_seconds, 0, 3600,
                  "Time of a row's calls on a host backend at least; default 0.5");
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
