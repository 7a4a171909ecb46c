#pragma once

#include <string>
#include <vector>

#include "tools/bench_record.h"

namespace flashdsa::tools {

/// The rows as an SVG picture for light and dark pages: a bar per row with its share of the
/// measured peak, and below it, where rows differ in threads alone, lines of speed-up over threads.
std::string to_svg(const std::vector<BenchRecord>& records, const BenchContext& context);

/// Replaces the file. Throws Error(kValue).
void write_svg(const std::string& path, const std::string& picture);

}  // namespace flashdsa::tools
