#pragma once

#include "flashdsa/runtime.h"
#include "indexer/cpu/kernels.h"
#include "indexer/params.h"

namespace flashdsa::indexer::cpu {

/// The kernels of the instruction set that the runtime asks for. Throws Error(kUnavailable).
const Kernels& select_kernels(const Runtime& runtime);

/// head_weights of row t in FP32.
void read_weights(const CommonParams& params, std::int64_t t, float* weights);

}  // namespace flashdsa::indexer::cpu
