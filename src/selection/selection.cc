#include "flashdsa/selection.h"

#include <fmt/format.h>

#include <new>

#include "core/check_data.h"
#include "core/out_of_memory.h"
#include "core/validate.h"
#include "selection/backends.h"

namespace flashdsa {
namespace {

constexpr auto kName = "compact_and_sort";

}  // namespace

void compact_and_sort(const CompactAndSortArgs& args, const Runtime& runtime) try {
  using core::Dim;
  using core::Layout;
  using core::Role;
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
  if (core::is_checking(kName, params.device, runtime)) {
    const core::HostRows indices(args.indices, runtime);
    for (std::int64_t t = 0; t < params.rows; ++t) {
      core::check_indices(indices.row(t), params.topk, params.key_count, kName, "indices", t);
    }
  }
  selection::dispatch_compact_and_sort(params, runtime);
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kName);
}

}  // namespace flashdsa
