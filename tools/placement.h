#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <utility>

#include "flashdsa/metadata.h"
#include "flashdsa/runtime.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa::tools {

/// Calls body(tensor) for every tensor of the group that is there.
template <typename Body>
void for_each_optional(std::initializer_list<std::optional<Tensor>*> tensors, const Body& body) {
  for (std::optional<Tensor>* tensor : tensors) {
    if (*tensor) body(**tensor);
  }
}

template <typename Body>
void for_each_tensor(PackedMetadata& metadata, const Body& body) {
  for (Tensor* tensor :
       {&metadata.starts, &metadata.causal_lengths, &metadata.query_valid, &metadata.segment_cu_q,
        &metadata.segment_cu_k, &metadata.q_causal_offsets}) {
    body(*tensor);
  }
  for_each_optional({&metadata.valid_row_indices, &metadata.key_source_indices, &metadata.status},
                    body);
}

/// Where a command computes: in the host's memory, or on a CUDA device on a stream of its own. What
/// is placed there must not outlive the stream's owners: this object and its copies.
class Placement {
 public:
  /// The host.
  Placement() = default;

  /// The device of the backend that `runtime` names; where it is auto, of the best one that is
  /// present and takes the tensors: float64 ones are for the host alone.
  Placement(const Runtime& runtime, bool has_float64);

  bool on_host() const { return device_.kind == DeviceKind::kCpu; }
  Device device() const { return device_; }
  Stream stream() const { return {stream_.get()}; }

  /// The backend that computes there, by name.
  Backend backend() const { return backend_; }

  /// A copy of a tensor there, or back in the host's memory; on the host the tensor itself.
  Tensor place(const Tensor& tensor) const;
  Tensor fetch(const Tensor& tensor) const;

  /// The same of everything for which there is for_each_tensor().
  template <typename Tensors>
  Tensors place_all(Tensors tensors) const {
    for_each_tensor(tensors, [this](Tensor& tensor) { tensor = place(tensor); });
    return tensors;
  }
  template <typename Tensors>
  Tensors fetch_all(Tensors tensors) const {
    for_each_tensor(tensors, [this](Tensor& tensor) { tensor = fetch(tensor); });
    return tensors;
  }

  /// Waits for the work queued there. Throws Error(kDevice).
  void synchronize() const;

 private:
  Runtime copying() const;

  Backend backend_ = Backend::kCpu;
  Device device_;
  std::shared_ptr<void> stream_;  // null on the host
};

/// The best backend whose device is present.
Backend best_backend();

/// Uninitialised memory where `tensor` lies, for the results of a call with `runtime`.
Tensor allocate_beside(const TensorView& tensor, DType dtype,
                       std::initializer_list<std::int64_t> shape, const Runtime& runtime);

}  // namespace flashdsa::tools
