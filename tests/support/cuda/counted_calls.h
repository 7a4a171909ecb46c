#pragma once

namespace flashdsa::test {

/// How often a function of CUDA was called so far, by this thread, that the library must not call
/// behind the caller's back. The linker puts counting functions in their place
/// (tests/CMakeLists.txt).
struct CountedCalls {
  int waits = 0;        ///< that wait for the device
  int allocations = 0;  ///< of device memory

  friend bool operator==(const CountedCalls&, const CountedCalls&) = default;
  friend CountedCalls operator-(const CountedCalls& a, const CountedCalls& b) {
    return {a.waits - b.waits, a.allocations - b.allocations};
  }
};

CountedCalls counted_calls();

}  // namespace flashdsa::test
