#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "flashdsa/runtime.h"
#include "flashdsa/tensor_view.h"

namespace flashdsa {

/// Arguments of `compact_and_sort`. SPEC section 4.
struct CompactAndSortArgs {
  TensorView indices;          ///< int32 [T, K], K in 1..2048; last axis contiguous
  std::int64_t key_count = 0;  ///< T_k, 0..2^31-2; a slot is valid when 0 <= index < key_count
  TensorView sorted_indices;   ///< out, int32 [T, K], contiguous; may be `indices` itself
  TensorView lengths;          ///< out, int32 [T], contiguous: valid slots of each row
};

/// Brings index rows into canonical form: the valid indices ascending (duplicates kept), then -1.
/// Throws Error(kType) or Error(kValue) for bad arguments, Error(kData) in checking mode for an
/// index outside -1..key_count-1.
FLASHDSA_API void compact_and_sort(const CompactAndSortArgs& args, const Runtime& runtime = {});

/// Arguments of `build_selection_plan`: the selection, and the heads that will attend with it.
struct SelectionPlanArgs {
  TensorView topk_indices;                ///< int32 [T_q, 1, K], K in 1..2048; last axis contiguous
  std::optional<TensorView> topk_length;  ///< int32 [T_q]: only the first slots of a row exist
  std::int64_t total_key_tokens = 0;      ///< T_k, 0..2^31-2; slots outside 0..T_k-1 do not count
  std::int64_t heads = 0;                 ///< H of the attention calls, 1..128
};

/// Which neighbouring query rows attention computes together, over which keys: made once for a
/// selection, then passed to forward and backward of every layer that shares the indices. It
/// changes how fast they are, not what they compute.
///
/// A plan belongs to the contents of topk_indices and topk_length at the time of the build. A call
/// refuses a plan of other sizes or on another device. Whether the contents are still the same it
/// cannot see: with other contents the results are unspecified, though nothing outside of the
/// tensors is read.
///
/// The numbers say how `storage` is laid out, so that a caller may hold the memory itself and fill
/// a SelectionPlan over it for a call.
struct SelectionPlan {
  Tensor storage;  ///< uint8 [bytes], opaque, at a multiple of 16 bytes, on the indices' device
  std::int64_t query_rows = 0;        ///< T_q
  std::int64_t topk = 0;              ///< K
  std::int64_t total_key_tokens = 0;  ///< T_k
  std::int64_t group = 0;  ///< G, the most rows computed together: 8 up to 8 heads, 4 up to 16, 2
                           ///< up to 32, 1 above. A plan serves every head count of its G.

  /// 40 T_q + 4, and where G > 1 also T_q (4 K + 4 G ceil(K / 32)): each array rounded up to 64.
  std::size_t bytes() const noexcept { return storage.view().bytes(); }
};

/// Builds the plan of a selection, a new tensor on the device of `topk_indices`. Nothing waits for
/// the device, so the call can be captured. The same indices give the same plan.
///
/// Throws Error(kType) or Error(kValue) for bad arguments, Error(kData) in checking mode for an
/// index outside -1..T_k-1 or a length outside 0..K, Error(kMemory), Error(kUnavailable) when no
/// backend takes the tensors.
FLASHDSA_API SelectionPlan build_selection_plan(const SelectionPlanArgs& args,
                                                const Runtime& runtime = {});

}  // namespace flashdsa
