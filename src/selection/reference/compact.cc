// Canonical index rows (SPEC section 4), written as the definition. Memory is taken before the
// first row, so that a call that runs out of it has written nothing.

#include <algorithm>
#include <vector>

#include "selection/backends.h"

namespace flashdsa::selection::reference {

std::string refusal(const CompactParams& params) {
  return params.device.kind == DeviceKind::kCpu ? "" : "the tensors are not on the host";
}

void compact_and_sort(const CompactParams& params, const Runtime&) {
  std::vector<std::int32_t> valid;
  valid.reserve(static_cast<std::size_t>(params.topk));
  for (std::int64_t t = 0; t < params.rows; ++t) {
    valid.clear();
    for (std::int64_t j = 0; j < params.topk; ++j) {
      const std::int32_t key = params.indices[t * params.indices_row_stride + j];
      if (key >= 0 && key < params.key_count) valid.push_back(key);
    }
    std::sort(valid.begin(), valid.end());
    std::int32_t* row = params.sorted_indices + t * params.topk;
    std::fill(std::copy(valid.begin(), valid.end(), row), row + params.topk, -1);
    params.lengths[t] = static_cast<std::int32_t>(valid.size());
  }
}

}  // namespace flashdsa::selection::reference
