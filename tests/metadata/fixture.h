#pragma once

#include <utility>

#include "tests/metadata/layout.h"
#include "tests/support/engines.h"
#include "tests/support/placement.h"

namespace flashdsa::test {

/// Packed metadata on every backend that has a body of its own; the reference has none.
class MetadataTest : public EngineTest {
 protected:
  MetadataFields build(PackedLayout layout) const {
    return test::build(std::move(layout), runtime());
  }
};

inline const auto kMetadataEngines =
    ::testing::Values(Engine{Backend::kCpu}, Engine{Backend::kSm90});

}  // namespace flashdsa::test
