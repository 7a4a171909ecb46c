#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace flashdsa::test {

/// What a block of host memory stands for, when a device is to be given the like of it.
enum class MemoryKind : std::uint8_t {
  kWhole,      ///< every byte counts, guard bands and gaps included
  kPages,      ///< only the tensors' elements; an access beyond the block's pages is a fault
  kForbidden,  ///< any access is a fault
};

struct MemoryBlock {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  MemoryKind kind = MemoryKind::kWhole;
};

/// Makes a block known until `forget_block`. All three may be called from several threads.
void know_block(const MemoryBlock& block);
void forget_block(const std::byte* begin);

/// The known block that `data` lies in.
std::optional<MemoryBlock> block_of(const void* data);

}  // namespace flashdsa::test
