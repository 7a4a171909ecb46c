#pragma once

#include "flashdsa/metadata.h"

namespace flashdsa::metadata {

/// What every backend receives: arguments whose types, shapes, strides and devices have been
/// checked (their contents not), and where the result goes.
struct BuildParams {
  const PackedMetadataArgs& args;
  PackedMetadata& result;
};

}  // namespace flashdsa::metadata
