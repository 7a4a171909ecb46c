#include "flashdsa/metadata.h"

#include <fmt/format.h>

#include <new>

#include "core/check_data.h"
#include "core/device.h"
#include "core/out_of_memory.h"
#include "core/validate.h"
#include "metadata/backends.h"

namespace flashdsa {
namespace {

constexpr auto kName = "prepare_packed_metadata";

// Of devices that no backend takes dispatch says so.
bool is_captured(Device device, Stream stream) {
  return device.kind == DeviceKind::kCuda && core::sm90_refusal(device.index).empty() &&
         core::cuda_is_capturing(device, stream);
}

}  // namespace

PackedMetadata prepare_packed_metadata(const PackedMetadataArgs& args, const Runtime& runtime) try {
  using core::Dim;
  core::Validator validator(kName);
  const Dim boundaries{"N+1", 2, core::kMaxRows};
  const Dim rows{"T_q", 1, core::kMaxRows};
  const std::int64_t total = args.total_key_tokens;
  if (total < 1 || total > core::kMaxRows) {
    validator.refuse(
        fmt::format("total_key_tokens must be in 1..{}, got {}", core::kMaxRows, total));
  }
  if (!args.query_indices) validator.bind("T_q", total);
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
      {"padding_mask", core::optional_view(args.padding_mask), {DType::kBool}, {rows}},
  });
  if (!args.capture_safe && is_captured(args.cu_seqlens.device, runtime.stream)) {
    validator.refuse(
        "capture_safe must be on while the stream is captured, because an exact build waits for "
        "the device, got off");
  }
  PackedMetadata result;
  metadata::dispatch_build({args, result}, runtime);
  return result;
} catch (const std::bad_alloc&) {
  core::throw_out_of_memory(kName);
}

}  // namespace flashdsa
