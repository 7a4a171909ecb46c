#pragma once

#include <cstddef>

#include "flashdsa/runtime.h"

namespace flashdsa::core {

/// Scratch memory of one call: from the caller's allocator, given back at the end of the scope,
/// counted in Runtime::usage. Throws Error(kMemory).
class Scratch {
 public:
  Scratch(const Runtime& runtime, std::size_t bytes, Device device = {});
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const { return data_; }

 private:
  const Runtime& runtime_;
  std::size_t bytes_;
  Device device_;
  void* data_;
};

/// Hands out aligned pieces of one allocation. A first pass over a null base only counts, so that
/// the layout is written once:
///
///   const auto layout = [&](Carver& c) { rows = c.take<float>(n); ... };
///   Carver count; layout(count); Scratch scratch(runtime, count.bytes());
///   Carver carve(scratch.data()); layout(carve);
class Carver {
 public:
  static constexpr std::size_t kAlignment = 64;  // a cache line, and the widest vector

  Carver() = default;
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <typename T>
  T* take(std::size_t count) {
    std::byte* piece = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Scratch of a parallel loop: for each of `workers` threads two aligned pieces.
class WorkerScratch {
 public:
  WorkerScratch(const Runtime& runtime, int workers, std::size_t first_bytes,
                std::size_t second_bytes)
      : first_bytes_(round_up(first_bytes)),
        stride_(first_bytes_ + round_up(second_bytes)),
        scratch_(runtime, stride_ * static_cast<std::size_t>(workers)) {}

  void* first(int worker) const {
    return static_cast<std::byte*>(scratch_.data()) + stride_ * static_cast<std::size_t>(worker);
  }
  void* second(int worker) const { return static_cast<std::byte*>(first(worker)) + first_bytes_; }

 private:
  static std::size_t round_up(std::size_t bytes) {
    return (bytes + Carver::kAlignment - 1) / Carver::kAlignment * Carver::kAlignment;
  }

  std::size_t first_bytes_;
  std::size_t stride_;
  Scratch scratch_;
};

}  // namespace flashdsa::core
