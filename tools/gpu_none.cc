// A build without CUDA has no device to name, and nothing gets far enough to use one.

#include "flashdsa/error.h"
#include "tools/gpu.h"

namespace flashdsa::tools {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnavailable, "cuda: devices cannot be used (not part of this build)");
}

}  // namespace

std::vector<std::string> gpu_lines() { return {}; }

GpuDescription describe_gpu(int) { refuse(); }

std::shared_ptr<void> make_stream(Device) { refuse(); }

void queue_overwrite(const TensorView&, Stream) { refuse(); }

void queue_copy_heads(const TensorView&, const TensorView&, Stream) { refuse(); }

std::vector<std::vector<double>> time_queued(std::span<const std::function<void()>>, std::int64_t,
                                             const std::function<void()>&, Device, Stream) {
  refuse();
}

}  // namespace flashdsa::tools
