#pragma once

#include <string_view>

namespace flashdsa::core {

/// Throws Error(kMemory) "operation: out of memory"; "out of memory" where not even that sentence
/// finds memory. Every public function ends with it when it meets std::bad_alloc:
///
///   Result operation(...) try { ... } catch (const std::bad_alloc&) {
///     core::throw_out_of_memory("operation");
///   }
[[noreturn]] void throw_out_of_memory(std::string_view operation);

}  // namespace flashdsa::core
