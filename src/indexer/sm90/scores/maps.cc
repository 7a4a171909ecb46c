// Tensor maps of the score kernel's operands.

#include <cuda.h>
#include <cudaTypedefs.h>
#include <fmt/format.h>

#include "core/cuda/check.h"
#include "flashdsa/error.h"
#include "indexer/params.h"
#include "indexer/sm90/scores/launch.h"

namespace flashdsa::indexer::sm90::score_pass {
namespace {

constexpr std::int64_t kElementBytes = sizeof(__nv_bfloat16);
constexpr std::int64_t kVectorBytes = 16;
constexpr std::int64_t kMostStrideBytes = std::int64_t{1} << 40;

bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % kVectorBytes == 0;
}

// Strides of a map have to be multiples of 16 bytes below 2^40; rows that overlap are left out.
bool is_stride(std::int64_t elements) {
  const std::int64_t bytes = elements * kElementBytes;
  return elements >= kIndexDim && bytes % kVectorBytes == 0 && bytes < kMostStrideBytes;
}

PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kVersion = 12000;
  core::cuda::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kVersion,
                                                     cudaEnableDefault, &found),
                    "asking the driver for cuTensorMapEncodeTiled");
  if (function == nullptr) {
    throw Error(ErrorCode::kDevice, "cuda: the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

template <int kRank>
struct Box {
  cuuint64_t sizes[kRank];
  cuuint64_t stride_elements[kRank - 1];
  cuuint32_t box[kRank];
};

template <int kRank>
CUtensorMap encode(const __nv_bfloat16* data, const Box<kRank>& shape) {
  cuuint64_t stride_bytes[kRank - 1];
  cuuint32_t ones[kRank];
  for (int i = 0; i < kRank; ++i) ones[i] = 1;
  for (int i = 0; i + 1 < kRank; ++i) stride_bytes[i] = shape.stride_elements[i] * kElementBytes;
  CUtensorMap map;
  const CUresult status = encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<__nv_bfloat16*>(data), shape.sizes,
      stride_bytes, shape.box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice, fmt::format("cuda: cuTensorMapEncodeTiled failed with code {}",
                                                static_cast<int>(status)));
  }
  return map;
}

}  // namespace

// Heads are mapped in pairs, so an odd number of them is not mappable.
bool is_mappable(const Queries& q) {
  return is_aligned(q.data) && q.heads % 2 == 0 && is_stride(q.head_stride) &&
         is_stride(2 * q.head_stride) && (q.rows <= 1 || is_stride(q.row_stride));
}

bool is_mappable(const Keys& k) {
  return is_aligned(k.data) && (k.rows <= 1 || is_stride(k.row_stride));
}

CUtensorMap query_map(const Queries& q) {
  using Sizes = Config<32>;  // boxes are the same for all
  const auto head = static_cast<cuuint64_t>(q.head_stride);
  const auto row =
      q.rows > 1 ? static_cast<cuuint64_t>(q.row_stride) : static_cast<cuuint64_t>(kIndexDim);
  return encode<4>(
      q.data,
      {{kIndexDim, 2, static_cast<cuuint64_t>(q.rows), static_cast<cuuint64_t>(q.heads / 2)},
       {head, row, 2 * head},
       {Sizes::kHalfChannels, 2, Sizes::kBatchTokens, Sizes::kBatchHeads / 2}});
}

CUtensorMap key_map(const Keys& k) {
  using Sizes = Config<32>;
  const auto row =
      k.rows > 1 ? static_cast<cuuint64_t>(k.row_stride) : static_cast<cuuint64_t>(kIndexDim);
  return encode<2>(
      k.data,
      {{kIndexDim, static_cast<cuuint64_t>(k.rows)}, {row}, {Sizes::kHalfChannels, kTileKeys}});
}

}  // namespace flashdsa::indexer::sm90::score_pass
