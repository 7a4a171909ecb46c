#include "tools/bench_svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "tools/output_file.h"

namespace flashdsa::tools {
namespace {

constexpr int kWidth = 860;
constexpr int kLabelWidth = 300;  // row names, left of the bars
constexpr int kPlotWidth = kWidth - kLabelWidth - 70;
constexpr int kBarStep = 24;
constexpr int kBarHeight = 14;
constexpr int kTop = 64;
constexpr int kAxisHeight = 48;
constexpr int kLinesHeight = 260;
constexpr std::array<const char*, 6> kColours = {"#4269d0", "#e0822b", "#3ca951",
                                                 "#d6409f", "#8a63d2", "#0f9fae"};

constexpr auto kStyle = R"(<style>
text { font: 12px sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: bold; }
.axis { stroke: #8b949e; stroke-width: 1; }
.grid { stroke: #8b949e; stroke-width: 0.5; stroke-dasharray: 2 4; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
</style>
)";

/// One operation on one workload over numbers of threads.
struct Line {
  std::string name;
  std::vector<std::pair<int, double>> points;  // threads, speed-up over the first point
};

std::string escape(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '<') {
      result += "&lt;";
    } else if (c == '&') {
      result += "&amp;";
    } else {
      result += c;
    }
  }
  return result;
}

std::string text_at(double x, double y, const std::string& text, const char* anchor = "start",
                    const char* css = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n",
                     x, y, anchor, css, escape(text));
}

std::string segment(double x1, double y1, double x2, double y2, const char* css) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"{}\"/>\n", x1, y1, x2,
      y2, css);
}

std::size_t colour_of(const std::string& op) {
  constexpr std::array<const char*, 4> kOrder = {"forward", "backward", "topk", "step"};
  const auto found = std::find(kOrder.begin(), kOrder.end(), op);
  return static_cast<std::size_t>(found - kOrder.begin());
}

// What tells rows of one operation and workload apart: threads on the host, regime on a GPU.
std::string place_of(const BenchRecord& row) {
  if (row.backend == "sm90") return row.regime;
  return fmt::format("{} thread{}", row.threads, row.threads == 1 ? "" : "s");
}

std::string draw_bars(const std::vector<const BenchRecord*>& rows) {
  double top_share = 1;
  for (const BenchRecord* row : rows) top_share = std::max(top_share, row->ceiling_share());
  const double scale = kPlotWidth / top_share;
  const int bottom = kTop + kBarStep * static_cast<int>(rows.size());
  std::string svg;
  for (int percent = 0; percent <= 100; percent += 20) {
    const double x = kLabelWidth + scale * percent / 100;
    svg += segment(x, kTop - 6, x, bottom, percent == 0 ? "axis" : "grid");
    svg += text_at(x, bottom + 16, fmt::format("{}", percent), "middle");
  }
  svg += text_at(kLabelWidth + kPlotWidth / 2.0, bottom + 34, "share of the peak / %", "middle");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const BenchRecord& row = *rows[i];
    const double y = kTop + kBarStep * static_cast<double>(i);
    const double width = scale * row.ceiling_share();
    svg +=
        text_at(kLabelWidth - 8, y + 12,
                fmt::format("{} {} {}, {}", row.op, row.workload, row.shape, place_of(row)), "end");
    svg += fmt::format("<rect x=\"{}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"/>\n",
                       kLabelWidth, y, width, kBarHeight, kColours[colour_of(row.op)]);
    svg +=
        text_at(kLabelWidth + width + 6, y + 12,
                fmt::format("{:.0f} % ({})", 100 * row.ceiling_share(), format_rate(row.gflops())));
  }
  return svg;
}

// Speed-ups of the operations, then that of the products that the peak is measured with.
std::vector<Line> scaling_lines(const std::vector<BenchRecord>& records) {
  std::map<std::string, std::vector<const BenchRecord*>> groups;
  for (const BenchRecord& record : records) {
    groups[fmt::format("{} {} {} {}", record.op, record.workload, record.t_q, record.regime)]
        .push_back(&record);
  }
  std::vector<Line> lines;
  std::map<int, double> products;
  for (const auto& [name, rows] : groups) {
    if (rows.size() < 2) continue;
    Line line{fmt::format("{} {} {}", rows.front()->op, rows.front()->workload, rows.front()->t_q),
              {}};
    for (const BenchRecord* row : rows) {
      line.points.emplace_back(row->threads, rows.front()->median_ms / row->median_ms);
      products[row->threads] = *row->peak_gflops;
    }
    lines.push_back(std::move(line));
  }
  if (lines.empty()) return lines;
  Line line{"products alone", {}};
  for (const auto& [threads, gflops] : products) {
    line.points.emplace_back(threads, gflops / products.begin()->second);
  }
  lines.push_back(std::move(line));
  return lines;
}

std::string draw_lines(const std::vector<Line>& lines, double top) {
  int most_threads = 1;
  double highest = 1;
  for (const Line& line : lines) {
    for (const auto& [threads, speedup] : line.points) {
      most_threads = std::max(most_threads, threads);
      highest = std::max(highest, speedup);
    }
  }
  const double left = 60, right = kWidth - 300, bottom = top + kLinesHeight - kAxisHeight;
  const auto x_of = [&](int threads) {
    return left + (right - left) * (threads - 1) / std::max(1, most_threads - 1);
  };
  const auto y_of = [&](double speedup) { return bottom - (bottom - top) * speedup / highest; };
  std::string svg = text_at(16, top - 14, "Scaling", "start", "title");
  for (double tick = 0; tick <= highest; tick += highest > 8 ? 4 : 0.5) {
    svg += segment(left, y_of(tick), right, y_of(tick), tick == 0 ? "axis" : "grid");
    svg += text_at(left - 8, y_of(tick) + 4, fmt::format("{}", tick), "end");
  }
  svg += text_at(left + 30, top - 14, "speed-up / times");
  svg += text_at((left + right) / 2, bottom + 34, "threads", "middle");
  std::set<int> ticks;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const char* colour = kColours[i % kColours.size()];
    const bool products = i + 1 == lines.size();
    std::string points;
    for (const auto& [threads, speedup] : lines[i].points) {
      points += fmt::format("{:.1f},{:.1f} ", x_of(threads), y_of(speedup));
      ticks.insert(threads);
    }
    svg += fmt::format(
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>\n", points,
        products ? "#8b949e" : colour, products ? " stroke-dasharray=\"6 4\"" : "");
    const double y = top + 18 * static_cast<double>(i);
    svg += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n",
                       right + 20, y, products ? "#8b949e" : colour);
    svg += text_at(right + 38, y + 11,
                   fmt::format("{}: {:.2f}", lines[i].name, lines[i].points.back().second));
  }
  for (const int threads : ticks) {
    svg += text_at(x_of(threads), bottom + 16, fmt::format("{}", threads), "middle");
  }
  return svg;
}

}  // namespace

std::string to_svg(const std::vector<BenchRecord>& records, const BenchContext& context) {
  std::vector<const BenchRecord*> counted;
  for (const BenchRecord& record : records) {
    if (record.has_share()) counted.push_back(&record);
  }
  const std::vector<Line> lines = scaling_lines(records);
  const int bars = kTop + kBarStep * static_cast<int>(counted.size()) + kAxisHeight;
  const int height = bars + (lines.empty() ? 0 : kLinesHeight + 40);
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" "
      "height=\"{}\">\n",
      kWidth, height, kWidth, height);
  svg += kStyle;
  svg += text_at(16, 24, "Share of the peak", "start", "title");
  svg += text_at(
      16, 42,
      fmt::format("{}; FlashDSA {}, commit {}", context.device, context.build, context.commit));
  svg += draw_bars(counted);
  if (!lines.empty()) svg += draw_lines(lines, bars + 40);
  return svg + "</svg>\n";
}

void write_svg(const std::string& path, const std::string& picture) {
  OutputFile file(path);
  file.write(picture.data(), picture.size());
  file.commit();
}

}  // namespace flashdsa::tools
