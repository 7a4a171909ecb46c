#include "core/check_data.h"

#include "core/device.h"

namespace flashdsa::core {

bool is_checking(std::string_view operation, Device device, const Runtime& runtime) {
  if (!runtime.check) return false;
  if (device.kind == DeviceKind::kCpu) return true;
  if (!sm90_refusal(device.index).empty()) return false;
  if (cuda_is_capturing(device, runtime.stream)) {
    throw Error(ErrorCode::kValue,
                fmt::format("{}: check must be off while the stream is captured, because it waits "
                            "for the device, got on",
                            operation));
  }
  return true;
}

HostRows::HostRows(const TensorView& view, const Runtime& runtime)
    : data_(view.as<std::int32_t>()), row_stride_(view.rank > 1 ? view.strides[0] : 0) {
  if (view.device.kind == DeviceKind::kCpu || view.elements() == 0) return;
  const std::int64_t rows = view.rank > 1 ? view.shape[0] : 1;
  const std::int64_t width = view.elements() / rows;
  copy_ = Tensor::host(DType::kInt32, {rows, width});
  const std::span<std::int32_t> to = copy_.span<std::int32_t>();
  const bool dense = rows == 1 || row_stride_ == width;
  const std::int64_t pieces = dense ? 1 : rows;
  const std::size_t piece = to.size() / static_cast<std::size_t>(pieces);
  for (std::int64_t i = 0; i < pieces; ++i) {
    cuda_copy(to.data() + static_cast<std::size_t>(i) * piece, data_ + i * row_stride_,
              piece * sizeof(std::int32_t), view.device, runtime.stream);
  }
  cuda_synchronize(view.device, runtime.stream);
  data_ = to.data();
  row_stride_ = width;
}

void check_indices(const std::int32_t* row, std::int64_t slots, std::int64_t key_count,
                   std::string_view operation, std::string_view tensor, std::int64_t t) {
  for (std::int64_t j = 0; j < slots; ++j) {
    check_data(
        row[j] >= -1 && row[j] < key_count, operation, tensor, t,
        [&] { return fmt::format("-1..{} in slot {}", key_count - 1, j); }, row[j]);
  }
}

void check_selection(std::string_view operation, const TensorView& topk_indices,
                     const TensorView* topk_length, std::int64_t key_count,
                     const Runtime& runtime) {
  if (!is_checking(operation, topk_indices.device, runtime)) return;
  const std::int64_t topk = topk_indices.shape[2];
  const HostRows indices(topk_indices, runtime);
  std::optional<HostRows> lengths;
  if (topk_length != nullptr) lengths.emplace(*topk_length, runtime);
  for (std::int64_t t = 0; t < topk_indices.shape[0]; ++t) {
    const std::int64_t length = lengths ? lengths->row(0)[t] : topk;
    check_data(
        length >= 0 && length <= topk, operation, "topk_length", t,
        [&] { return fmt::format("0..{}", topk); }, length);
    check_indices(indices.row(t), length, key_count, operation, "topk_indices", t);
  }
}

}  // namespace flashdsa::core
