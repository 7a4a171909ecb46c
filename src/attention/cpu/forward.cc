#include "attention/backends.h"

namespace flashdsa::attention::cpu {
std::string refusal(const CommonParams&) { return "not built yet"; }
void forward(const ForwardParams&, const Runtime&) {}
}  // namespace flashdsa::attention::cpu
