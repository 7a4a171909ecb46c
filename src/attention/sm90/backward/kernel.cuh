// Sparse MLA attention, backward, on Hopper: one query row and up to 64 heads an item, or several
// rows of up to 32 heads that select nearly the same keys. Rows alone of up to 32 heads have a
// kernel of their own, ../backward_few_heads, but in the ordered modes and for repairs.
//
//   S = scale q k,  P = exp(S - ln(e^lse + e^sink)),  D = sum_c grad_out out = sum_j P dP
//   dP = grad_out value,  dS = P (dP - D) scale
//   grad_q = sum_j dS kv[i_j],  grad_kv[i_j] += dS q (+ P grad_out in the first 512 channels)
//
// Inputs and outputs: KernelParams in config.h. Slots that hold no key are zero rows with P = 0 and
// are never added; heads past H are zero rows with P = dS = 0. The default kernel adds rows of
// grad_kv with vector atomics; the ordered one stores every slot's row for core/cuda/ordered_sum.h.
//
// Groups. With Config::kGroups an item is one of groups.h, several tokens: a row of the tile is a
// token and a head, a slot a key of the item's list or range. What is said below of heads holds for
// these rows. P of a key that a token did not select is -0, by whose sign dS becomes zero whatever
// dP and D are; keys, queries and grad_out are finite, see groups.h.
//
// D. The walk begins with D of the BF16 out, whose rounding shifts every dS of a head by the same
// multiple of P. Where the keys of a row have much in common, sum P k is long against grad_q, and
// that breaks SPEC 8. So warpgroup 1 sums P and P dP on the way, and once the exact D is known
// grad_q += shift * sum P k, which out is on its channels and warpgroups 0 and 1 have summed on the
// rope channels. grad_kv has no such lever: only where dP hardly differs between the keys, or one
// key has all the weight, is the shift seen there. Such items are flagged, and the same kernel
// runs once more as a repair, over those items alone, with grad_out = 0 and D = the error: so dS is
// the difference, which it adds to grad_kv (in the ordered mode to the slot's row). The kernel for
// few heads does likewise and leaves the repair to this one.
// A pre-pass for the exact D would cost every call S and dP again.
//
// Grid: one CTA per SM, items blockIdx.x, + gridDim.x, ..., in step (core/cuda/pace.cuh) where the
// accumulators outgrow second-level cache.    Tile: 64 heads x 64 keys.
// Warpgroups                                                                        registers
//   0  S, P; grad_q channels of the lower half; grad_kv chunks 0, 1                       208
//   1  dP, dS; grad_q channels of the upper half; grad_kv chunks 2, 3                     208
//   2  the other grad_kv chunks, during grad_q and the next tile's S and dP                64
//   3  loads: cp.async gather of the key tile, q, grad_out                                 32
// Warpgroups 0 and 1 make their grad_kv chunks in the registers that S and dP have left, while the
// next keys are on their way; before an item they compute D and the denominator.
//
// Shared memory, bytes (D = 576 / 512): q 73728 / 65536, grad_out 65536, P 8192, dS 8192, keys (and
// grad_q rows on their way out) 74752 / 66560, barriers, D, lse and sums 2048: 232448 / 216064.
//
// Barriers (0, 1 and 2 first wait on parity 0; 3, which has nothing to wait for then, on parity 1)
//   key_full[c]    128 cp.async arrivals of 3   0, 1 wait      chunk c of the key tile is there
//   key_empty[c]   4 or 8 warps of 0, 1         3 waits        grad_q (and sum P k) has read it
//   query_full     128 cp.async arrivals of 3   0, 1, 2 wait   q and grad_out are there
//   query_empty    12 warps of 0, 1, 2          3 waits        nobody reads q and grad_out any more
//   key_area_free  256 threads of 0, 1          3 waits        grad_q rows have left the key area
//   heads_full     256 threads of 0, 1          0, 1 wait      D and lse are there
//   products_done  256 threads of 0, 1          0, 1 wait      all grad_q products of the item are
//                                                              done, the key area may be
//                                                              overwritten, the shifts are there
// What ordinary loads read is handed over where every thread arrives itself, which racecheck
// follows; it follows no named barrier of a part of the block.
// Named barriers
//   kPFree    1, 2 arrive, 0 waits   nobody reads the previous tile's P and dS any more
//   kPReady   0 arrives, 1 waits     P is in shared memory
//   kDsReady  0, 1, 2 meet           P and dS are in shared memory
//   kRopeReady  0 arrives, 1 waits   0's half of sum P k of the rope channels is in the key area
//
// Rounded to BF16: P and dS (operands of the second products; P also where it makes dS), grad_q;
// sum P k of the rope channels after every tile, which only multiplies a shift. All else is FP32.
// The order of grad_q's sums depends on the item alone.
#pragma once

#include <cmath>

#include "attention/sm90/backward/config.h"
#include "core/cuda/pace.cuh"
#include "core/cuda/ptx.cuh"
#include "core/cuda/wgmma.cuh"

namespace flashdsa::attention::sm90::backward_pass {

using namespace core::cuda;

enum NamedBarrier { kPFree = 1, kPReady, kDsReady, kRopeReady };

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// ------------------------------------------------------------------------------ small things

struct Item {
  int64_t token;  // the first
  int first_head;
  int rows;    // of the tile's 64
  int extent;  // slots to look at, or keys; 0: a row without keys

  // Groups only.
  int tokens;
  bool is_range;
};

// How many items there are; index < item_count.
template <typename Config>
__device__ __forceinline__ int item_count(const KernelParams& p) {
  return Config::kGroups ? __ldg(&p.group_counts->items) : p.items;
}

template <typename Config>
__device__ __forceinline__ Item item_at(const KernelParams& p, int index) {
  Item result;
  if constexpr (Config::kGroups) {
    const int2 item = __ldg(reinterpret_cast<const int2*>(p.group_items + index) + 1);
    result.token = item.x;
    result.first_head = 0;
    result.extent = item.y & 0xFFFF;
    result.tokens = item.y >> 16 & 0xFF;
    result.rows = result.tokens * p.heads;
    result.is_range = item.y >> 24 != 0;
  } else {
    const int64_t item = p.first_item + index;
    result.token = item >> p.two_head_blocks;
    result.first_head = static_cast<int>(item & p.two_head_blocks) * 64;
    result.rows = min(p.heads - result.first_head, 64);
    result.extent = __ldg(p.extents + result.token);
  }
  return result;
}

// The same for the walk: a repair takes items that are not flagged for empty.
template <typename Config>
__device__ __forceinline__ Item next_item(const KernelParams& p, int index) {
  Item result = item_at<Config>(p, index);
  if constexpr (Config::kRepair) {
    const auto* flags = reinterpret_cast<const uint32_t*>(p.needs_repair);
    if (__ldg(flags + p.first_item + index) == 0) result.extent = 0;
  }
  return result;
}

__device__ __forceinline__ int tiles_of(const Item& item) { return (item.extent + 63) / 64; }

// The same number, of which the compiler knows nothing: what is computed from it is computed again
// instead of held in registers.
template <typename Word>
__device__ __forceinline__ Word opaque(Word number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Where the keys of an item stand, and how many. With groups this is read anew from the record
// instead of held in registers.
template <typename Config>
__device__ __forceinline__ const int32_t* slots_of(const KernelParams& p, int index) {
  if constexpr (Config::kGroups) {
    return reinterpret_cast<const int32_t*>(
        __ldg(reinterpret_cast<const uint64_t*>(p.group_items + opaque(index))));
  } else {
    return p.topk_indices +
           ((p.first_item + index) >> p.two_head_blocks) * p.topk_indices_row_stride;
  }
}

template <typename Config>
__device__ __forceinline__ int extent_of(const KernelParams& p, const Item& item, int index) {
  return Config::kGroups ? item_at<Config>(p, opaque(index)).extent : item.extent;
}

// What stands in slots first + i * kStep of an item, -1 behind the last. Nothing looks at the
// entries here, so that they stay on their way until key_or_none asks for them. Without the return
// the compiler spills the counters of the walk over groups instead of keeping them uniform.
template <typename Config, int kStep, int kCount>
__device__ __forceinline__ void read_entries(const KernelParams& p, const Item& item, int index,
                                             int first, int (&entries)[kCount]) {
  const int32_t* slots = slots_of<Config>(p, index) + first;
  const int left = extent_of<Config>(p, item, index) - first;
#pragma unroll
  for (int i = 0; i < kCount; ++i) entries[i] = -1;
  if (Config::kGroups && left <= 0) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) entries[i] = i * kStep < left ? __ldg(slots + i * kStep) : -1;
}

// The key that an entry is, or -1.
__device__ __forceinline__ int key_or_none(const KernelParams& p, int entry) {
  return static_cast<unsigned>(entry) < static_cast<unsigned>(p.t_k) ? entry : -1;
}

// The token of tile row `row` within its item; any number below 8 for a row past the last.
template <typename Config>
__device__ __forceinline__ int token_of(const KernelParams& p, int row) {
  return Config::kGroups ? (row * p.inverse_heads >> 16) & 7 : 0;
}

// From the item's first vector to that of tile row `row`, in a tensor [T_q, H, ...].
template <typename Config>
__device__ __forceinline__ int64_t row_offset(const KernelParams& p, int row, int64_t row_stride,
                                              int64_t head_stride) {
  if constexpr (!Config::kGroups) return row * head_stride;
  return row * head_stride + token_of<Config>(p, row) * (row_stride - p.heads * head_stride);
}

// Head of tile row `row`.
template <typename Config>
__device__ __forceinline__ int head_of(const KernelParams& p, const Item& item, int row) {
  return item.first_head + row - token_of<Config>(p, row) * p.heads;
}

// Bits 0..n-1, for any n.
__device__ __forceinline__ uint32_t bits_below(int n) {
  return n >= 32 ? kAllLanes : (1u << max(n, 0)) - 1;
}

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

// Operand whose rows are M or N, its channels K; 16 of K are 32 bytes.
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) {
  return wgmma_descriptor(address, 16, 1024);
}
// Operand whose rows are K, its channels M or N; 16 of K are 2048 bytes.
template <typename Config>
__device__ __forceinline__ uint64_t columns_operand(uint32_t address) {
  return wgmma_descriptor(address, Config::kChunkBytes, 1024);
}

// Byte offset of 16-byte piece `piece` of row `row` in a chunk.
__device__ __forceinline__ int chunk_offset(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// ------------------------------------------------------------------------------ grad_kv

// A lane adds to four rows of a tile: of its warp's 16 slots to number (lane / 4) % 4 + 4 i, see
// add_chunk. This is the first of these slots.
__device__ __forceinline__ int first_slot_to_add(int tile) {
  const int thread = opaque(static_cast<int>(threadIdx.x & 127));
  return tile * 64 + (thread >> 5) * 16 + ((thread >> 2) & 3);
}

// From the entries of these slots to rows of `grad_kv_rows`, -1 for none.
template <typename Config>
__device__ __forceinline__ void rows_to_add(const KernelParams& p, int index, int tile,
                                            int (&rows)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    rows[i] = key_or_none(p, rows[i]);
    if (Config::kOrdered && rows[i] >= 0) {
      rows[i] = index * p.topk + first_slot_to_add(tile) + 4 * i;
    }
  }
}

template <typename Config>
__device__ __forceinline__ void put(float* to, const float4& value) {
  if constexpr (Config::kOrdered && !Config::kRepair) {
    *reinterpret_cast<float4*>(to) = value;
  } else {
    reduce_add_v4(to, value.x, value.y, value.z, value.w);
  }
}

// Adds 16 slots x 64 channels of one warp from the accumulator layout (lane 4g + q holds rows g,
// g + 8, columns 8j + 2q, + 1). Half of the values change lanes (lane ^ 16), so that each
// instruction adds 4 rows x 128 contiguous bytes; 8 rows x 64 bytes without an exchange cost a
// third more at 32768 keys. `to` is the chunk's first channel in row 0.
template <typename Config>
__device__ __forceinline__ void add_chunk(const float (&d)[32], const int (&rows)[4], float* to,
                                          int lane) {
  const bool high = lane & 16;
  to += (lane >> 4) * 16 + (lane & 3) * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // rows g or g + 8
#pragma unroll
    for (int b = 0; b < 2; ++b) {  // 32 columns
      float4 v[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // 16 columns, in the permuted order of passes.h
        const int j = 4 * (4 * b + 2 * i) + 2 * half;
        v[i] = make_float4(d[j], d[j + 1], d[j + 4], d[j + 5]);
      }
      // Lanes of rows g < 4 give their second 64 bytes for the first 64 bytes of row g + 4.
      const float4 give = high ? v[0] : v[1];
      float4 got;
      got.x = __shfl_xor_sync(kAllLanes, give.x, 16);
      got.y = __shfl_xor_sync(kAllLanes, give.y, 16);
      got.z = __shfl_xor_sync(kAllLanes, give.z, 16);
      got.w = __shfl_xor_sync(kAllLanes, give.w, 16);
      const int first = opaque(rows[2 * half]), second = opaque(rows[2 * half + 1]);
      if (first >= 0) {
        put<Config>(to + int64_t{first} * Config::kHeadDim + b * 32, high ? got : v[0]);
      }
      if (second >= 0) {
        put<Config>(to + int64_t{second} * Config::kHeadDim + b * 32, high ? v[1] : got);
      }
    }
  }
}

// d = (dS^T q + P^T grad_out) of 64 slots x the 64 channels of chunk `c`.
template <typename Config>
__device__ __forceinline__ void grad_kv_products(SharedStorage<Config>& shared, float (&d)[32],
                                                 int c) {
  const uint32_t offset = c * Config::kChunkBytes;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    Wgmma<64>::shared<1, 1>(d, columns_operand<Config>(shared_address(shared.ds) + k * 2048),
                            columns_operand<Config>(shared_address(shared.q) + offset + k * 2048),
                            k != 0);
  }
  if (c < Config::kValueChunks) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<64>::shared<1, 1>(
          d, columns_operand<Config>(shared_address(shared.p) + k * 2048),
          columns_operand<Config>(shared_address(shared.grad_out) + offset + k * 2048), 1);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
}

// Warpgroup 2.
template <typename Config>
__device__ __forceinline__ void run_grad_kv(const KernelParams& p, SharedStorage<Config>& shared) {
  const int lane = threadIdx.x & 31;
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < item_count<Config>(p); index += p.ctas) {
    const Item item = next_item<Config>(p, index);
    if (item.extent == 0) continue;
    const int tiles = tiles_of(item);
    barrier_wait(&shared.query_full, parity);
    fence_async_shared();
    parity ^= 1;
    named_arrive(kPFree, 384);
    for (int tile = 0; tile < tiles; ++tile) {
      int rows[4];
      read_entries<Config, 4>(p, item, index, first_slot_to_add(tile), rows);
      named_meet(kDsReady, 384);
      rows_to_add<Config>(p, index, tile, rows);
      float d[32];
#pragma unroll 1
      for (int c = 2 * Config::kOwnChunks; c < Config::kChunks; ++c) {
        grad_kv_products(shared, d, c);
        if (c == Config::kChunks - 1 && tile + 1 < tiles) named_arrive(kPFree, 384);
        add_chunk<Config>(d, rows, p.grad_kv_rows + c * 64, lane);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.query_empty);
  }
}

// ------------------------------------------------------------------------------ before an item

// This lane's part of sum_c grad_out * out of one head.
template <typename Config>
__device__ __forceinline__ float partial_d(const __nv_bfloat16* out, const __nv_bfloat16* grad_out,
                                           int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Config::kValueDim / 256; ++i) {
    const uint4 a = __ldg(reinterpret_cast<const uint4*>(out) + i * 32 + lane);
    const uint4 b = __ldg(reinterpret_cast<const uint4*>(grad_out) + i * 32 + lane);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w};
    const uint32_t y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum += low_bf16(x[e]) * low_bf16(y[e]) + high_bf16(x[e]) * high_bf16(y[e]);
    }
  }
  return sum;
}

// ln(e^lse + e^sink): the softmax's whole denominator.
__device__ __forceinline__ float whole_lse(float lse, float sink) {
  if (sink == -INFINITY) return lse;
  if (sink == INFINITY) return sink;
  if (isnan(lse) || isnan(sink)) return lse + sink;  // fmaxf would drop it
  const float top = fmaxf(lse, sink);
  return top + log1pf(expf(fminf(lse, sink) - top));
}

template <typename Config>
__device__ __forceinline__ const __nv_bfloat16* out_of(const KernelParams& p, const Item& item,
                                                       int row) {
  return p.out + item.token * p.out_row_stride + item.first_head * p.out_head_stride +
         row_offset<Config>(p, row, p.out_row_stride, p.out_head_stride);
}

template <typename Config>
__device__ __forceinline__ const __nv_bfloat16* grad_out_of(const KernelParams& p, const Item& item,
                                                            int row) {
  return p.grad_out + item.token * p.grad_out_row_stride +
         item.first_head * p.grad_out_head_stride +
         row_offset<Config>(p, row, p.grad_out_row_stride, p.grad_out_head_stride);
}

// D of the BF16 out of the eight heads of one math warp, lane i has that of head first + i.
template <typename Config>
__device__ __forceinline__ float d_of_out(const KernelParams& p, const Item& item, int first,
                                          int lane) {
  float d = 0.0f;
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    if (first + i >= item.rows) break;
    float sum = partial_d<Config>(out_of<Config>(p, item, first + i),
                                  grad_out_of<Config>(p, item, first + i), lane);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(kAllLanes, sum, o);
    if (lane == i) d = sum;
  }
  return d;
}

template <typename Config>
__device__ __forceinline__ const float* lse_of(const KernelParams& p, const Item& item, int row) {
  return p.lse + item.token * p.lse_row_stride + item.first_head +
         row_offset<Config>(p, row, p.lse_row_stride, 1);
}

// The denominator and D of the eight heads of one math warp. A repair finds dP = 0, so that its D
// makes dS the difference that is missing.
template <typename Config>
__device__ __forceinline__ void prepare_heads(const KernelParams& p, SharedStorage<Config>& shared,
                                              const Item& item, int math_warp, int lane) {
  const int first = math_warp * 8;
  float d = 0.0f, lse = INFINITY;
  if constexpr (!Config::kRepair) d = d_of_out<Config>(p, item, first, lane);
  if (lane >= 8) return;
  const int row = first + lane;
  if (row < item.rows) {
    const int head = head_of<Config>(p, item, row);
    lse = __ldg(lse_of<Config>(p, item, row));
    if (p.attn_sink != nullptr) lse = whole_lse(lse, __ldg(p.attn_sink + head));
    if constexpr (Config::kRepair) {
      d = __ldg(p.d_errors + item.token * p.heads + item.first_head + row);
    }
  }
  float4& sums = shared.sums[row];
  sums.x = sums.y = sums.z = 0.0f;  // not w: the other warps may still need the last item's shift
  shared.lse_log2[row] = lse * kLog2E;
  shared.d[row] = d;
}

// Sums over keys of one head: x = P, y = P u, z = P u^2, where u = dP - D of the BF16 out.
__device__ __forceinline__ void add_key(float3& sums, float p, float u) {
  sums.x += p;
  sums.y = fmaf(p, u, sums.y);
  sums.z = fmaf(p * u, u, sums.z);
}

// Adds what the four lanes of a quad saw to the head's sums.
__device__ __forceinline__ void add_sums(float4& to, float3 sums, int lane) {
#pragma unroll
  for (int o = 1; o <= 2; ++o) {
    sums.x += __shfl_xor_sync(kAllLanes, sums.x, o);
    sums.y += __shfl_xor_sync(kAllLanes, sums.y, o);
    sums.z += __shfl_xor_sync(kAllLanes, sums.z, o);
  }
  if ((lane & 3) == 0) {
    const float4 old = to;
    to = make_float4(old.x + sums.x, old.y + sums.y, old.z + sums.z, 0.0f);
  }
}

// What the BF16 rounding of out took from D of tile row `row`, from the sums over all keys:
//   D = sum_j P dP = (1 - P_sink) (D of out + sum P u / sum P)
// where the quotient does away with errors that all P share. The thread that `stores` stores it,
// the shift of dS / P that grad_q lacks, and the sink's part. Returns whether it is more than 2^-6
// of what the dP differ by: then grad_kv, which has its dS by now, must be repaired; less is within
// SPEC 8 as it is.
template <typename Config>
__device__ __forceinline__ bool settle_d(const KernelParams& p, SharedStorage<Config>& shared,
                                         const Item& item, int row, bool stores) {
  const bool live = row < item.rows;
  const int vector = min(row, item.rows - 1);
  const int64_t at = item.token * p.heads + item.first_head + vector;
  float p_sink = 0.0f, mass = 1.0f;  // of the softmax
  if (p.attn_sink != nullptr) {
    const float sink = __ldg(p.attn_sink + head_of<Config>(p, item, vector));
    const float lse = __ldg(lse_of<Config>(p, item, vector));
    p_sink = 1.0f / (1.0f + expf(lse - sink));
    mass = 1.0f / (1.0f + expf(sink - lse));
  }
  const float4 sums = shared.sums[row];
  const float d = shared.d[row];
  const bool has_mass = !(sums.x == 0.0f);  // NaN counts
  const float mean = has_mass ? sums.y / sums.x : 0.0f;
  const float error = has_mass ? mass * mean - p_sink * d : 0.0f;
  __syncwarp();  // both halves have read
  if (stores) shared.sums[row].w = live ? -p.softmax_scale * error : 0.0f;
  if (stores && live) {
    p.d_errors[at] = error;
    if (p.sink_terms != nullptr) p.sink_terms[at] = has_mass ? p_sink * (d + error) : 0.0f;
  }
  const float variance = fmaxf(sums.z / sums.x - mean * mean, 0.0f);
  return live && error * error > 0x1p-12f * variance;
}

// A row without keys: grad_q and the sink's part are zero. `thread` counts in both warpgroups.
template <typename Config>
__device__ __forceinline__ void write_empty_item(const KernelParams& p, const Item& item,
                                                 int thread) {
  const int64_t first = item.token * p.heads + item.first_head;
  auto* to = reinterpret_cast<uint4*>(p.grad_q + first * Config::kHeadDim);
  for (int i = thread; i < item.rows * Config::kHeadDim / 8; i += 256) {
    to[i] = make_uint4(0, 0, 0, 0);
  }
  if (p.sink_terms != nullptr && thread < item.rows) p.sink_terms[first + thread] = 0.0f;
}

// ------------------------------------------------------------------------------ S, dP, grad_q

// grad_q of the lower (kGroup 0) or upper (1) half of the channels: chunks 0, 1 and 2, 3 of the
// half, and the half's part of the middle chunk.
struct GradQ {
  float first[64];
  float second[64];
  float middle[16];
};

// d += shift * vector of the two heads of this thread, whose channels start at `low` and `high`.
// In a group a row without keys, whose vector may hold anything, has no shift.
template <typename Config, int kCount>
__device__ __forceinline__ void shift_heads(float (&d)[kCount], const __nv_bfloat16* low,
                                            const __nv_bfloat16* high, float shift0, float shift1) {
  const uint32_t keep0 = Config::kGroups && shift0 == 0.0f ? 0 : kAllLanes;
  const uint32_t keep1 = Config::kGroups && shift1 == 0.0f ? 0 : kAllLanes;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const uint32_t a = __ldg(reinterpret_cast<const uint32_t*>(low + 8 * i)) & keep0;
    const uint32_t b = __ldg(reinterpret_cast<const uint32_t*>(high + 8 * i)) & keep1;
    d[4 * i] = fmaf(shift0, low_bf16(a), d[4 * i]);
    d[4 * i + 1] = fmaf(shift0, high_bf16(a), d[4 * i + 1]);
    d[4 * i + 2] = fmaf(shift1, low_bf16(b), d[4 * i + 2]);
    d[4 * i + 3] = fmaf(shift1, high_bf16(b), d[4 * i + 3]);
  }
}

// The same with the vectors in pairs of channels, as accumulators hold them.
__device__ __forceinline__ void shift_pairs(float* d, const uint32_t (&pairs)[8], float shift0,
                                            float shift1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float shift = (i & 1) ? shift1 : shift0;
    d[2 * i] = fmaf(shift, low_bf16(pairs[i]), d[2 * i]);
    d[2 * i + 1] = fmaf(shift, high_bf16(pairs[i]), d[2 * i + 1]);
  }
}

// What stands for P of a key that a token of a group did not select: zero with a sign, which no
// exponential has, so that dS becomes zero whatever dP and D are.
inline constexpr float kNoPair = -0.0f;

__device__ __forceinline__ bool is_no_pair(float p) { return __float_as_int(p) < 0; }

// Which keys of a tile are a token's, see Math::softmax_of_tokens: the plan's words, or the token's
// part of the range.
template <typename Config>
__device__ __forceinline__ uint32_t words_of_tile(const KernelParams& p, int index, int tile,
                                                  int lane) {
  const Item item = item_at<Config>(p, opaque(index));
  const int token = lane & 7, chunk = 2 * tile + (lane >> 3 & 1);
  if (token >= item.tokens || chunk * 32 >= item.extent) return 0;
  if (!item.is_range) {
    return __ldg(p.plan.masks + item.token * p.mask_words + chunk * item.tokens + token);
  }
  const int keys = __ldg(p.plan.row_keys + item.token + token);
  if (keys == 0) return 0;
  const int first_key = __ldg(slots_of<Config>(p, index)) + chunk * 32;
  const int first = __ldg(p.plan.row_first + item.token + token) - first_key;
  return bits_below(first + keys) & ~bits_below(first);
}

// Warpgroup 0 or 1.
template <typename Config, int kGroup>
struct Math {
  using Storage = SharedStorage<Config>;
  static constexpr int kChunk0 = kGroup == 0 ? 0 : Config::kChunks - 4;  // of its whole chunks

  // s = q k of all channels, or grad_out . value. All chunks of the key tile are there afterwards.
  static __device__ __forceinline__ void score(Storage& shared, uint32_t parity, float (&s)[32]) {
    const uint32_t heads = shared_address(kGroup == 0 ? shared.q : shared.grad_out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kChunks; ++i) {
      const int c = Config::chunk_at(i);
      barrier_wait(&shared.key_full[c], parity);
      if constexpr (Config::kFenceKeys) fence_async_shared();
      if (kGroup == 1 && c >= Config::kValueChunks) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t offset = c * Config::kChunkBytes + k * 32;
        Wgmma<64>::shared(s, rows_operand(heads + offset),
                          rows_operand(shared_address(shared.keys) + offset), (i | k) != 0);
      }
    }
    wgmma_commit();
  }

  // S -> P of this thread's two heads. `low`, `high`: bit j is set when slot j, 32 + j holds a key.
  static __device__ __forceinline__ void softmax(float (&s)[32], float scale_log2, float lse0,
                                                 float lse1, uint32_t low, uint32_t high,
                                                 int lane) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = exp2_fast(fmaf(s[i], scale_log2, (i & 2) ? -lse1 : -lse0));
    }
    if ((low & high) == kAllLanes) return;
    low = opaque(low >> (lane & 3) * 2);
    high = opaque(high >> (lane & 3) * 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) {  // column 8 (i / 4) + 2 (lane % 4) + i % 2
      const uint32_t bit = 1u << ((i >> 2 & 3) * 8 + (i & 1));
      if (!((i < 16 ? low : high) & bit)) s[i] = 0.0f;
    }
  }

  // The same in a group, whose tokens have keys of their own: bit j of lane 8 i + t of `words` is
  // set when key 32 i + j of the tile is one of token t. Of pairs that are none P is kNoPair.
  static __device__ __forceinline__ void softmax_of_tokens(float (&s)[32], float scale_log2,
                                                           float lse0, float lse1, uint32_t words,
                                                           const int (&tokens)[2], int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = __shfl_sync(kAllLanes, words, tokens[half]) >> (lane & 3) * 2;
      const uint32_t high = __shfl_sync(kAllLanes, words, 8 + tokens[half]) >> (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int i = (j >> 1) * 4 + half * 2 + (j & 1);
        const uint32_t bit = 1u << ((i >> 2 & 3) * 8 + (i & 1));
        const float p = exp2_fast(fmaf(s[i], scale_log2, half == 0 ? -lse0 : -lse1));
        s[i] = ((i < 16 ? low : high) & bit) != 0 ? p : kNoPair;
      }
    }
  }

  // P -> shared memory. Heads that do not exist, whose lse is +inf, have P = 0 whatever keys hold,
  // in a group kNoPair.
  static __device__ __forceinline__ void store_p(Storage& shared, const float (&s)[32], float lse0,
                                                 float lse1, int offset) {
    const uint32_t mask0 = lse0 == INFINITY ? 0 : kAllLanes;
    const uint32_t mask1 = lse1 == INFINITY ? 0 : kAllLanes;
    const uint32_t none0 = Config::kGroups ? ~mask0 & 0x80008000 : 0;
    const uint32_t none1 = Config::kGroups ? ~mask1 & 0x80008000 : 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* v = s + 8 * j;
      stmatrix_x4(shared_address(shared.p) + (offset ^ j * 32),
                  (pack_bf16(v[0], v[1]) & mask0) | none0, (pack_bf16(v[2], v[3]) & mask1) | none1,
                  (pack_bf16(v[4], v[5]) & mask0) | none0, (pack_bf16(v[6], v[7]) & mask1) | none1);
    }
  }

  // The same, to warpgroup 1, once nobody reads the last tile's P any more.
  static __device__ __forceinline__ void hand_over_p(Storage& shared, const float (&s)[32],
                                                     float lse0, float lse1, int offset) {
    named_sync(kPFree, 384);
    store_p(shared, s, lse0, lse1, offset);
    fence_async_shared();
    named_arrive(kPReady, 256);
  }

  // dS = P (dP - D) scale -> shared memory, and the sums of this lane's keys.
  static __device__ __forceinline__ void store_ds(Storage& shared, const float (&dp)[32], float d0,
                                                  float d1, float scale, int offset,
                                                  float3 (&sums)[2]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t w[4];
      ldmatrix_x4(shared_address(shared.p) + (offset ^ j * 32), w[0], w[1], w[2], w[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float d = (i & 1) ? d1 : d0;
        const float p0 = low_bf16(w[i]), p1 = high_bf16(w[i]);
        float u0 = dp[8 * j + 2 * i] - d, u1 = dp[8 * j + 2 * i + 1] - d;
        if constexpr (Config::kGroups) {
          if (is_no_pair(p0)) u0 = 0.0f;
          if (is_no_pair(p1)) u1 = 0.0f;
        }
        if constexpr (!Config::kRepair) {
          add_key(sums[i & 1], p0, u0);
          add_key(sums[i & 1], p1, u1);
        }
        w[i] = pack_bf16(p0 * u0 * scale, p1 * u1 * scale);
      }
      stmatrix_x4(shared_address(shared.ds) + (offset ^ j * 32), w[0], w[1], w[2], w[3]);
    }
  }

  // grad_q += dS k and, of half of the rope channels, p_k = P k; then the key chunks are free.
  static __device__ __forceinline__ void grad_q_products(Storage& shared, GradQ& grad_q,
                                                         float (&p_k)[16], bool accumulate,
                                                         int lane) {
    const uint32_t ds = shared_address(shared.ds);
    const uint32_t keys = shared_address(shared.keys);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<128>::shared<0, 1>(
          grad_q.first, rows_operand(ds + k * 32),
          columns_operand<Config>(keys + kChunk0 * Config::kChunkBytes + k * 2048),
          accumulate || k != 0);
    }
    wgmma_commit();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      Wgmma<128>::shared<0, 1>(
          grad_q.second, rows_operand(ds + k * 32),
          columns_operand<Config>(keys + (kChunk0 + 2) * Config::kChunkBytes + k * 2048),
          accumulate || k != 0);
      if constexpr (Config::kHasMiddle) {
        Wgmma<32>::shared<0, 1>(
            grad_q.middle, rows_operand(ds + k * 32),
            columns_operand<Config>(keys + Config::kMiddle * Config::kChunkBytes + kGroup * 64 +
                                    k * 2048),
            accumulate || k != 0);
      }
      if constexpr (Config::kSumsRope) {
        Wgmma<32>::shared<0, 1>(p_k, rows_operand(shared_address(shared.p) + k * 32),
                                columns_operand<Config>(keys + Config::kRope * Config::kChunkBytes +
                                                        kGroup * 64 + k * 2048),
                                k != 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (lane == 0) {
      barrier_arrive(&shared.key_empty[kChunk0]);
      barrier_arrive(&shared.key_empty[kChunk0 + 1]);
    }
    wgmma_wait<0>();
    if (lane == 0) {
      barrier_arrive(&shared.key_empty[kChunk0 + 2]);
      barrier_arrive(&shared.key_empty[kChunk0 + 3]);
      if constexpr (Config::kHasMiddle) barrier_arrive(&shared.key_empty[Config::kMiddle]);
      if constexpr (Config::kSumsRope && kGroup == 0) {
        barrier_arrive(&shared.key_empty[Config::kRope]);
      }
    }
    wgmma_pin(grad_q.first);
    wgmma_pin(grad_q.second);
    if constexpr (Config::kHasMiddle) wgmma_pin(grad_q.middle);
    if constexpr (Config::kSumsRope) wgmma_pin(p_k);
  }

  // All tiles of one item: grad_q stays in registers, grad_kv chunks leave.
  static __device__ __forceinline__ void tiles(const KernelParams& p, Storage& shared,
                                               const Item& item, int index, uint32_t& key_parity,
                                               GradQ& grad_q, uint32_t (&rope)[8]) {
    for (int tile = 0; tile * 64 < item.extent; ++tile) {
      float s[32];
      score(shared, key_parity, s);
      key_parity ^= 1;
      const int thread = opaque(static_cast<int>(threadIdx.x & 127)), lane = thread & 31;
      const int row0 = (thread >> 5) * 16;   // the warp's heads
      const int head0 = row0 + (lane >> 2);  // this thread's are head0 and head0 + 8
      // Where this lane's row starts in stmatrix and ldmatrix of rows 0-7, 8-15 x keys 0-7, 8-15 of
      // the warp's 16 heads; 16 j keys further is ^ 32 j.
      const int offset = chunk_offset(row0 + (lane & 15), lane >> 4);
      if constexpr (kGroup == 0 && Config::kGroups) {
        const uint32_t words = words_of_tile<Config>(p, index, tile, lane);
        wgmma_wait<0>();
        wgmma_pin(s);
        const float lse0 = shared.lse_log2[head0], lse1 = shared.lse_log2[head0 + 8];
        const int tokens[2] = {token_of<Config>(p, head0), token_of<Config>(p, head0 + 8)};
        softmax_of_tokens(s, p.softmax_scale * kLog2E, lse0, lse1, words, tokens, lane);
        hand_over_p(shared, s, lse0, lse1, opaque(offset));
      } else if constexpr (kGroup == 0) {
        int entries[2];
        read_entries<Config, 32>(p, item, index, tile * 64 + lane, entries);
        wgmma_wait<0>();
        wgmma_pin(s);
        const float lse0 = shared.lse_log2[head0], lse1 = shared.lse_log2[head0 + 8];
        softmax(s, p.softmax_scale * kLog2E, lse0, lse1,
                __ballot_sync(kAllLanes, key_or_none(p, entries[0]) >= 0),
                __ballot_sync(kAllLanes, key_or_none(p, entries[1]) >= 0), lane);
        hand_over_p(shared, s, lse0, lse1, opaque(offset));
      } else {
        named_arrive(kPFree, 384);
        wgmma_wait<0>();
        wgmma_pin(s);
        named_sync(kPReady, 256);
        float3 sums[2] = {};
        store_ds(shared, s, shared.d[head0], shared.d[head0 + 8], p.softmax_scale, opaque(offset),
                 sums);
        if constexpr (!Config::kRepair) {
          add_sums(shared.sums[head0], sums[0], lane);
          add_sums(shared.sums[head0 + 8], sums[1], lane);
        }
        fence_async_shared();
      }
      named_meet(kDsReady, 384);
      int rows[4];  // entries, on their way during grad_q
      read_entries<Config, 4>(p, item, index, first_slot_to_add(tile), rows);
      float p_k[16];
      grad_q_products(shared, grad_q, p_k, tile != 0, lane);
      if constexpr (Config::kSumsRope) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          rope[i] = add_bf16(rope[i], pack_bf16(p_k[2 * i], p_k[2 * i + 1]));
        }
      }

      rows_to_add<Config>(p, index, tile, rows);
#pragma unroll 1
      for (int c = kGroup * Config::kOwnChunks; c < (kGroup + 1) * Config::kOwnChunks; ++c) {
        grad_kv_products(shared, s, c);
        add_chunk<Config>(s, rows, p.grad_kv_rows + c * 64, lane);
      }
    }
  }

  // Settles D of the warp's 16 heads and flags the item. Both halves of the warp do the same: a
  // warp that is divided here is not sure to be whole at the barrier that follows.
  static __device__ __forceinline__ void settle(const KernelParams& p, Storage& shared,
                                                const Item& item, int index) {
    const int thread = opaque(static_cast<int>(threadIdx.x & 127));
    const int warp = thread >> 5, lane = thread & 31;
    const bool spoilt =
        settle_d<Config>(p, shared, item, warp * 16 + (lane & 15), /*stores=*/lane < 16);
    const bool any = __any_sync(kAllLanes, spoilt);
    if (lane == 0) p.needs_repair[(p.first_item + index) * 4 + warp] = any;
  }

  // Where a lane's row begins in stmatrix and ldmatrix of the grad_q rows in the key area.
  static __device__ __forceinline__ uint32_t row_in_area(const Storage& shared, int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    return shared_address(shared.keys) + (warp * 16 + (lane & 15)) * Config::kGradQRowBytes +
           (lane >> 4) * 16;
  }

  // Warpgroup 0 hands its half of sum P k of the rope channels to 1, which has their grad_q, in the
  // place where that will stand.
  static __device__ __forceinline__ void hand_over_rope(const Storage& shared, int thread,
                                                        uint32_t (&rope)[8]) {
    const uint32_t at = row_in_area(shared, thread) + Config::kRope * 128;
    if constexpr (kGroup == 0) {
      stmatrix_x4(at, rope[0], rope[1], rope[2], rope[3]);
      stmatrix_x4(at + 32, rope[4], rope[5], rope[6], rope[7]);
      named_arrive(kRopeReady, 256);
    } else {
      named_sync(kRopeReady, 256);
      ldmatrix_x4(at, rope[0], rope[1], rope[2], rope[3]);
      ldmatrix_x4(at + 32, rope[4], rope[5], rope[6], rope[7]);
      __syncwarp();  // grad_q will be written there
    }
  }

  // grad_q += shift * sum P k, whose first 512 channels are out.
  static __device__ __forceinline__ void correct(const KernelParams& p, const Storage& shared,
                                                 const Item& item, GradQ& grad_q,
                                                 uint32_t (&rope)[8]) {
    const int thread = opaque(static_cast<int>(threadIdx.x & 127));
    const int head0 = (thread >> 5) * 16 + ((thread >> 2) & 7), last = item.rows - 1;
    const float shift0 = shared.sums[head0].w, shift1 = shared.sums[head0 + 8].w;
    const __nv_bfloat16* low = out_of<Config>(p, item, min(head0, last)) + 2 * (thread & 3);
    const __nv_bfloat16* high = out_of<Config>(p, item, min(head0 + 8, last)) + 2 * (thread & 3);
    const auto shift = [&](auto& d, int channel) {
      shift_heads<Config>(d, low + channel, high + channel, shift0, shift1);
    };
    shift(grad_q.first, kChunk0 * 64);
    if constexpr (Config::kHasMiddle) shift(grad_q.middle, Config::kMiddle * 64 + kGroup * 32);
    if constexpr (!Config::kSumsRope) {
      shift(grad_q.second, (kChunk0 + 2) * 64);
    } else if constexpr (kGroup == 0) {
      hand_over_rope(shared, thread, rope);
      shift(grad_q.second, (kChunk0 + 2) * 64);
    } else {
      shift(reinterpret_cast<float(&)[32]>(grad_q.second), (kChunk0 + 2) * 64);
      float* rope_channels = grad_q.second + 32;
      shift_pairs(rope_channels + 16, rope, shift0, shift1);
      hand_over_rope(shared, thread, rope);
      shift_pairs(rope_channels, rope, shift0, shift1);
    }
  }

  template <int kCount>
  static __device__ __forceinline__ void stage(uint32_t to, const float (&d)[kCount]) {
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      const float* v = d + 8 * j;
      stmatrix_x4(to + j * 32, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                  pack_bf16(v[6], v[7]));
    }
  }

  // grad_q: registers -> BF16 rows in the key area -> global.
  static __device__ __forceinline__ void store_grad_q(const KernelParams& p, Storage& shared,
                                                      const Item& item, const GradQ& grad_q) {
    constexpr int kFirstByte = kGroup * Config::kGradQChannels * 2;
    const int thread = opaque(static_cast<int>(threadIdx.x & 127));
    const int warp = thread >> 5, lane = thread & 31;
    const uint32_t area = shared_address(shared.keys), to = row_in_area(shared, thread);
    stage(to + kChunk0 * 128, grad_q.first);
    stage(to + kChunk0 * 128 + 256, grad_q.second);
    if constexpr (Config::kHasMiddle) {
      stage(to + Config::kMiddle * 128 + kGroup * 64, grad_q.middle);
    }
    fence_async_shared();
    __syncwarp();
    const int head = warp * 16 + lane;
    if (lane < 16 && head < item.rows) {
      const int64_t vector = item.token * p.heads + item.first_head + head;
      bulk_store(reinterpret_cast<uint8_t*>(p.grad_q + vector * Config::kHeadDim) + kFirstByte,
                 area + head * Config::kGradQRowBytes + kFirstByte, Config::kGradQChannels * 2);
      bulk_commit();
      bulk_wait_read();
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void run(const KernelParams& p, Storage& shared) {
    const int lane = threadIdx.x & 31;
    uint32_t key_parity = 0, item_parity = 0;
    for (int index = blockIdx.x; index < item_count<Config>(p); index += p.ctas) {
      const Item item = next_item<Config>(p, index);
      const int thread = kGroup * 128 + (threadIdx.x & 127);
      if (item.extent == 0) {
        if constexpr (!Config::kRepair) write_empty_item<Config>(p, item, thread);
        continue;
      }
      prepare_heads(p, shared, item, opaque(thread >> 5), opaque(lane));
      barrier_arrive(&shared.heads_full);
      barrier_wait(&shared.heads_full, item_parity);
      barrier_wait(&shared.query_full, item_parity);
      fence_async_shared();
      GradQ grad_q;
      uint32_t rope[8] = {};  // sum P k, half of the rope channels, BF16 pairs
      tiles(p, shared, item, index, key_parity, grad_q, rope);
      const Item same = item_at<Config>(p, opaque(index));  // instead of held through the tiles
      if constexpr (kGroup == 1 && !Config::kRepair) settle(p, shared, same, index);
      barrier_arrive(&shared.products_done);
      barrier_wait(&shared.products_done, item_parity);
      item_parity ^= 1;
      if (lane == 0) barrier_arrive(&shared.query_empty);
      if constexpr (!Config::kRepair) {
        correct(p, shared, same, grad_q, rope);
        store_grad_q(p, shared, same, grad_q);
      }
      barrier_arrive(&shared.key_area_free);
    }
  }
};

// ------------------------------------------------------------------------------ loads

// Vectors of `kChunks` chunks; rows past `rows` are zeros. Eight lanes take 128 bytes.
template <typename Config, int kChunks>
__device__ __forceinline__ void load_vectors(const KernelParams& p, uint32_t to,
                                             const __nv_bfloat16* from, int64_t row_stride,
                                             int64_t head_stride, int rows, int row) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const bool exists = row + 16 * i < rows;
    const __nv_bfloat16* source =
        exists ? from + row_offset<Config>(p, row + 16 * i, row_stride, head_stride) : from;
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      cp_async_16(to + c * Config::kChunkBytes + i * 2048, source + c * 64, exists ? 16 : 0);
    }
  }
}

template <typename Config>
__device__ __forceinline__ void load_query(const KernelParams& p, SharedStorage<Config>& shared,
                                           const Item& item, int thread) {
  const int row = thread >> 3, piece = thread & 7;
  const uint32_t offset = chunk_offset(row, piece);  // rows row + 16 i have the same swizzle
  const int grad_out_rows = Config::kRepair ? 0 : item.rows;  // dP = 0
  load_vectors<Config, Config::kChunks>(
      p, shared_address(shared.q) + offset,
      p.q + item.token * p.q_row_stride + item.first_head * p.q_head_stride + piece * 8,
      p.q_row_stride, p.q_head_stride, item.rows, row);
  load_vectors<Config, Config::kValueChunks>(
      p, shared_address(shared.grad_out) + offset,
      p.grad_out + item.token * p.grad_out_row_stride + item.first_head * p.grad_out_head_stride +
          piece * 8,
      p.grad_out_row_stride, p.grad_out_head_stride, grad_out_rows, row);
  barrier_arrive_cp_async(&shared.query_full);
}

// Warpgroup 3.
template <typename Config>
__device__ __forceinline__ void run_loads(const KernelParams& p, SharedStorage<Config>& shared) {
  const int thread = threadIdx.x & 127;
  const int row = thread >> 3, piece = thread & 7;
  const uint32_t keys = shared_address(shared.keys) + chunk_offset(row, piece);
  const uint8_t* kv = reinterpret_cast<const uint8_t*>(p.kv) + piece * 16;
  uint32_t tile_parity = 1, item_parity = 1;  // of the phase before this tile, this item
  uint32_t* const places = Config::kPaces ? p.places : nullptr;
  for (int index = blockIdx.x; index < item_count<Config>(p); index += p.ctas) {
    const Item item = next_item<Config>(p, index);
    keep_pace(places, index, row < 4);  // the first warp tells
    if (item.extent == 0) continue;
    const int tiles = tiles_of(item);
    barrier_wait(&shared.key_area_free, item_parity);
    int next[4];  // entries of the coming tile
    read_entries<Config, 16>(p, item, index, row, next);
    for (int tile = 0; tile < tiles; ++tile) {
      int current[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) current[i] = key_or_none(p, next[i]);
      read_entries<Config, 16>(p, item, index, (tile + 1) * 64 + row, next);
#pragma unroll
      for (int n = 0; n < Config::kChunks; ++n) {
        const int c = Config::chunk_at(n);
        barrier_wait(&shared.key_empty[c], tile_parity);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = opaque(current[i]);  // four addresses held through the tile would spill
          cp_async_16(keys + c * Config::kChunkBytes + i * 2048,
                      kv + uint64_t{static_cast<uint32_t>(max(key, 0))} * p.kv_row_bytes + c * 128,
                      key >= 0 ? 16 : 0);
        }
        barrier_arrive_cp_async(&shared.key_full[c]);
      }
      tile_parity ^= 1;
      if (tile == 0) {
        barrier_wait(&shared.query_empty, item_parity);
        load_query(p, shared, item_at<Config>(p, opaque(index)), opaque(thread));
      }
    }
    item_parity ^= 1;
  }
  leave_pace(places, row < 4);
}

// ------------------------------------------------------------------------------ kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(SharedStorage<Config>& shared) {
  for (int c = 0; c < Config::kChunks; ++c) {
    barrier_init(&shared.key_full[c], 128);
    barrier_init(&shared.key_empty[c], Config::chunk_readers(c));
  }
  barrier_init(&shared.query_full, 128);
  barrier_init(&shared.query_empty, Config::kMathWarps + 4);
  barrier_init(&shared.key_area_free, Config::kMathWarps * 32);
  barrier_init(&shared.heads_full, Config::kMathWarps * 32);
  barrier_init(&shared.products_done, Config::kMathWarps * 32);
  barrier_init_fence();
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    sparse_mla_backward_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  switch (threadIdx.x >> 7) {
    case 0:
      grow_registers<Config::kMathRegisters>();
      Math<Config, 0>::run(p, shared);
      break;
    case 1:
      grow_registers<Config::kMathRegisters>();
      Math<Config, 1>::run(p, shared);
      break;
    case 2:
      shrink_registers<Config::kGradKvRegisters>();
      run_grad_kv<Config>(p, shared);
      break;
    default:
      shrink_registers<Config::kLoadRegisters>();
      run_loads(p, shared);
  }
}

}  // namespace flashdsa::attention::sm90::backward_pass
