#include "flashdsa/selection.h"

#include <fmt/format.h>

#include "core/check_data.h"
#include "core/validate.h"
#include "selection/backends.h"

namespace flashdsa {

void compact_and_sort(const CompactAndSortArgs& args, const Runtime& runtime) {
  using core::Dim;
  using core::Layout;
  using core::Role;
  constexpr auto kName = "compact_and_sort";
  const Dim rows{"T", 0, core::kMaxRows}, width{"K", 1, 2048};

  core::Validator validator(kName);
  validator.check({
      {"indices", &args.indices, {DType::kInt32}, {rows, width}, Layout::kInnerContiguous},
      {"sorted_indices",
       &args.sorted_indices,
       {DType::kInt32},
       {rows, width},
       Layout::kContiguous,
       Role::kOutput},
      {"lengths", &args.lengths, {DType::kInt32}, {rows}, Layout::kContiguous, Role::kOutput},
  });
  if (args.key_count < 0 || args.key_count > core::kMaxRows) {
    validator.refuse(
        fmt::format("key_count must be in 0..{}, got {}", core::kMaxRows, args.key_count));
  }
  validator.check_outputs_disjoint("sorted_indices", "indices");

  selection::CompactParams params;
  params.rows = args.indices.shape[0];
  params.topk = args.indices.shape[1];
  params.key_count = args.key_count;
  params.device = args.indices.device;
  params.indices = args.indices.as<std::int32_t>();
  params.indices_row_stride = args.indices.strides[0];
  params.sorted_indices = args.sorted_indices.as<std::int32_t>();
  params.lengths = args.lengths.as<std::int32_t>();
  if (runtime.check && params.device.kind == DeviceKind::kCpu) {
    for (std::int64_t t = 0; t < params.rows; ++t) {
      const std::int32_t* row = params.indices + t * params.indices_row_stride;
      for (std::int64_t j = 0; j < params.topk; ++j) {
        core::check_data(
            row[j] >= -1 && row[j] < params.key_count, kName, "indices", t,
            [&] { return fmt::format("-1..{} in slot {}", params.key_count - 1, j); }, row[j]);
      }
    }
  }
  selection::dispatch_compact_and_sort(params, runtime);
}

}  // namespace flashdsa
