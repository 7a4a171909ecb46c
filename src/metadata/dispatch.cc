#include "core/dispatch.h"

#include <array>

#include "metadata/backends.h"

namespace flashdsa::metadata {
namespace {

#ifdef FLASHDSA_WITH_SM90
// Bad contents are told in the host's words, from a host copy.
void build_on_device(const BuildParams& params, const Runtime& runtime) {
  if (sm90::build(params, runtime)) return;
  const auto to_host = [&](const TensorView& view) { return copy_to(view, Device{}, runtime); };
  PackedMetadataArgs host = params.args;
  const Tensor cu_seqlens = to_host(params.args.cu_seqlens);
  host.cu_seqlens = cu_seqlens;
  std::optional<Tensor> query_indices, padded, mask;
  if (host.query_indices) host.query_indices = query_indices.emplace(to_host(*host.query_indices));
  if (host.cu_seqlens_padded)
    host.cu_seqlens_padded = padded.emplace(to_host(*host.cu_seqlens_padded));
  if (host.padding_mask) host.padding_mask = mask.emplace(to_host(*host.padding_mask));
  cpu::build({host, params.result}, runtime);
  throw Error(
      ErrorCode::kInternal,
      fmt::format("{}:{}: the device refused metadata that the host accepts", __FILE__, __LINE__));
}
#endif

// The host has one implementation; the conformance suite's oracle judges it.
constexpr std::array kBuild = {
#ifdef FLASHDSA_WITH_SM90
    core::Implementation<BuildParams>{Backend::kSm90, sm90::refusal, build_on_device},
#else
    core::Implementation<BuildParams>{Backend::kSm90},
#endif
    core::Implementation<BuildParams>{Backend::kCpu, cpu::refusal, cpu::build},
    core::Implementation<BuildParams>{Backend::kReference, cpu::refusal, cpu::build},
};

}  // namespace

void dispatch_build(const BuildParams& params, const Runtime& runtime) {
  core::dispatch<BuildParams>("prepare_packed_metadata", kBuild, params, runtime);
}

std::vector<Backend> build_backends() { return core::backends_of<BuildParams>(kBuild); }

}  // namespace flashdsa::metadata
