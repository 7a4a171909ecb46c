#pragma once

#include <memory>

#include "flashdsa/runtime.h"

namespace flashdsa::test {

/// The like of host tensors on the first CUDA device: every tensor is copied there with all the
/// memory that it lies in, guard bands and gaps between its elements included, and copied back when
/// the object dies, so that a test looks at its host tensors as if the device had worked on them.
/// Tensors that share host memory share device memory. Work goes through `stream`.
class Mirror {
 public:
  explicit Mirror(Stream stream);
  /// Copies back. What went wrong on the device is a test failure, as is scratch memory that was
  /// written outside of its bounds or not given back.
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  /// The device's view of a host tensor, after a first copy to the device.
  TensorView place(const TensorView& host);

  void upload();    ///< copies all tensors to the device once more
  void download();  ///< copies them back; complete when the call returns

  /// Memory that is not zero, between guard bands.
  Allocator& allocator();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace flashdsa::test
