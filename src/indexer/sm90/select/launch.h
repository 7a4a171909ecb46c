#pragma once

#include <cuda_runtime_api.h>

#include "indexer/sm90/select/config.h"

namespace flashdsa::indexer::sm90::select_pass {

/// Queues the selection of a chunk's segments, none longer than `segment_columns`.
void launch_select(const KernelParams& params, std::int64_t segment_columns, int multiprocessors,
                   cudaStream_t stream);

/// Queues the merge of a chunk's rows that have several partial selections.
void launch_merge(const KernelParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace flashdsa::indexer::sm90::select_pass
