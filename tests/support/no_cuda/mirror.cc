// A build without CUDA has no device engine, so nobody asks for a mirror.

#include "tests/support/mirror.h"

#include <stdexcept>

namespace flashdsa::test {

struct Mirror::State {};

Mirror::Mirror(Stream) { throw std::logic_error("a mirror in a build without CUDA"); }
Mirror::~Mirror() = default;
TensorView Mirror::place(const TensorView& host) { return host; }
void Mirror::upload() {}
void Mirror::download() {}
Allocator& Mirror::allocator() { throw std::logic_error("a mirror in a build without CUDA"); }

}  // namespace flashdsa::test
