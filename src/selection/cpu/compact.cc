// Canonical index rows on the CPU. Rows that the indexer made are ascending already, so a row costs
// one compacting pass that also notices whether a sort is needed.

#include <algorithm>

#include "core/parallel.h"
#include "selection/backends.h"

namespace flashdsa::selection::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 16;  // 128 KB of indices at K = 2048

void compact_row(const CompactParams& params, std::int64_t t) {
  const std::int32_t* from = params.indices + t * params.indices_row_stride;
  std::int32_t* to = params.sorted_indices + t * params.topk;  // may be `from`
  std::int64_t count = 0;
  std::int32_t last = -1;
  bool ascending = true;
  for (std::int64_t j = 0; j < params.topk; ++j) {
    const std::int32_t key = from[j];
    if (key < 0 || key >= params.key_count) continue;
    ascending = ascending && key >= last;
    last = key;
    to[count++] = key;
  }
  if (!ascending) std::sort(to, to + count);
  std::fill(to + count, to + params.topk, -1);
  params.lengths[t] = static_cast<std::int32_t>(count);
}

}  // namespace

std::string refusal(const CompactParams& params) {
  return params.device.kind == DeviceKind::kCpu ? "" : "the tensors are not on the host";
}

void compact_and_sort(const CompactParams& params, const Runtime& runtime) {
  const std::int64_t tasks = (params.rows + kRowsPerTask - 1) / kRowsPerTask;
  core::parallel_for(core::thread_count(runtime, tasks), tasks, [&](std::int64_t task, int) {
    const std::int64_t end = std::min((task + 1) * kRowsPerTask, params.rows);
    for (std::int64_t t = task * kRowsPerTask; t < end; ++t) compact_row(params, t);
  });
}

}  // namespace flashdsa::selection::cpu
