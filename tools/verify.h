#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

namespace flashdsa::tools {

/// Bounds of SPEC section 8.
inline constexpr double kOutRmse = 4e-3;
inline constexpr double kOutCosine = 0.99999;
inline constexpr double kGradRmse = 1e-2;
inline constexpr double kVectorFactor = 4;  // a single vector may use this multiple of its bound
inline constexpr double kScoreError = 2e-5;

/// Allowances where a result cancels to nothing, of its terms before they cancel.
inline constexpr double kFp32Floor = 2e-6;       // of a gradient's absolute terms
inline constexpr double kScoreFloor = 0x1p-24;   // of a score's absolute terms: one FP32 rounding
inline constexpr double kBf16Rounding = 0x1p-8;  // of one factor of a term held in BF16
inline constexpr double kUnderflow = 1e-35;      // below this FP32 and BF16 hold nothing

/// The error table: one line per comparison.
class ErrorTable {
 public:
  void add(std::string tensor, std::string measure, std::string got, std::string bound, bool ok);

  bool ok() const;
  std::string text() const;
  nlohmann::ordered_json json() const;

 private:
  struct Line {
    std::string tensor;
    std::string measure;
    std::string got;
    std::string bound;
    bool ok;
  };
  std::vector<Line> lines_;
};

/// Where a vector stands in its tensor, for the table.
struct Place {
  std::int64_t row = 0;
  std::int64_t head = -1;  // -1: the tensor has no heads
};

/// Judges a tensor of vectors against their FP64 values: relative RMSE over the whole tensor, every
/// single vector, and no non-finite value where the reference has none or the reverse. Elements
/// that are non-finite in the reference count no further.
class VectorJudge {
 public:
  enum class Vectors : std::uint8_t { kJudged, kNotJudged };

  VectorJudge(std::string tensor, double rmse_bound, Vectors vectors = Vectors::kJudged)
      : tensor_(std::move(tensor)), bound_(rmse_bound), vectors_(vectors) {}

  /// `tensor_floor` is this vector's share of the absolute allowance of the whole tensor (they add
  /// up as squares), `vector_floor` its own. A floor that is not finite counts as 0.
  void add(std::span<const double> got, std::span<const double> want, double tensor_floor,
           double vector_floor, Place place);

  /// Adds the lines; `cosine_bound` of 0 asks for none.
  void report(ErrorTable& table, double cosine_bound = 0) const;

 private:
  std::string tensor_;
  double bound_;
  Vectors vectors_;
  std::int64_t misplaced_ = 0;  // non-finite where the other is finite
  double error_squares_ = 0;
  double want_squares_ = 0;
  double got_squares_ = 0;
  double product_ = 0;
  double floor_squares_ = 0;
  double largest_want_ = 0;
  double worst_ratio_ = -1;  // of a vector's error to what it may be; -1: no vector yet
  double worst_error_ = 0;
  double worst_allowed_ = 0;
  Place worst_;
};

/// Judges lse or max_logits: -inf exactly where the reference has it, elsewhere an absolute error.
class LogJudge {
 public:
  /// `tight`: the bound of the host backends.
  LogJudge(std::string tensor, bool tight)
      : tensor_(std::move(tensor)), base_(tight ? 1e-5 : 1e-4) {}

  void add(double got, double want, Place place);
  void report(ErrorTable& table) const;

 private:
  std::string tensor_;
  double base_;
  std::int64_t misplaced_ = 0;
  bool any_ = false;
  double worst_error_ = 0;
  double worst_bound_ = 1;
  Place worst_;
};

/// Counts what had to be exactly zero and is not; NaN is not.
class ZeroJudge {
 public:
  ZeroJudge(std::string tensor, std::string where)
      : tensor_(std::move(tensor)), where_(std::move(where)) {}

  void add(std::span<const double> got);
  void report(ErrorTable& table) const;

 private:
  std::string tensor_;
  std::string where_;
  std::int64_t nonzero_ = 0;
};

/// What the indexer computes for one query row, in FP64. Spans are row-major.
struct ScoreRow {
  std::span<const double> index_q;  // [H_index, channels]
  std::span<const double> weights;  // [H_index]
  std::span<const double> keys;     // visible keys [S, channels]
};

/// score[s] = sum_h weights[h] * max(0, dot(index_q[h], keys[s])), max(0, NaN) = NaN.
std::vector<double> exact_scores(const ScoreRow& row);

/// The error that each score of the row may have: a share of the largest sum before heads cancel.
double score_slack(const ScoreRow& row);

/// Whether every partial sum of the row's scores is exact in FP32, so that any order of summation
/// gives the same scores.
bool scores_are_exact(const ScoreRow& row);

/// "" or what is wrong with a choice among the row's keys: `mine` and `best` are ascending
/// positions in 0..S-1, as many in either; `best` is the right choice.
std::string judge_choice(const ScoreRow& row, std::span<const std::int32_t> mine,
                         std::span<const std::int32_t> best);

}  // namespace flashdsa::tools
