#pragma once

#include "flashdsa/attention.h"
#include "flashdsa/indexer.h"
#include "flashdsa/metadata.h"
#include "flashdsa/selection.h"
#include "tests/support/mirror.h"

namespace flashdsa::test {

// The library's functions on tensors of host memory, for every engine: on a device engine the
// tensors are mirrored for the call, and scratch that the test does not bring itself lies between
// guard bands.

void run_placed(const AttentionForwardArgs& args, const Runtime& runtime);
void run_placed(const AttentionBackwardArgs& args, const Runtime& runtime);
void run_placed(const IndexerTopkArgs& args, const Runtime& runtime);
void run_placed(const IndexerBackwardArgs& args, const Runtime& runtime);
void run_placed(const CompactAndSortArgs& args, const Runtime& runtime);
/// The results of these two are copied to the host.
PackedMetadata run_placed(const PackedMetadataArgs& args, const Runtime& runtime);
SelectionPlan run_placed(const SelectionPlanArgs& args, const Runtime& runtime);

/// The same arguments on the device.
AttentionForwardArgs placed(AttentionForwardArgs args, Mirror& mirror);
AttentionBackwardArgs placed(AttentionBackwardArgs args, Mirror& mirror);
IndexerTopkArgs placed(IndexerTopkArgs args, Mirror& mirror);
IndexerBackwardArgs placed(IndexerBackwardArgs args, Mirror& mirror);
CompactAndSortArgs placed(CompactAndSortArgs args, Mirror& mirror);
PackedMetadataArgs placed(PackedMetadataArgs args, Mirror& mirror);
SelectionPlanArgs placed(SelectionPlanArgs args, Mirror& mirror);

/// Copies of a build's results in host memory.
PackedMetadata on_host(const PackedMetadata& metadata, const Runtime& runtime);
SelectionPlan on_host(const SelectionPlan& plan, const Runtime& runtime);

}  // namespace flashdsa::test
