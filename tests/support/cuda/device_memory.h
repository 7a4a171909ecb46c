#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "flashdsa/runtime.h"

namespace flashdsa::test {

/// Throws std::runtime_error with CUDA's sentence unless `status` is cudaSuccess.
void check_cuda(cudaError_t status, const char* what);

inline cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

inline constexpr Device kFirstDevice{DeviceKind::kCuda, 0};

/// Addresses of the device of which only some have memory behind them: any other access is a fault.
class SparseMemory {
 public:
  /// `bytes` addresses that end where a page ends; the pages behind it and in front of the first
  /// one never have memory.
  explicit SparseMemory(std::size_t bytes);
  ~SparseMemory();
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  std::byte* data() const { return data_; }

  /// Gives memory to the pages of [offset, offset + bytes).
  void back(std::size_t offset, std::size_t bytes);

 private:
  void back_page(std::size_t page);

  std::size_t page_bytes_ = 0;
  std::size_t reserved_bytes_ = 0;
  unsigned long long base_ = 0;                        // of the reservation
  std::map<std::size_t, unsigned long long> handles_;  // of the pages that have memory
  std::byte* data_ = nullptr;
};

/// Memory between bands of bytes 0xFF, filled with the same, a NaN in every floating-point type:
/// who reads what it has not written or writes beyond its share is found out.
class GuardingAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, Device device, Stream stream) noexcept override;
  void deallocate(void* data, std::size_t bytes, Device device, Stream stream) noexcept override;

  /// After the work on `stream` is done: what is wrong with bands and returns is a test failure.
  /// Frees everything.
  void check_and_free(Stream stream);

 private:
  static constexpr std::size_t kBandBytes = 256;

  struct Share {
    std::byte* begin;  // of the band in front
    std::size_t bytes;
    bool is_returned;
  };

  std::mutex mutex_;
  std::vector<Share> shares_;
};

/// Hands out pieces of one allocation, each byte once: what a call got stays its own after it, as
/// graph capture wants.
class ArenaAllocator final : public Allocator {
 public:
  explicit ArenaAllocator(std::size_t bytes);
  ~ArenaAllocator() override;
  ArenaAllocator(const ArenaAllocator&) = delete;
  ArenaAllocator& operator=(const ArenaAllocator&) = delete;

  void* allocate(std::size_t bytes, Device device, Stream stream) noexcept override;
  void deallocate(void*, std::size_t, Device, Stream) noexcept override { ++returned_; }

  /// Hands everything out anew; no queued work may use it any more.
  void reset() { used_ = 0; }

  int allocations() const { return allocations_; }
  int returned() const { return returned_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_;
  std::size_t used_ = 0;
  int allocations_ = 0;
  int returned_ = 0;
};

}  // namespace flashdsa::test
