#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <optional>

#include "flashdsa/error.h"
#include "flashdsa/runtime.h"

namespace flashdsa::test {

/// While it lives, one `operator new` of this thread fails: the one behind `spared` others. When
/// `for_good`, all later ones fail too. A program that uses it has its operator new replaced.
class FailingNew {
 public:
  FailingNew(int spared, bool for_good);
  ~FailingNew();
  FailingNew(const FailingNew&) = delete;
  FailingNew& operator=(const FailingNew&) = delete;

  bool failed() const;
};

/// Host memory of which one allocation fails: the one behind `spared` others.
class FailingAllocator final : public Allocator {
 public:
  explicit FailingAllocator(int spared) : spared_(spared) {}

  void* allocate(std::size_t bytes, Device device, Stream stream) noexcept override;
  void deallocate(void* data, std::size_t bytes, Device device, Stream stream) noexcept override;

  bool failed() const { return spared_ < 0; }
  std::size_t live_bytes() const { return live_bytes_; }

 private:
  int spared_;
  std::size_t live_bytes_ = 0;
};

/// A library call and whether its outputs still hold what they held before it.
struct FallibleCall {
  std::function<void(const Runtime&)> run;
  std::function<bool()> outputs_untouched;
};

/// Runs fresh calls while the first, second, ... memory of the kind fails, until none is left to
/// fail. Each must end with Error(kMemory), its outputs untouched and all scratch given back.
/// Returns how many failed.
int fail_every_new(const Runtime& runtime, const std::function<FallibleCall()>& make);
int fail_every_allocation(const Runtime& runtime, const std::function<FallibleCall()>& make);

}  // namespace flashdsa::test
