// Gradients of the selected scores on Hopper, one query row at a time.
//
//   dot[j,h] = q[t,h,:] . k[i_j,:],  dS[j,h] = g[t,j] w[t,h] 1[dot > 0]
//   grad_w[t,h] = sum_j g max(0, dot),  grad_q[t,h,:] = sum_j dS k[i_j,:]
//   grad_k[i_j,:] += sum_h dS q[t,h,:]
//
// Inputs and outputs: KernelParams in config.h. Slots that hold no key are zero rows with dot = 0
// and are never added; heads past H_index are zero rows. The default kernel adds rows of grad_k
// with vector atomics; the ordered one stores every slot's row for core/cuda/ordered_sum.h.
//
// Two numbers, of a row of 2048 keys and 32 heads: 50 MFLOP, and 1 MB of FP32 adds. Those go
// through the second-level cache, and bound the kernel; the tensor cores are idle three quarters
// of the time.
//
// Grid: one CTA per SM. Each walker takes rows number, + all walkers of the grid, ...
// Tile: 64 keys x all heads.
// Warpgroups                                              registers, up to 32 heads / more
//   0     loads: warp i gathers for walker i                                    56 /  56
//   1..   walkers: all products and adds of their rows                   3 x 152 / 2 x 224
//
// Products of a tile: dot [key][head] = k q^T; grad_k^T [channel][key] = q^T dS^T, which gives
// eight lanes 128 contiguous bytes to add, see channels.cuh; grad_q^T [channel][head] += k^T dS. dS
// goes through shared memory as [head][key], the operand of both.
//
// Shared memory of a walker, bytes (16 / 32 / 64 heads): q 2 stages x 4096 / 8192 / 16384, keys
// 3 x 16384, dS 2 x 2048 / 4096 / 8192 (at last grad_q on its way out), slots 1536, sums of grad_w
// 256 / 512 / 1024, barriers and extents 104; rounded up to 1024: 64512 / 76800 / 101376.
//
// Barriers of a walker (W) and its loading warp (L)
//   key_full[s]     32 lanes + their cp.async   W waits, parity 0   the tile, its slots are there
//   key_empty[s]    128 threads of W            L waits, parity 1   products and adds are done
//   query_full[s]   32 lanes + their cp.async   W waits, parity 0   q and the extent are there
//   query_empty[s]  128 threads of W            L waits, parity 1   the row is done
//   row_end         128 threads of W            W waits, parity 0   three times a row: nobody reads
//                                                                   dS; grad_q and grad_w are
//                                                                   there; they are read
// Named barrier 1 + walker: dS of the tile is in shared memory. There are two dS, so that a warp
// that is ahead leaves that alone which others still multiply.
//
// Rounded to BF16: dS, grad_q. All else is FP32. The order of the sums of grad_q and grad_w depends
// on the row alone.
#pragma once

#include "core/cuda/ptx.cuh"
#include "core/cuda/warp_rows.cuh"
#include "core/cuda/wgmma.cuh"
#include "indexer/sm90/backward/config.h"

namespace flashdsa::indexer::sm90::backward_pass {

using namespace core::cuda;

inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;

// ------------------------------------------------------------------------------ small things

// The same number, of which the compiler knows nothing: what is computed from it is computed again
// instead of held in registers, and is no part of a uniform address, see load_piece.
__device__ __forceinline__ uint32_t opaque(uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

// Operand whose rows are M or N, their channels K; 16 of K are 32 bytes.
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) {
  return wgmma_descriptor(address, 1024, 1024);
}
// Operand whose rows are K, their 64 columns M or N; 16 of K are 2048 bytes.
__device__ __forceinline__ uint64_t columns_operand(uint32_t address) {
  return wgmma_descriptor(address, 1024, 1024);
}

// A ring's place and the parity that the next wait for it uses.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity;

  __device__ __forceinline__ explicit Ring(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ------------------------------------------------------------------------------ loads

// 16 bytes global -> shared, zeros if there is nothing to read. `from` need not be aligned.
__device__ __forceinline__ void load_piece(uint32_t to, const __nv_bfloat16* from, bool exists,
                                           bool aligned) {
  if (aligned) {
    cp_async_16(to, from, exists ? 16 : 0);
    return;
  }
  uint32_t words[4] = {};
  if (exists) {
    const auto* numbers = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = __ldg(numbers + 2 * i) | static_cast<uint32_t>(__ldg(numbers + 2 * i + 1)) << 16;
    }
  }
  store_shared_v4(to, words[0], words[1], words[2], words[3]);
}

// The warp's plain stores and cp.async so far are what `full` waits for.
__device__ __forceinline__ void arrive_loaded(uint64_t* full) {
  barrier_arrive(full);
  barrier_arrive_cp_async(full);
}

// A lane's two slots of a tile.
struct Slots {
  int key[2];  // -1 for none
  float grad_score[2];
};

// Where the slots of a row stand, and how many there are to look at.
struct SlotRow {
  const int32_t* keys;
  const float* grad_scores;
  int extent;

  __device__ __forceinline__ Slots read(int first, int t_k) const {
    Slots slots;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = first + 32 * i;
      const int key = slot < extent ? __ldg(keys + slot) : -1;
      const bool counts = static_cast<unsigned>(key) < static_cast<unsigned>(t_k);
      slots.key[i] = counts ? key : -1;
      slots.grad_score[i] = counts ? __ldg(grad_scores + slot) : 0.0f;
    }
    return slots;
  }
};

__device__ __forceinline__ SlotRow slot_row(const KernelParams& p, int64_t t) {
  int length = p.topk;
  if (p.topk_length != nullptr) length = min(max(__ldg(p.topk_length + t), 0), p.topk);
  const int32_t* keys = p.topk_indices + t * p.topk_indices_row_stride;
  return {keys, p.grad_scores + t * p.grad_scores_row_stride, row_extent(keys, length, p.t_k)};
}

__device__ __forceinline__ float head_weight(const KernelParams& p, int64_t t, int head) {
  if (head >= p.heads) return 0.0f;
  const int64_t at = t * p.head_weights_row_stride + head;
  return p.weights_are_bf16
             ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.head_weights)[at])
             : static_cast<const float*>(p.head_weights)[at];
}

// Half a warp takes the 256 bytes of a row.
template <typename Config>
__device__ __forceinline__ void load_queries(const KernelParams& p, uint32_t to, int64_t t,
                                             int lane) {
  const int piece = lane & 15;
  const __nv_bfloat16* from = p.index_q + t * p.index_q_row_stride + piece * 8;
  to += (piece >> 3) * Config::kQueryChunkBytes;
#pragma unroll 1
  for (int head = lane >> 4; head < Config::kHeads; head += 2) {
    const bool exists = head < p.heads;
    load_piece(opaque(to + head * 128 + (((piece ^ head) & 7) << 4)),
               exists ? from + head * p.index_q_head_stride : from, exists, p.q_aligned);
  }
}

template <typename Config>
__device__ __forceinline__ void load_keys(const KernelParams& p, uint32_t to, const Slots& slots,
                                          int lane) {
  const int piece = lane & 15;
  const __nv_bfloat16* from = p.index_k + piece * 8;
  to += (piece >> 3) * Config::kKeyChunkBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const int row = 2 * i + (lane >> 4);
      const int key = __shfl_sync(kAllLanes, slots.key[half], row);
      load_piece(opaque(to + half * 4096 + row * 128 + (((piece ^ row) & 7) << 4)),
                 from + max(key, 0) * p.index_k_row_stride, key >= 0, p.k_aligned);
    }
  }
}

// The loading warp of one walker.
template <typename Config>
__device__ __forceinline__ void run_loads(const KernelParams& p, Lane<Config>& shared, int walker) {
  const int lane = threadIdx.x & 31;
  Ring<Config::kKeyStages> keys(1);
  Ring<Config::kQueryStages> queries(1);
  for (int row = walker; row < p.rows; row += p.walkers) {
    const int64_t t = p.first_row + row;
    const SlotRow slots = slot_row(p, t);
    Slots next = slots.read(lane, p.t_k);
    barrier_wait(&shared.query_empty[queries.stage], queries.parity);
    if (lane == 0) shared.extents[queries.stage] = slots.extent;
    if (slots.extent > 0) {
      load_queries<Config>(p, shared_address(shared.q[queries.stage]), t, lane);
      for (int head = lane; head < Config::kHeads; head += 32) {
        shared.weights[queries.stage][head] = head_weight(p, t, head);
      }
    }
    arrive_loaded(&shared.query_full[queries.stage]);
    queries.advance();
#pragma unroll 1
    for (int first = 0; first < slots.extent; first += Config::kKeys) {
      const Slots current = next;
      next = slots.read(first + Config::kKeys + lane, p.t_k);
      barrier_wait(&shared.key_empty[keys.stage], keys.parity);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shared.rows[keys.stage][lane + 32 * i] = current.key[i];
        shared.grad_scores[keys.stage][lane + 32 * i] = current.grad_score[i];
      }
      load_keys<Config>(p, shared_address(shared.keys[keys.stage]), current, lane);
      arrive_loaded(&shared.key_full[keys.stage]);
      keys.advance();
    }
  }
}

// ------------------------------------------------------------------------------ a walker

template <typename Config>
class Walker {
 public:
  __device__ __forceinline__ Walker(const KernelParams& p, Lane<Config>& shared)
      : p_(p), shared_(shared) {}

  __device__ __forceinline__ void run(int walker) {
    for (int row = walker; row < p_.rows; row += p_.walkers) {
      const int64_t t = p_.first_row + row;
      barrier_wait(&shared_.query_full[queries_.stage], queries_.parity);
      const int extent = shared_.extents[queries_.stage];
      Sums sums;
      if (extent > 0) {
        add_tiles(row, extent, sums);
      } else {
        clear(sums);
      }
      barrier_arrive(&shared_.query_empty[queries_.stage]);
      queries_.advance();
      store(t, sums);
    }
  }

 private:
  static constexpr int kHeadPairs = Config::kHeads / 8;  // of this lane, heads 8 i + 2 q + {0, 1}

  // Of the row so far.
  struct Sums {
    float grad_q[2][Config::kHeads / 2];  // channels 16 warp + ... of both chunks, all heads
    float2 grad_weights[kHeadPairs];      // over keys g and g + 8 of the warp's 16
  };

  // Opaque, so that no address made of them is held through a row.
  static __device__ __forceinline__ int thread() { return opaque(threadIdx.x) & 127; }
  static __device__ __forceinline__ int warp() { return thread() >> 5; }
  static __device__ __forceinline__ int lane() { return opaque(threadIdx.x) & 31; }

  static __device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < Config::kHeads / 2; ++i) sums.grad_q[0][i] = sums.grad_q[1][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeadPairs; ++i) sums.grad_weights[i] = make_float2(0.0f, 0.0f);
  }

  __device__ __forceinline__ void meet() {
    barrier_arrive(&shared_.row_end);
    barrier_wait(&shared_.row_end, row_end_parity_);
    row_end_parity_ ^= 1;
  }

  __device__ __forceinline__ void add_tiles(int row, int extent, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kHeadPairs; ++i) sums.grad_weights[i] = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int first = 0; first < extent; first += Config::kKeys) {
      barrier_wait(&shared_.key_full[keys_.stage], keys_.parity);
      fence_async_shared();  // cp.async wrote, wgmma reads
      const uint32_t q = opaque(shared_address(shared_.q[queries_.stage]));
      const uint32_t keys = shared_address(shared_.keys[keys_.stage]);
      const uint32_t ds = shared_address(shared_.ds[first / Config::kKeys & 1]);
      score(q, keys, ds, sums);
      fence_async_shared();
      named_sync(1 + (threadIdx.x >> 7), 128);
      float grad_k[2][32];
      multiply(q, keys, ds, first != 0, grad_k, sums);
      add_rows(grad_k, row, first);
      barrier_arrive(&shared_.key_empty[keys_.stage]);
      keys_.advance();
    }
  }

  // dot, then dS to shared memory and the sums of grad_w.
  __device__ __forceinline__ void score(uint32_t q, uint32_t keys, uint32_t ds, Sums& sums) {
    float dot[Config::kHeads / 2];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      Wgmma<Config::kHeads>::template shared<0, 0>(
          dot, rows_operand(keys + k / 4 * Config::kKeyChunkBytes + k % 4 * 32),
          rows_operand(q + k / 4 * Config::kQueryChunkBytes + k % 4 * 32), k != 0);
    }
    wgmma_commit();
    const int slot = warp() * 16 + (lane() >> 2);
    const int rows[2] = {shared_.rows[keys_.stage][slot], shared_.rows[keys_.stage][slot + 8]};
    const float g[2] = {shared_.grad_scores[keys_.stage][slot],
                        shared_.grad_scores[keys_.stage][slot + 8]};
    wgmma_wait<0>();
    wgmma_pin(dot);
    uint32_t packed[2 * kHeadPairs];  // [head pair][key g, g + 8]
    const float* weights = shared_.weights[queries_.stage] + 2 * (lane() & 3);
#pragma unroll
    for (int i = 0; i < kHeadPairs; ++i) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A zero row times an infinite query is NaN.
        const float x = rows[half] >= 0 ? dot[4 * i + 2 * half] : 0.0f;
        const float y = rows[half] >= 0 ? dot[4 * i + 2 * half + 1] : 0.0f;
        sums.grad_weights[i].x = fmaf(g[half], relu_keep_nan(x), sums.grad_weights[i].x);
        sums.grad_weights[i].y = fmaf(g[half], relu_keep_nan(y), sums.grad_weights[i].y);
        packed[2 * i + half] =
            pack_bf16(x > 0.0f ? g[half] * weight.x : 0.0f, y > 0.0f ? g[half] * weight.y : 0.0f);
      }
    }
    // Matrix m of four: heads + 8 (m / 2), keys + 8 (m % 2); this lane says where row lane % 8 of
    // matrix lane / 8 goes.
    const int row = lane() & 7, matrix = lane() >> 3;
    const uint32_t to =
        ds + (row + (matrix >> 1) * 8) * 128 + (((2 * warp() + (matrix & 1)) ^ row) << 4);
#pragma unroll
    for (int i = 0; i < kHeadPairs / 2; ++i) {
      stmatrix_x4_transposed(to + i * 2048, packed[4 * i], packed[4 * i + 1], packed[4 * i + 2],
                             packed[4 * i + 3]);
    }
  }

  // grad_k^T of the tile; grad_q^T goes on.
  __device__ __forceinline__ void multiply(uint32_t q, uint32_t keys, uint32_t ds, bool accumulate,
                                           float (&grad_k)[2][32], Sums& sums) {
    wgmma_pin(sums.grad_q[0]);
    wgmma_pin(sums.grad_q[1]);
    wgmma_fence();
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (int k = 0; k < Config::kHeads / 16; ++k) {
        Wgmma<64>::template shared<1, 1>(
            grad_k[chunk], columns_operand(q + chunk * Config::kQueryChunkBytes + k * 2048),
            columns_operand(ds + k * 2048), k != 0);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<Config::kHeads>::template shared<1, 0>(
            sums.grad_q[chunk], columns_operand(keys + chunk * Config::kKeyChunkBytes + k * 2048),
            rows_operand(ds + k * 32), accumulate || k != 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(grad_k[0]);
    wgmma_pin(grad_k[1]);
    wgmma_pin(sums.grad_q[0]);
    wgmma_pin(sums.grad_q[1]);
  }

  // Lane 4 g + q has channels 16 warp + g + ... of keys 8 j + 2 q + {0, 1}.
  __device__ __forceinline__ void add_rows(const float (&grad_k)[2][32], int row, int first) {
    const int slot = 2 * (lane() & 3);
    float* to = p_.grad_k_rows + warp() * 32 + (lane() >> 2) * 4;
    if constexpr (Config::kOrdered) to += (int64_t{row} * p_.topk + first + slot) * Config::kDim;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int2 keys = *reinterpret_cast<const int2*>(&shared_.rows[keys_.stage][8 * j + slot]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = i == 0 ? keys.x : keys.y;
        if (key < 0) continue;
        const float4 value = make_float4(grad_k[0][4 * j + i], grad_k[0][4 * j + 2 + i],
                                         grad_k[1][4 * j + i], grad_k[1][4 * j + 2 + i]);
        if constexpr (Config::kOrdered) {
          *reinterpret_cast<float4*>(to + (8 * j + i) * Config::kDim) = value;
        } else {
          reduce_add_v4(to + int64_t{key} * Config::kDim, value.x, value.y, value.z, value.w);
        }
      }
    }
  }

  // Sums of the row to global memory.
  __device__ __forceinline__ void store(int64_t t, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kHeadPairs; ++i) {
      float2 sum = sums.grad_weights[i];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) {
        sum.x += __shfl_xor_sync(kAllLanes, sum.x, other);
        sum.y += __shfl_xor_sync(kAllLanes, sum.y, other);
      }
      if (lane() < 4) {
        *reinterpret_cast<float2*>(&shared_.grad_weights[warp()][8 * i + 2 * lane()]) = sum;
      }
    }
    meet();
    stage_grad_q(sums);
    meet();
    if (thread() < p_.heads) store_grad_weight(t, thread());
    store_grad_q(t);
    meet();
  }

  // Piece `octet` of head `head` of grad_q on its way out; heads are 256 bytes.
  static __device__ __forceinline__ uint32_t staged(uint32_t area, int head, int octet) {
    return area + head * 256 + ((octet ^ (head & 7)) << 4);
  }

  __device__ __forceinline__ void stage_grad_q(const Sums& sums) {
    const uint32_t area = shared_address(shared_.ds);
    const int row = lane() & 7, matrix = lane() >> 3;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const uint32_t to =
          staged(area, row + (matrix >> 1) * 8, 8 * chunk + 2 * warp() + (matrix & 1));
#pragma unroll
      for (int i = 0; i < kHeadPairs / 2; ++i) {
        const float* d = sums.grad_q[chunk] + 8 * i;
        stmatrix_x4_transposed(to + i * 4096, pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]),
                               pack_bf16(d[4], d[5]), pack_bf16(d[6], d[7]));
      }
    }
  }

  __device__ __forceinline__ void store_grad_q(int64_t t) {
    const int octet = thread() & 15;
    const auto* area = reinterpret_cast<const uint8_t*>(shared_.ds);
#pragma unroll 1
    for (int head = thread() >> 4; head < p_.heads; head += 8) {
      const uint4 piece =
          *reinterpret_cast<const uint4*>(area + head * 256 + ((octet ^ (head & 7)) << 4));
      __nv_bfloat16* to = p_.grad_index_q + (t * p_.heads + head) * Config::kDim + octet * 8;
      if (p_.grad_q_aligned) {
        *reinterpret_cast<uint4*>(to) = piece;
      } else {
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          to[i] = __ushort_as_bfloat16(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2)));
        }
      }
    }
  }

  __device__ __forceinline__ void store_grad_weight(int64_t t, int head) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += shared_.grad_weights[i][head];
    const int64_t at = t * p_.heads + head;
    if (p_.weights_are_bf16) {
      static_cast<__nv_bfloat16*>(p_.grad_head_weights)[at] = __float2bfloat16(sum);
    } else {
      static_cast<float*>(p_.grad_head_weights)[at] = sum;
    }
  }

  const KernelParams& p_;
  Lane<Config>& shared_;
  Ring<Config::kKeyStages> keys_{0};
  Ring<Config::kQueryStages> queries_{0};
  uint32_t row_end_parity_ = 0;
};

// ------------------------------------------------------------------------------ kernel

template <typename Config>
__device__ __forceinline__ void init_barriers(Lane<Config>& shared) {
  for (int i = 0; i < Config::kKeyStages; ++i) {
    barrier_init(&shared.key_full[i], 64);
    barrier_init(&shared.key_empty[i], 128);
  }
  for (int i = 0; i < Config::kQueryStages; ++i) {
    barrier_init(&shared.query_full[i], 64);
    barrier_init(&shared.query_empty[i], 128);
  }
  barrier_init(&shared.row_end, 128);
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    indexer_backward_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) uint8_t bytes[];
  auto& shared = *reinterpret_cast<SharedStorage<Config>*>(bytes);
  if (threadIdx.x < Config::kWalkers) init_barriers(shared.lanes[threadIdx.x]);
  barrier_init_fence();
  __syncthreads();
  const int warpgroup = static_cast<int>(threadIdx.x >> 7);
  if (warpgroup == 0) {
    shrink_registers<Config::kLoadRegisters>();
    const int walker = static_cast<int>(threadIdx.x >> 5);
    if (walker < Config::kWalkers) {
      run_loads(p, shared.lanes[walker], walker * static_cast<int>(gridDim.x) + blockIdx.x);
    }
  } else {
    grow_registers<Config::kWalkerRegisters>();
    const int walker = warpgroup - 1;
    Walker<Config>(p, shared.lanes[walker]).run(walker * static_cast<int>(gridDim.x) + blockIdx.x);
  }
}

}  // namespace flashdsa::indexer::sm90::backward_pass
