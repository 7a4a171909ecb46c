#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "flashdsa/runtime.h"
#include "tools/bench_check.h"
#include "tools/placement.h"

namespace flashdsa::tools {

/// What a peer's call of the same operation took, in turns with ours.
struct PeerRecord {
  std::string name;  // name@version
  double median_ms = 0;
  Figure error;
};

/// The machine, build and command that all rows of a run share.
struct BenchContext {
  std::string device;
  std::string clock;  // of a CPU the MHz at the start, of a GPU the most it may be
  std::optional<std::string> driver, cuda;  // versions, on a GPU
  double load = 0;  // the system's load average before the run: what else the CPUs are doing
  std::string build;
  std::string commit;
  std::string command;
};

BenchContext describe_run(const Placement& placement, const std::string& commit,
                          const std::string& command);

/// One row of a results file. docs/benchmarks.md defines every field.
struct BenchRecord {
  std::string op;
  std::string backend;
  std::string simd;
  std::string workload;
  std::string shape;
  std::int64_t heads = 0;
  std::int64_t index_heads = 0;
  std::int64_t t_q = 0;
  std::int64_t t_k = 0;
  std::int64_t topk = 0;
  std::int64_t head_dim = 0;
  int threads = 0;  // of the host; a GPU's calls are launched by one
  std::string regime;
  std::string l2;
  bool check = false;  // timed in checking mode
  std::uint64_t seed = 0;
  std::int64_t samples = 0;
  double median_ms = 0;
  double p10_ms = 0;
  double p90_ms = 0;
  double flop = 0;  // 0: the operation has no arithmetic to count
  double bytes = 0;
  std::optional<double> peak_gflops;  // absent: nobody measured this GPU's
  std::size_t scratch_bytes = 0;
  std::optional<double> overlap;
  std::string plan;  // of forward and backward: none, reused, built; else none
  std::optional<std::size_t> plan_bytes;
  std::optional<double> plan_ms;  // median of building the plan that the calls reused
  Figure error;
  std::optional<PeerRecord> peer;

  double gflops() const { return flop / median_ms / 1e6; }
  bool has_share() const { return flop > 0 && peak_gflops; }
  double ceiling_share() const { return gflops() / *peak_gflops; }
};

nlohmann::ordered_json to_json(const BenchRecord& record, const BenchContext& context);

/// "602.1 GFLOP/s", "535.3 TFLOP/s".
std::string format_rate(double gflops);

/// The rows as a text table.
std::string to_table(const std::vector<BenchRecord>& records);

/// Speed-up from the fewest threads to each other number, and the same of the peak's products;
/// empty where every row has one number of threads.
std::string to_scaling_table(const std::vector<BenchRecord>& records);

/// Append rows to a file that may exist. Throw Error(kValue) with the path.
void append_json_lines(const std::string& path, const std::vector<BenchRecord>& records,
                       const BenchContext& context);
void append_csv(const std::string& path, const std::vector<BenchRecord>& records,
                const BenchContext& context);

/// Throws Error(kValue) when `path` cannot be opened for appending.
void check_appendable(const std::string& path);

/// Value at quantile `share` of ascending `sorted`, interpolated between neighbours.
double quantile(const std::vector<double>& sorted, double share);

}  // namespace flashdsa::tools
