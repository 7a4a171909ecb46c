// One wrapper per PTX instruction of Hopper that the kernels use, except the matrix products, which
// are in wgmma.cuh. Shared-memory addresses are 32-bit (`shared_address`).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include <cstdint>

namespace flashdsa::core::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ------------------------------------------------------------------------------ mbarrier
// A barrier's first phase has parity 0. Waiting for parity 1 on a fresh barrier returns at once.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the async proxy.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Arrives and announces `bytes` of bulk copies that complete on the barrier.
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives, as one of the expected arrivals, once this thread's cp.async so far have landed.
__device__ __forceinline__ void barrier_arrive_cp_async(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ------------------------------------------------------------------------------ named barriers

// Named barriers 1..15 of `threads` threads; 0 is __syncthreads. All who wait at one do so at the
// same instruction.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for threads that wait in different branches.
__device__ __forceinline__ void named_meet(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Meets like named_sync and says whether `predicate` holds for any of the threads.
__device__ __forceinline__ bool named_any(int id, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}

// ------------------------------------------------------------------------------ kernels in a row

// Waits until the kernels before this one on the stream have ended and what they wrote is visible.
// Every CTA of a kernel that was launched to overlap (launch.h) calls it.
__device__ __forceinline__ void await_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets CTAs of the next kernel start where there is room.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ------------------------------------------------------------------------------ proxies, copies

// Orders this thread's ordinary shared-memory accesses before later ones of the async proxy (wgmma,
// bulk copies). Without the state space it is many times slower.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// 16 bytes global -> shared past the first-level cache; `bytes` of 0 writes zeros and reads
// nothing.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// The same with a hint to the second-level cache.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int bytes,
                                            uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;"
               :
               : "r"(to), "l"(from), "r"(bytes), "l"(policy)
               : "memory");
}

// Hint: what is loaded will be read again, evict it last.
__device__ __forceinline__ uint64_t l2_keep_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(uint32_t to, const CUtensorMap* map, uint64_t* barrier,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// shared -> global; completes with the bulk group.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The shared memory of this thread's bulk stores may be written again.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// 16 bytes of this thread's registers -> shared.
__device__ __forceinline__ void store_shared_v4(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ------------------------------------------------------------------------------ registers

template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ------------------------------------------------------------------------------ fragments

__device__ __forceinline__ void stmatrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// The same of 8 x 8 matrices that are stored transposed.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t to, uint32_t a, uint32_t b,
                                                       uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

__device__ __forceinline__ void stmatrix_x2_transposed(uint32_t to, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(a),
               "r"(b)
               : "memory");
}

// The transpose of an 8 x 8 matrix of 16-bit numbers that lies in a warp's registers, row lane / 4,
// columns 2 (lane % 4) + {0, 1}.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t from, uint32_t& a, uint32_t& b, uint32_t& c,
                                            uint32_t& d) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from)
               : "memory");
}

// Two FP32 numbers rounded to a BF16 pair, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// ------------------------------------------------------------------------------ arithmetic

// 2^x, within 2 ulp; subnormal results are flushed.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max(0, x) that keeps NaN; fmaxf would drop it.
__device__ __forceinline__ float relu_keep_nan(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// max(x, y), NaN when one of them is; fmaxf would drop it.
__device__ __forceinline__ float max_keep_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Sums of two BF16 pairs.
__device__ __forceinline__ uint32_t add_bf16(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// ------------------------------------------------------------------------------ atomics

// Adds four FP32 numbers to global memory, aligned to 16 bytes; each number is atomic on its own.
__device__ __forceinline__ void reduce_add_v4(float* to, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// ------------------------------------------------------------------------------ bulk loads

// global -> shared, all 16-byte aligned; completes on the barrier.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// This thread's cp.async so far have landed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace flashdsa::core::cuda
