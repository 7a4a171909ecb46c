#pragma once

#include <cstdint>
#include <span>

#include "flashdsa/tensor_view.h"
#include "tools/synth_batch.h"
#include "tools/synth_random.h"

namespace flashdsa::tools {

/// Where the rows of a tensor lie, and what its padding rows hold.
struct RowFill {
  std::span<const std::int32_t> positions;  // storage position of each row
  std::span<const RowPlace> places;
  float padding = 0;
  int threads = 0;
};

/// Fills a BF16 tensor [rows, ...]: element c of the row at storage position g is
/// scale * normal(g * width + c), whatever other rows the tensor holds.
void fill_normal_rows(const Tensor& tensor, const RowFill& fill, const RandomStream& stream,
                      float scale);

/// Fills the padding rows of a BF16 or FP32 tensor.
void fill_padding_rows(const Tensor& tensor, const RowFill& fill);

/// Starts a batch: the layout's tensors and the scalars.
Batch begin_batch(const ModelShape& shape, PackedLayout layout, const BatchOptions& options);

/// Adds grad_out and attn_sink where asked for.
void add_gradient_and_sink(Batch& batch, const RowFill& queries, const BatchOptions& options);

}  // namespace flashdsa::tools
