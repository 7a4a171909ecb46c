#include "flashdsa/error.h"
#include "selection/backends.h"

namespace flashdsa::selection::cpu {
std::string refusal(const CompactParams&) { return "not built yet"; }
void compact_and_sort(const CompactParams&, const Runtime&) {}
}  // namespace flashdsa::selection::cpu
