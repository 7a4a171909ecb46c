#include "core/out_of_memory.h"

#include <fmt/format.h>

#include <new>

#include "flashdsa/error.h"

namespace flashdsa::core {
namespace {

const Error kLastResort(ErrorCode::kMemory, "out of memory");  // to copy an Error takes no memory

Error out_of_memory(std::string_view operation) noexcept {
  try {
    return {ErrorCode::kMemory, fmt::format("{}: out of memory", operation)};
  } catch (const std::bad_alloc&) {
    return kLastResort;
  }
}

}  // namespace

void throw_out_of_memory(std::string_view operation) { throw out_of_memory(operation); }

}  // namespace flashdsa::core
