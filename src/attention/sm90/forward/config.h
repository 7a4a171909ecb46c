#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

namespace flashdsa::attention::sm90::forward_pass {

// Sizes of the forward kernel. A block is 64 channels, 128 bytes of a row, in the 128-byte swizzle
// of core/cuda/wgmma.cuh; a slot is what the ring hands over at once; a tile is one softmax step.
template <int kHeadDimArg>
struct Config {
  static constexpr int kHeadDim = kHeadDimArg;
  static constexpr int kValueDim = 512;
  static constexpr int kHeads = 64;  // rows of a query tile
  static constexpr int kBlocks = kHeadDim / 64;
  static constexpr int kBlockBytes = kHeads * 128;  // of the query tile

  // The tensor core truncates every partial sum, which one sum over all channels turns into 1.4e-6
  // of the largest logits; S is made of this many sums over channels, which FP32 registers add.
  static constexpr int kSums = 3;
  static constexpr int kStepsPerSum = kBlocks * 4 / kSums + (kBlocks * 4 % kSums != 0);

  static constexpr int kSlotKeys = 32;  // one word of validity bits
  static constexpr int kSlots = 4;
  static constexpr int kTileSlots = 2;
  static constexpr int kTileKeys = kSlotKeys * kTileSlots;
  static constexpr int kGroupBytes = kBlocks * 1024;  // eight keys, block after block
  static constexpr int kSlotBytes = kSlotKeys / 8 * kGroupBytes;

  static constexpr int kThreads = 512;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kScoreRegisters = 152;
  static constexpr int kValueRegisters = 160;

  static_assert(kHeadDim == 576 || kHeadDim == 512, "SPEC's two latents");
  static_assert(kSlots % kTileSlots == 0, "a tile never wraps round the ring");
  static_assert(kProducerRegisters + kScoreRegisters + 2 * kValueRegisters <= 512,
                "the warpgroups share the 65536 registers of an SM");
};

template <typename Config>
struct SharedStorage {
  alignas(1024) uint8_t q[Config::kBlocks * Config::kBlockBytes];   // [block][head]
  alignas(1024) uint8_t ring[Config::kSlots * Config::kSlotBytes];  // [8 keys][block][key]
  alignas(1024) uint8_t p[Config::kHeads * Config::kTileKeys * 2];  // [head][key], swizzled
  float alpha[Config::kHeads];     // what O has to be multiplied with before this tile's products
  float inverse[Config::kHeads];   // 1 / softmax denominator
  uint32_t valid[Config::kSlots];  // bit c: key c of the slot counts
  uint64_t kv_full[Config::kSlots];
  uint64_t kv_empty[Config::kSlots];
  uint64_t p_full;
  uint64_t p_empty[Config::kTileSlots];
  uint64_t inverse_full;
  uint64_t inverse_empty;
};

static_assert(sizeof(SharedStorage<Config<576>>) <= 232448, "over the limit of a Hopper SM");
static_assert(sizeof(SharedStorage<Config<512>>) <= 232448, "over the limit of a Hopper SM");

// What the kernel receives. Strides count elements. Rows of q and kv are aligned to 16 bytes.
struct KernelParams {
  const __nv_bfloat16* q;  // [T_q, H, D]
  int64_t q_row_stride;
  int64_t q_head_stride;
  const __nv_bfloat16* kv;  // [T_k, D]
  int64_t kv_row_bytes;
  const int32_t* topk_indices;  // [T_q, K]
  int64_t topk_indices_row_stride;
  const int32_t* extents;  // [T_q], last counted slot + 1
  const float* attn_sink;  // [H] or null

  __nv_bfloat16* out;  // [T_q, H, 512]
  bool out_aligned;    // to 16 bytes
  float* lse;          // [T_q, H]
  float* max_logits;   // [T_q, H] or null

  int64_t items;  // item = token << head_blocks_log2 | block of 64 heads
  int head_blocks_log2;
  int heads;
  int t_k;
  float softmax_scale;
  float softmax_scale_log2e;
};

}  // namespace flashdsa::attention::sm90::forward_pass
