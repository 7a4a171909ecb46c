#pragma once

#include "attention/cpu/kernels.h"
#include "attention/params.h"
#include "flashdsa/runtime.h"

namespace flashdsa::attention::cpu {

/// The kernels of the instruction set that the runtime asks for. Throws Error(kUnavailable).
const Kernels& select_kernels(const Runtime& runtime);

Sizes sizes_of(const CommonParams& params);

/// Writes the keys of row t's counted slots, in slot order, to `keys` [K]; returns their number.
std::int32_t counted_keys(const CommonParams& params, std::int64_t t, std::int32_t* keys);

}  // namespace flashdsa::attention::cpu
