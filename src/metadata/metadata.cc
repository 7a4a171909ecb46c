#include "flashdsa/metadata.h"

#include <fmt/format.h>

#include "core/check_data.h"
#include "core/validate.h"
#include "metadata/backends.h"

namespace flashdsa {

PackedMetadata prepare_packed_metadata(const PackedMetadataArgs& args, const Runtime& runtime) {
  using core::Dim;
  core::Validator validator("prepare_packed_metadata");
  const Dim boundaries{"N+1", 2, core::kMaxRows};
  const Dim rows{"T_q", 1, core::kMaxRows};
  const std::int64_t total = args.total_key_tokens;
  if (total < 1 || total > core::kMaxRows) {
    validator.refuse(
        fmt::format("total_key_tokens must be in 1..{}, got {}", core::kMaxRows, total));
  }
  validator.check({
      {"cu_seqlens", &args.cu_seqlens, {DType::kInt32}, {boundaries}},
      {"cu_seqlens_padded",
       core::optional_view(args.cu_seqlens_padded),
       {DType::kInt32},
       {boundaries}},
      {"query_indices",
       core::optional_view(args.query_indices),
       {DType::kInt32, DType::kInt64},
       {rows}},
      {"padding_mask",
       core::optional_view(args.padding_mask),
       {DType::kBool},
       {args.query_indices ? rows : Dim{total}}},
  });
  PackedMetadata result;
  metadata::dispatch_build({args, result}, runtime);
  return result;
}

}  // namespace flashdsa
