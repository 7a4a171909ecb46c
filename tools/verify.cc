#include "tools/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "tools/report.h"

namespace flashdsa::tools {
namespace {

std::string format_place(Place place) {
  return place.head < 0 ? fmt::format("[{}]", place.row)
                        : fmt::format("[{}, {}]", place.row, place.head);
}

// error / size, where nothing is relative to nothing 0 and something infinite.
double ratio_of(double error, double size) {
  if (error == 0) return 0;
  return size > 0 ? error / size : std::numeric_limits<double>::infinity();
}

double finite_or_zero(double value) { return std::isfinite(value) ? value : 0; }

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// max(0, x) that hands NaN on.
double relu(double x) { return x <= 0 ? 0 : x; }

// The same row with absolute, finite values.
struct AbsoluteRow {
  explicit AbsoluteRow(const ScoreRow& row)
      : index_q(absolute(row.index_q)), weights(absolute(row.weights)), keys(absolute(row.keys)) {}

  static std::vector<double> absolute(std::span<const double> values) {
    std::vector<double> result;
    result.reserve(values.size());
    for (const double value : values) result.push_back(std::abs(finite_or_zero(value)));
    return result;
  }

  std::vector<double> index_q;
  std::vector<double> weights;
  std::vector<double> keys;
};

// Exponent of the largest power of two that divides every value; values are finite and at most 24
// bits wide, as BF16 and FP32 are. 0 when all are zero.
int unit_exponent(std::span<const double> values) {
  constexpr int kBits = 24;
  int unit = std::numeric_limits<int>::max();
  for (const double value : values) {
    if (value == 0) continue;
    int exponent = 0;
    const double mantissa = std::frexp(value, &exponent);
    const auto whole = static_cast<std::int64_t>(std::abs(std::ldexp(mantissa, kBits)));
    const int low_bit = __builtin_ctzll(static_cast<unsigned long long>(whole));
    unit = std::min(unit, exponent - kBits + low_bit);
  }
  return unit == std::numeric_limits<int>::max() ? 0 : unit;
}

std::size_t channels_of(const ScoreRow& row) { return row.index_q.size() / row.weights.size(); }

std::size_t keys_of(const ScoreRow& row) { return row.keys.size() / channels_of(row); }

// Keys whose score is 0 in any arithmetic: every head's dot is clearly not positive.
std::vector<bool> surely_zero(const ScoreRow& row) {
  constexpr double kClearly = 1e-5;
  const auto is_finite = [](double x) { return std::isfinite(x); };
  const std::size_t channels = channels_of(row);
  std::vector<bool> zero(keys_of(row), false);
  if (!std::all_of(row.index_q.begin(), row.index_q.end(), is_finite) ||
      !std::all_of(row.weights.begin(), row.weights.end(), is_finite)) {
    return zero;
  }
  const AbsoluteRow absolute(row);
  for (std::size_t s = 0; s < zero.size(); ++s) {
    bool all = true;
    for (std::size_t h = 0; all && h < row.weights.size(); ++h) {
      const double value = dot(row.index_q.subspan(h * channels, channels),
                               row.keys.subspan(s * channels, channels));
      const double size = dot(std::span(absolute.index_q).subspan(h * channels, channels),
                              std::span(absolute.keys).subspan(s * channels, channels));
      all = value <= -kClearly * size;
    }
    zero[s] = all;
  }
  return zero;
}

// The score of the last key that belongs into the selection: NaN ranks first.
double lowest_score(const std::vector<double>& scores, std::span<const std::int32_t> best) {
  double lowest = std::numeric_limits<double>::quiet_NaN();
  for (const std::int32_t s : best) {
    const double score = scores[static_cast<std::size_t>(s)];
    if (std::isnan(lowest) || score < lowest) lowest = score;
  }
  return lowest;
}

// Whether a larger key was taken before a smaller one among those that score exactly zero.
bool breaks_zero_ties(const ScoreRow& row, std::span<const std::int32_t> mine) {
  const std::vector<bool> zero = surely_zero(row);
  bool skipped = false;
  for (std::size_t s = 0; s < zero.size(); ++s) {
    if (!zero[s]) continue;
    const bool taken = std::binary_search(mine.begin(), mine.end(), static_cast<std::int32_t>(s));
    if (taken && skipped) return true;
    skipped = skipped || !taken;
  }
  return false;
}

}  // namespace

void ErrorTable::add(std::string tensor, std::string measure, std::string got, std::string bound,
                     bool ok) {
  lines_.push_back({std::move(tensor), std::move(measure), std::move(got), std::move(bound), ok});
}

bool ErrorTable::ok() const {
  return std::all_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.ok; });
}

std::string ErrorTable::text() const {
  std::vector<std::vector<std::string>> rows = {{"tensor", "measure", "got", "bound", "result"}};
  for (const Line& line : lines_) {
    rows.push_back({line.tensor, line.measure, line.got, line.bound, line.ok ? "ok" : "FAIL"});
  }
  return format_table(rows);
}

nlohmann::ordered_json ErrorTable::json() const {
  auto list = nlohmann::ordered_json::array();
  for (const Line& line : lines_) {
    list.push_back({{"tensor", line.tensor},
                    {"measure", line.measure},
                    {"got", line.got},
                    {"bound", line.bound},
                    {"ok", line.ok}});
  }
  return list;
}

void VectorJudge::add(std::span<const double> got, std::span<const double> want,
                      double tensor_floor, double vector_floor, Place place) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isfinite(got[i]) != std::isfinite(want[i])) ++misplaced_;
    if (!std::isfinite(got[i]) || !std::isfinite(want[i])) continue;
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
    got_squares_ += got[i] * got[i];
    product_ += got[i] * want[i];
    largest_want_ = std::max(largest_want_, std::abs(want[i]));
  }
  error_squares_ += error;
  want_squares_ += size;
  floor_squares_ += finite_or_zero(tensor_floor) * finite_or_zero(tensor_floor);
  const double allowed = kVectorFactor * bound_ * std::sqrt(size) + finite_or_zero(vector_floor);
  const double ratio = ratio_of(std::sqrt(error), allowed);
  if (ratio <= worst_ratio_) return;
  worst_ratio_ = ratio;
  worst_error_ = std::sqrt(error);
  worst_allowed_ = allowed;
  worst_ = place;
}

void VectorJudge::report(ErrorTable& table, double cosine_bound) const {
  table.add(tensor_, "misplaced non-finite values", fmt::format("{}", misplaced_), "0",
            misplaced_ == 0);
  const double error = std::sqrt(error_squares_), size = std::sqrt(want_squares_);
  const double floor = std::sqrt(floor_squares_) + kUnderflow;
  table.add(tensor_, "relative RMSE", fmt::format("{:.3g}", ratio_of(error, size)),
            fmt::format("{:.3g} (+ {:.2g} absolute)", bound_, floor),
            error <= bound_ * size + floor);
  if (cosine_bound > 0) {
    const double norms = std::sqrt(got_squares_) * size;
    const double cosine = norms > 0 ? product_ / norms : 1;
    table.add(tensor_, "cosine", fmt::format("{:.7f}", cosine), fmt::format("{}", cosine_bound),
              cosine >= cosine_bound || largest_want_ < kUnderflow);
  }
  if (vectors_ == Vectors::kNotJudged || worst_ratio_ < 0) return;
  table.add(tensor_, fmt::format("worst vector {}, error", format_place(worst_)),
            fmt::format("{:.3g}", worst_error_), fmt::format("{:.3g}", worst_allowed_),
            worst_ratio_ <= 1);
}

void LogJudge::add(double got, double want, Place place) {
  if (!std::isfinite(want)) {
    const bool same = std::isnan(want) ? std::isnan(got) : got == want;
    misplaced_ += same ? 0 : 1;
    return;
  }
  if (!std::isfinite(got)) {
    ++misplaced_;
    return;
  }
  const double error = std::abs(got - want), bound = base_ + 1e-6 * std::abs(want);
  if (any_ && error / bound <= worst_error_ / worst_bound_) return;
  any_ = true;
  worst_error_ = error;
  worst_bound_ = bound;
  worst_ = place;
}

void LogJudge::report(ErrorTable& table) const {
  table.add(tensor_, "misplaced non-finite values", fmt::format("{}", misplaced_), "0",
            misplaced_ == 0);
  if (!any_) return;
  table.add(tensor_, fmt::format("worst value {}, absolute error", format_place(worst_)),
            fmt::format("{:.3g}", worst_error_), fmt::format("{:.3g}", worst_bound_),
            worst_error_ <= worst_bound_);
}

void ZeroJudge::add(std::span<const double> got) {
  nonzero_ += std::count_if(got.begin(), got.end(), [](double value) { return value != 0; });
}

void ZeroJudge::report(ErrorTable& table) const {
  table.add(tensor_, "nonzero values in " + where_, fmt::format("{}", nonzero_), "0",
            nonzero_ == 0);
}

std::vector<double> exact_scores(const ScoreRow& row) {
  const std::size_t channels = channels_of(row);
  std::vector<double> scores(keys_of(row));
  for (std::size_t s = 0; s < scores.size(); ++s) {
    for (std::size_t h = 0; h < row.weights.size(); ++h) {
      scores[s] += row.weights[h] * relu(dot(row.index_q.subspan(h * channels, channels),
                                             row.keys.subspan(s * channels, channels)));
    }
  }
  return scores;
}

double score_slack(const ScoreRow& row) {
  const std::size_t channels = channels_of(row);
  const AbsoluteRow absolute(row);
  double terms = 0, absolute_terms = 0;
  for (std::size_t s = 0; s < keys_of(row); ++s) {
    double sum = 0, absolute_sum = 0;
    for (std::size_t h = 0; h < row.weights.size(); ++h) {
      double value = 0, size = 0;
      for (std::size_t c = 0; c < channels; ++c) {
        value += finite_or_zero(row.index_q[h * channels + c]) *
                 finite_or_zero(row.keys[s * channels + c]);
        size += absolute.index_q[h * channels + c] * absolute.keys[s * channels + c];
      }
      sum += absolute.weights[h] * std::max(value, 0.0);
      absolute_sum += absolute.weights[h] * size;
    }
    terms = std::max(terms, sum);
    absolute_terms = std::max(absolute_terms, absolute_sum);
  }
  return std::max(kScoreError * terms, kScoreFloor * absolute_terms);
}

bool scores_are_exact(const ScoreRow& row) {
  constexpr int kFp32Bits = 24;
  const std::size_t channels = channels_of(row);
  const AbsoluteRow absolute(row);
  const int dot_unit = unit_exponent(absolute.index_q) + unit_exponent(absolute.keys);
  const double dot_limit = std::ldexp(1.0, kFp32Bits + dot_unit);
  const double sum_limit = std::ldexp(dot_limit, unit_exponent(absolute.weights));
  for (std::size_t s = 0; s < keys_of(row); ++s) {
    double sum = 0;
    for (std::size_t h = 0; h < row.weights.size(); ++h) {
      const double size = dot(std::span(absolute.index_q).subspan(h * channels, channels),
                              std::span(absolute.keys).subspan(s * channels, channels));
      if (!(size < dot_limit)) return false;
      sum += absolute.weights[h] * size;
    }
    if (!(sum < sum_limit)) return false;
  }
  return true;
}

std::string judge_choice(const ScoreRow& row, std::span<const std::int32_t> mine,
                         std::span<const std::int32_t> best) {
  std::vector<std::int32_t> wrong;
  std::set_symmetric_difference(mine.begin(), mine.end(), best.begin(), best.end(),
                                std::back_inserter(wrong));
  if (wrong.empty()) return "";
  const std::vector<double> scores = exact_scores(row);
  const double last = lowest_score(scores, best);
  const auto score_of = [&](std::int32_t s) { return scores[static_cast<std::size_t>(s)]; };
  if (!std::isfinite(last) || scores_are_exact(row)) {
    return fmt::format(
        "key {} with score {:.9g} decided wrongly although the order is exact, K-th "
        "score {:.9g}",
        wrong.front(), score_of(wrong.front()), last);
  }
  const double allowed = 2 * score_slack(row);  // the key's score and the K-th may both err
  for (const std::int32_t s : wrong) {
    if (std::abs(score_of(s) - last) <= allowed) continue;
    return fmt::format("key {} with score {:.9g} is further than {:.3g} from the K-th score {:.9g}",
                       s, score_of(s), allowed, last);
  }
  if (breaks_zero_ties(row, mine)) {
    return "among keys with score exactly 0 a larger key was preferred";
  }
  return "";
}

}  // namespace flashdsa::tools
