#include "tests/support/memory_blocks.h"

#include <map>
#include <mutex>

namespace flashdsa::test {
namespace {

struct Blocks {
  std::mutex mutex;
  std::map<const std::byte*, MemoryBlock> by_begin;
};

Blocks& blocks() {
  static Blocks all;
  return all;
}

}  // namespace

void know_block(const MemoryBlock& block) {
  const std::lock_guard lock(blocks().mutex);
  blocks().by_begin[block.begin] = block;
}

void forget_block(const std::byte* begin) {
  const std::lock_guard lock(blocks().mutex);
  blocks().by_begin.erase(begin);
}

std::optional<MemoryBlock> block_of(const void* data) {
  const auto* place = static_cast<const std::byte*>(data);
  const std::lock_guard lock(blocks().mutex);
  auto next = blocks().by_begin.upper_bound(place);
  if (next == blocks().by_begin.begin()) return std::nullopt;
  const MemoryBlock& block = (--next)->second;
  if (place >= block.begin + block.bytes) return std::nullopt;
  return block;
}

}  // namespace flashdsa::test
