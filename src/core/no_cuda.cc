#include "core/device.h"
#include "flashdsa/error.h"

namespace flashdsa::core {
namespace {

constexpr auto kReason = "not part of this build";

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnavailable,
              "cuda: device memory cannot be used (not part of this build)");
}

}  // namespace

std::string sm90_refusal(int) { return kReason; }

Allocator& cuda_allocator() { refuse(); }

void cuda_copy(void*, const void*, std::size_t, Device, Stream) { refuse(); }

bool cuda_is_capturing(Device, Stream) { refuse(); }

void cuda_synchronize(Device, Stream) { refuse(); }

}  // namespace flashdsa::core
