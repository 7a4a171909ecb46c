#include "tests/support/mapped_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "tests/support/memory_blocks.h"

namespace flashdsa::test {

MappedMemory::MappedMemory(std::size_t bytes) : data_(nullptr), bytes_(bytes) {
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return;
  data_ = static_cast<std::byte*>(mapping);
  know_block({data_, bytes_, MemoryKind::kPages});
}

MappedMemory::~MappedMemory() {
  if (data_ == nullptr) return;
  forget_block(data_);
  munmap(data_, bytes_);
}

void MappedMemory::forbid_access() {
  if (mprotect(data_, bytes_, PROT_NONE) != 0) throw std::runtime_error("mprotect failed");
  know_block({data_, bytes_, MemoryKind::kForbidden});
}

PageGuardedTensor::PageGuardedTensor(const HostTensor& tensor) : view_(tensor.view()) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t inner = (view_.bytes() + page - 1) / page * page;
  mapping_bytes_ = inner + 2 * page;
  mapping_ =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::runtime_error("mmap failed");
  auto* base = static_cast<std::byte*>(mapping_);
  std::byte* data = base + page + inner - view_.bytes();
  std::memcpy(data, view_.data, view_.bytes());
  view_.data = data;
  if (mprotect(base, page, PROT_NONE) != 0 || mprotect(base + page + inner, page, PROT_NONE) != 0) {
    throw std::runtime_error("mprotect failed");
  }
  know_block({data, view_.bytes(), MemoryKind::kPages});
}

PageGuardedTensor::~PageGuardedTensor() {
  forget_block(view_.as<std::byte>());
  munmap(mapping_, mapping_bytes_);
}

}  // namespace flashdsa::test
