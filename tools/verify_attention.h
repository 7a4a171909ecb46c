#pragma once

#include "tools/pipeline.h"
#include "tools/verify.h"

namespace flashdsa::tools {

/// Memory that a verification may hold beside inputs and results.
struct VerifyBudget {
  std::int64_t block_bytes = std::int64_t{96} << 20;  ///< FP64 copies of query rows and their keys;
                                                      ///< one row for each thread in any case
  std::int64_t key_bytes = std::int64_t{192} << 20;   ///< FP64 grad_kv of a range of keys; the rows
                                                      ///< are solved once for every range
};

/// Judges attention results by SPEC section 8 against the reference backend's FP64 results of the
/// same inputs, block by block. `tight`: the host backends' bound of lse. `runtime` gives threads
/// and progress.
void verify_attention(ErrorTable& table, const AttentionTensors& tensors,
                      const AttentionResults& results, bool tight, const Runtime& runtime,
                      const VerifyBudget& budget = {});

}  // namespace flashdsa::tools
