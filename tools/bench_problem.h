#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/pipeline.h"

namespace flashdsa::tools {

/// Sizes of a benchmark. T_q and T_k of 0 come from the workload.
struct BenchShape {
  std::int64_t t_q = 0;
  std::int64_t t_k = 0;
  std::int64_t heads = 64;        // H
  std::int64_t index_heads = 32;  // H_index
  std::int64_t topk = 2048;       // K
  std::int64_t head_dim = 576;    // D
};

struct BenchOptions {
  BenchShape shape;
  std::string workload = "random";
  std::int64_t rows = 0;  // keep the last `rows` query rows; 0: all
  std::uint64_t seed = 1;
  std::vector<std::string> texts;  // of workload `text`
};

/// Which inputs a benchmark needs; the others are not made.
struct BenchNeeds {
  bool attention = true;
  bool indexer = true;
};

/// One workload with its inputs, all of them random numbers of fixed seeds (`text`: real text).
struct BenchProblem {
  std::string workload;
  BenchShape shape;
  std::vector<std::int32_t> cu_seqlens;
  std::vector<std::int32_t> positions;  // storage position of every query row
  PackedMetadata metadata;
  AttentionTensors attention;  // q, kv, grad_out ~ N(0, 1/16^2), ascending selection
  IndexerTensors indexer;
  std::int64_t picks = 0;         // keys selected, over all rows
  std::int64_t scored_pairs = 0;  // visible keys of the rows that have more than K
};

/// Names that make_bench_problem takes.
std::span<const std::string_view> workload_names();

/// Throws Error(kValue) for an unknown workload or sizes that do not fit it.
BenchProblem make_bench_problem(const BenchOptions& options, const BenchNeeds& needs,
                                const Runtime& runtime);

/// The rows `rows` of a problem as a problem of their own, whose kv holds just their keys.
BenchProblem sample_rows(const BenchProblem& problem, std::span<const std::int64_t> rows,
                         const BenchNeeds& needs);

}  // namespace flashdsa::tools
