#pragma once

// What the command asks of CUDA devices beside the library. gpu_cuda.cc and gpu_heads.cu answer; in
// a build without CUDA gpu_none.cc does, which knows no device.

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "flashdsa/runtime.h"

namespace flashdsa::tools {

/// One line for every CUDA device: "cuda:0 NVIDIA H200, compute capability 9.0, 139.8 GiB".
std::vector<std::string> gpu_lines();

/// What a benchmark's row names of a device.
struct GpuDescription {
  std::string name;    // "NVIDIA H200"
  std::string clock;   // "up to 1980 MHz"
  std::string driver;  // version of the kernel module, or the CUDA version that the driver speaks
  std::string cuda;    // version of the CUDA runtime
};

/// Throws Error(kDevice).
GpuDescription describe_gpu(int index);

/// A new stream of a device, which ends with its last owner. Throws Error(kDevice).
std::shared_ptr<void> make_stream(Device device);

/// Queues writing to all of `memory`, which lies on a device. Throws Error(kDevice).
void queue_overwrite(const TensorView& memory, Stream stream);

/// Queues copying heads: `to` [T, H', C] gets what `from` [T, H, C] has of them, and 0 in the
/// others. Both are contiguous, of one dtype, on one device, and a head takes a multiple of 4
/// bytes. Throws Error(kDevice).
void queue_copy_heads(const TensorView& from, const TensorView& to, Stream stream);

/// Seconds between the begin and the end of each call on the device, [call][round]: calls take
/// turns and are queued one behind the other without waiting. `before` is queued in front of each
/// and does not count; a first round is not timed. Throws Error(kDevice).
std::vector<std::vector<double>> time_queued(std::span<const std::function<void()>> calls,
                                             std::int64_t rounds,
                                             const std::function<void()>& before, Device device,
                                             Stream stream);

}  // namespace flashdsa::tools
