#pragma once

#include "tools/pipeline.h"
#include "tools/verify.h"

namespace flashdsa::tools {

/// Judges a selection by SPEC section 8 against the reference backend on FP64 copies of the same
/// inputs, block by block. `runtime` gives threads and progress.
void verify_selection(ErrorTable& table, const IndexerTensors& tensors,
                      const PackedMetadata& metadata, const Selection& selection,
                      const Runtime& runtime);

}  // namespace flashdsa::tools
