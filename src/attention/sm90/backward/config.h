#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "selection/plan_format.h"

namespace flashdsa::attention::sm90::backward_pass {

// Sizes of the backward kernel. A chunk is 64 rows (heads or keys) of 64 channels: 128 bytes a row,
// in the 128-byte swizzle of core/cuda/wgmma.cuh.
//
// kOrdered: grad_kv rows of every slot are stored instead of added up. kRepair: the pass after the
// main one, which adds what grad_kv of the flagged items lacks. kGroups: items are those of
// groups.h, up to eight tokens of at most 32 heads.
template <int kHeadDimArg, bool kOrderedArg, bool kRepairArg, bool kGroupsArg = false>
struct Config {
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr bool kOrdered = kOrderedArg;
  static constexpr bool kRepair = kRepairArg;
  static constexpr bool kGroups = kGroupsArg;
  static constexpr int kValueDim = 512;
  static constexpr int kHeads = 64;  // rows of a query tile: heads, or tokens x heads
  static constexpr int kKeys = 64;   // rows of a key tile
  static constexpr int kChannels = 64;
  static constexpr int kChunks = kHeadDim / kChannels;
  static constexpr int kValueChunks = kValueDim / kChannels;
  static constexpr int kChunkBytes = 64 * kChannels * 2;

  // Warpgroups 0 and 1 accumulate grad_q of 288 or 256 channels each: four chunks, and with the
  // rope channels one half of the chunk in the middle.
  static constexpr int kGradQChannels = kHeadDim / 2;
  static constexpr bool kHasMiddle = kChunks % 2 != 0;
  static constexpr int kMiddle = 4;

  // The chunk of the rope channels, which out does not have: warpgroups 0 and 1 sum P k over one
  // half of it each.
  static constexpr bool kSumsRope = kHeadDim > kValueDim && !kRepair;
  static constexpr int kRope = kValueChunks;

  // Whether the CTAs keep pace where they are asked to. Neighbours of a plan's groups select much
  // the same keys anyway, and groups differ in length.
  static constexpr bool kPaces = !kOrdered && !kRepair && !kGroups;

  // grad_kv chunks of every tile that warpgroups 0 and 1 make each; warpgroup 2 makes the rest.
  // Three lost 3 % at 8192 keys. None is as fast there and wins 1.5 % at 32768, but spills.
  static constexpr int kOwnChunks = 2;

  // The gathered key rows arrive by cp.async and are read by wgmma, which is another proxy. The
  // fence that the memory model asks for costs 3 % of S, dP and grad_q, which the adds hide.
  static constexpr bool kFenceKeys = true;

  static constexpr int kMathWarps = 8;
  static constexpr int kThreads = 512;
  static constexpr int kMathRegisters = 208;  // warpgroups 0 and 1; fewer serialise the products
  static constexpr int kGradKvRegisters = 64;
  static constexpr int kLoadRegisters = 32;

  // A grad_q row on its way out is padded so that the rows of an stmatrix lie in different banks.
  static constexpr int kGradQRowBytes = kHeadDim * 2 + 16;
  static constexpr int kKeyAreaBytes =
      ((kChunks * kChunkBytes > kHeads * kGradQRowBytes ? kChunks * kChunkBytes
                                                        : kHeads * kGradQRowBytes) +
       1023) /
      1024 * 1024;

  // Key chunks are loaded, and scored, in the order in which the grad_q products free them.
  static __host__ __device__ constexpr int chunk_at(int position) {
    constexpr int kUpper = kHasMiddle ? 5 : 4;  // warpgroup 1's first whole chunk
    constexpr int kOrder[] = {0, 1, kUpper, kUpper + 1, 2, 3, kUpper + 2, kUpper + 3, kMiddle};
    return kOrder[position];
  }

  // Warps that read a key chunk for grad_q or sum P k.
  static __host__ __device__ constexpr int chunk_readers(int chunk) {
    const bool both = (kHasMiddle && chunk == kMiddle) || (kSumsRope && chunk == kRope);
    return both ? kMathWarps : kMathWarps / 2;
  }

  static_assert(kHeadDim == 576 || kHeadDim == 512, "the split of grad_q knows these two");
  static_assert(!(kOrdered && kGroups), "slot rows are those of one query row");
  static_assert(2 * kOwnChunks < kChunks, "warpgroup 2 makes at least the last chunk");
  static_assert(2 * kMathRegisters + kGradKvRegisters + kLoadRegisters == 512,
                "the warpgroups share the 65536 registers of an SM");
};

template <typename Config>
struct SharedStorage {
  alignas(1024) uint8_t q[Config::kChunks * Config::kChunkBytes];
  alignas(1024) uint8_t grad_out[Config::kValueChunks * Config::kChunkBytes];
  alignas(1024) uint8_t p[Config::kChunkBytes];       // [head][key]
  alignas(1024) uint8_t ds[Config::kChunkBytes];      // [head][key]
  alignas(1024) uint8_t keys[Config::kKeyAreaBytes];  // the key tile, then grad_q on its way out
  uint64_t key_full[Config::kChunks];
  uint64_t key_empty[Config::kChunks];
  uint64_t query_full;
  uint64_t query_empty;
  uint64_t key_area_free;
  uint64_t heads_full;
  uint64_t products_done;
  float lse_log2[Config::kHeads];  // of the softmax's whole denominator; +inf past the last head
  float d[Config::kHeads];         // sum of grad_out * out
  // x, y, z: over the keys so far, see add_sums; w: the shift of dS / P, -softmax_scale times what
  // d lacks.
  float4 sums[Config::kHeads];
};

static_assert(sizeof(SharedStorage<Config<576, false, false>>) <= 232448,
              "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<512, false, false>>) <= 232448,
              "over the limit of a Hopper SM");

// An item of groups: rows of several tokens that share a tile.
struct alignas(16) GroupItem {
  const int32_t* slots;  // where its keys stand: a list of the plan, or a part of the numbers
                         // 0..T_k-1
  int32_t token;         // the first
  uint16_t extent;       // keys
  uint8_t tokens;
  uint8_t is_range;  // whether the plan says which keys are whose by ranges, not by masks
};
static_assert(sizeof(GroupItem) == 16, "an item is read as two 8-byte words");

struct GroupCounts {
  int32_t items;
  int32_t rows;      // that stand alone
  int32_t bad_keys;  // not 0: a key is not finite
};

// What the kernel receives. Strides count elements.
struct KernelParams {
  const __nv_bfloat16* q;  // [T_q, H, D], rows of 16-byte pieces, as kv, out and grad_out
  int64_t q_row_stride;
  int64_t q_head_stride;
  const __nv_bfloat16* kv;  // [T_k, D]
  uint32_t kv_row_bytes;
  const __nv_bfloat16* out;  // [T_q, H, 512]
  int64_t out_row_stride;
  int64_t out_head_stride;
  const __nv_bfloat16* grad_out;  // [T_q, H, 512]
  int64_t grad_out_row_stride;
  int64_t grad_out_head_stride;
  const float* lse;  // [T_q, H]
  int64_t lse_row_stride;
  const int32_t* topk_indices;  // [T_q, K]
  int64_t topk_indices_row_stride;
  const int32_t* extents;  // [T_q], last counted slot + 1
  const float* attn_sink;  // [H] or null
  float* sink_terms;       // [T_q, H] = P_sink * D, or null

  float* d_errors;        // [T_q, H], the exact D minus that of the BF16 out
  uint8_t* needs_repair;  // [all items, 4], of 16 rows of a tile each: whether that spoils grad_kv

  __nv_bfloat16* grad_q;  // [T_q, H, D], contiguous, aligned to 16 bytes
  // Rows of D in the permuted channel order of passes.h, aligned to 16 bytes: the accumulators
  // [T_k], or, of the ordered kernel, [items, K], one for every slot.
  float* grad_kv_rows;

  // Groups only; `items` is a bound then, and all of them are one launch.
  selection::PlanView plan;
  const GroupItem* group_items;
  const GroupCounts* group_counts;
  int mask_words;     // the plan's for a row: G ceil(K / 32)
  int inverse_heads;  // 2^16 / H, rounded up: r * it >> 16 is r / H for a tile's rows

  // Of the kernel for few heads: the rows that its items are, whose number counts->rows says and
  // `items` bounds, all in one launch; or null, then first_item, + 1, ...
  const int32_t* single_rows;

  uint32_t* places;  // [1], zero, where the CTAs keep pace (core/cuda/pace.cuh); or null

  int64_t first_item;  // items of this launch: first_item, + 1, ...
  int items;
  int ctas;             // the grid, set by the launch; as a constant operand it costs no register
  int two_head_blocks;  // 0, or 1 when H > 64: item = token << two_head_blocks | head block
  int heads;
  int t_k;
  int topk;
  float softmax_scale;
};

}  // namespace flashdsa::attention::sm90::backward_pass
