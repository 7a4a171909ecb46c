#include "flashdsa/metadata.h"

#include "flashdsa/error.h"

namespace flashdsa {
PackedMetadata prepare_packed_metadata(const PackedMetadataArgs&, const Runtime&) {
  throw Error(ErrorCode::kInternal, "not built yet");
}
}  // namespace flashdsa
