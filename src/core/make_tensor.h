#pragma once

#include <cstdint>
#include <span>

#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// An uninitialised tensor on `device`: host memory, or memory of the runtime's allocator that is
/// usable by work queued on the runtime's stream. Throws Error(kMemory).
Tensor make_tensor(DType dtype, std::span<const std::int64_t> shape, Device device,
                   const Runtime& runtime);

}  // namespace flashdsa::core
