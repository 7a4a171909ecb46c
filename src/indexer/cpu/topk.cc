#include "flashdsa/error.h"
#include "indexer/backends.h"

namespace flashdsa::indexer::cpu {
std::string refusal(const TopkParams&) { return "not built yet"; }
void topk(const TopkParams&, const Runtime&) {}
}  // namespace flashdsa::indexer::cpu
