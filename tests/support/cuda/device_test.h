#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tests/support/cuda/device_memory.h"
#include "tests/support/engines.h"
#include "tests/support/expect_error.h"

namespace flashdsa::test {

/// A stream that does not wait for the legacy default stream.
class OwnStream {
 public:
  OwnStream();
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  operator Stream() const { return stream_; }
  void wait() const;  ///< for the work queued so far; throws what went wrong in it

 private:
  Stream stream_;
};

/// The work that a callable queues on a stream, as a CUDA graph. It is captured in the mode that
/// forbids whatever waits for the device. What the callable throws passes through.
class CapturedGraph {
 public:
  CapturedGraph(Stream stream, const std::function<void()>& queue_work);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void replay() const;

 private:
  Stream stream_;
  cudaGraphExec_t graph_ = nullptr;
};

/// Holds up what is queued on a stream after it, until it is released or dies.
class HeldStream {
 public:
  explicit HeldStream(Stream stream);
  ~HeldStream();
  HeldStream(const HeldStream&) = delete;
  HeldStream& operator=(const HeldStream&) = delete;

  void release();

 private:
  Stream stream_;
  std::atomic<bool> is_released_{false};
};

/// The call returns while the work in front of it is held up, and neither waits for the device nor
/// takes device memory that the allocator of its runtime did not give. `runtime`'s stream must be
/// idle.
void expect_asynchronous(const Runtime& runtime, const std::function<void(const Runtime&)>& call);

/// A call whose allocator has no memory left is an error that says so.
void expect_memory_error(const Runtime& runtime, const std::function<void(const Runtime&)>& call);

/// With check on, `call` of the operation is refused while `runtime`'s stream is captured, and the
/// capture goes on.
void expect_check_refused_in_capture(const std::string& operation, const Runtime& runtime,
                                     const std::function<void(const Runtime&)>& call);

/// Takes, spoils and gives back stream-ordered memory of many sizes.
void churn_device_memory(Stream stream);

/// A test of the first CUDA device; a skip with its reason where the sm90 backend has none.
class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = engine_refusal({Backend::kSm90}); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
    stream_.emplace();
  }

  const OwnStream& stream() const { return *stream_; }

  Runtime runtime(Mode mode = Mode::kDefault) const {
    Runtime result;
    result.backend = Backend::kSm90;
    result.mode = mode;
    result.stream = *stream_;
    return result;
  }

 private:
  std::optional<OwnStream> stream_;
};

}  // namespace flashdsa::test
