#include "attention/backends.h"

namespace flashdsa::attention::reference {
std::string refusal(const CommonParams&) { return "not built yet"; }
void forward(const ForwardParams&, const Runtime&) {}
void backward(const BackwardParams&, const Runtime&) {}
}  // namespace flashdsa::attention::reference
