#pragma once

// What a selection plan holds, shared by its builders and by the attention kernels that walk it.
// docs/selection_plan.md draws it.

#include <cstddef>
#include <cstdint>

namespace flashdsa::selection {

/// How the keys of an item are found.
enum class ItemKind : std::int32_t {
  kSlots = 0,  ///< one row, over the slots of topk_indices
  kUnion = 1,  ///< an ascending list of the keys that any row selected, and one bit per row and key
  kRange = 2,  ///< consecutive keys; every row has a consecutive part of them, or none
};

/// A run of query rows that a kernel computes together.
struct alignas(16) PlanItem {
  std::int32_t first_row;  ///< the item's rows are first_row .. first_row + rows - 1
  std::int32_t rows;       ///< 1..G
  ItemKind kind;
  std::int32_t keys;         ///< kSlots: slots to look at (rows is 1); kUnion: keys of the list;
                             ///< kRange: keys of the range
  std::int32_t first_key;    ///< kRange: the keys are first_key .. first_key + keys - 1; else 0
  std::int32_t reserved[3];  ///< 0
};
static_assert(sizeof(PlanItem) == 32, "an item is read as two 16-byte words");

/// Pointers into a plan, on the plan's device. Kernels receive it by value.
struct PlanView {
  const PlanItem* items;           ///< [item_count], ascending in first_row; each row of 0..T_q-1
                                   ///< is in exactly one item
  const std::int32_t* item_count;  ///< [1]
  const std::int32_t* row_first;   ///< [T_q], first key of a row with keys in a kRange item, else
                                   ///< unspecified
  const std::int32_t* row_keys;    ///< [T_q], kSlots: slots up to the last counted one; kUnion,
                                   ///< kRange: keys of the row
  const std::int32_t* lists;   ///< kUnion: ascending distinct keys at lists + first_row * K; null
                               ///< when G is 1
  const std::uint32_t* masks;  ///< kUnion: words at masks + first_row * G * ceil(K / 32), word
                               ///< [chunk * rows + r]: bit c says whether key 32 chunk + c of the
                               ///< list belongs to row first_row + r; bits past `keys` are 0; null
                               ///< when G is 1
  std::int32_t group;          ///< G, the most rows of an item: 1, 2, 4 or 8
  std::int32_t topk;           ///< K
};

/// What a plan's layout follows from.
struct PlanSizes {
  std::int64_t t_q;
  std::int64_t topk;   ///< K
  std::int64_t group;  ///< G
};

/// G of a number of heads: the largest of 1, 2, 4, 8 whose rows fill no more than a tile of 64.
constexpr std::int64_t plan_group(std::int64_t heads) {
  if (heads <= 8) return 8;
  if (heads <= 16) return 4;
  return heads <= 32 ? 2 : 1;
}

/// Rows are computed together when the keys of their union (or range) are at most this many percent
/// of the sum of the rows' keys: the measured time of a key in a kernel of few heads over that of a
/// key in the kernel of 64 rows. A single row is never compared.
constexpr std::int64_t plan_union_percent(std::int64_t group) {
  if (group == 8) return 58;
  return group == 4 ? 64 : 81;
}

/// Bytes of a plan's storage.
std::size_t plan_bytes(const PlanSizes& sizes);

/// The plan in `storage` of plan_bytes(sizes) bytes.
PlanView plan_view(const void* storage, const PlanSizes& sizes);

}  // namespace flashdsa::selection
