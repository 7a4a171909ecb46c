#pragma once

#include <cstddef>

#include "tests/support/host_tensor.h"

namespace flashdsa::test {

/// Anonymous memory of the operating system: zero, and without physical pages until it is written,
/// so that it may be far larger than the machine.
class MappedMemory {
 public:
  /// `data()` is null when the system grants no such mapping.
  explicit MappedMemory(std::size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  std::byte* data() const { return data_; }
  void forbid_access();  // from now on any read or write faults

 private:
  std::byte* data_;
  std::size_t bytes_;
};

/// A copy of a contiguous tensor whose last byte is the last one of a page, with pages that fault
/// behind it and in front of the first page.
class PageGuardedTensor {
 public:
  explicit PageGuardedTensor(const HostTensor& tensor);
  ~PageGuardedTensor();
  PageGuardedTensor(const PageGuardedTensor&) = delete;
  PageGuardedTensor& operator=(const PageGuardedTensor&) = delete;

  operator TensorView() const { return view_; }

 private:
  void* mapping_;
  std::size_t mapping_bytes_;
  TensorView view_;
};

}  // namespace flashdsa::test
