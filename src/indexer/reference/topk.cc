#include "flashdsa/error.h"
#include "indexer/backends.h"

namespace flashdsa::indexer::reference {
std::string refusal(const TopkParams&) { return "not built yet"; }
void topk(const TopkParams&, const Runtime&) {}
}  // namespace flashdsa::indexer::reference
