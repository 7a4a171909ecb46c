#pragma once

#include <cstdint>

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

}  // namespace flashdsa
