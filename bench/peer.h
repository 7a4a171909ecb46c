#ifndef FLASHDSA_BENCH_PEER_H_
#define FLASHDSA_BENCH_PEER_H_

/* What a shared library exports so that `flashdsa bench --peer-library PATH` takes turns with it: a
 * name, and a function for each operation that it has. Plain C, so that any kernel can be wrapped
 * in a few lines without the headers or the compiler of this library. docs/benchmarks.md has an
 * example.
 *
 * All pointers are memory of the current CUDA device, contiguous, and stay valid until the stream
 * has done the work. A function queues its work on `stream`, does not wait, and returns 0, or
 * another number where it cannot do the problem; bench then leaves its columns empty. A forward
 * that refuses a number of heads that is no multiple of 64 is asked again with heads of zeros that
 * fill it up, and its time is that of padding, call and cutting the results. It may keep memory
 * between calls, but nothing that was computed from the contents of the arguments. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sparse attention of one call: SPEC sections 5 and 6. BF16 tensors, FP32 lse. */
typedef struct {
  int64_t t_q, t_k;
  int64_t heads;    /* H */
  int64_t head_dim; /* D, 576 or 512 */
  int64_t topk;     /* K */
  double softmax_scale;
  const void* q;               /* [T_q, H, D] */
  const void* kv;              /* [T_k, 1, D] */
  const int32_t* topk_indices; /* [T_q, 1, K], ascending, -1 behind the selected keys */
  const int32_t* topk_length;  /* [T_q] */
  void* out;                   /* [T_q, H, 512]; written by the forward, read by the backward */
  float* lse;                  /* [T_q, H], natural logarithm; likewise */
  const void* grad_out;        /* [T_q, H, 512]; null in the forward */
  void* grad_q;                /* [T_q, H, D]; null in the forward */
  void* grad_kv;               /* BF16 [T_k, 1, D]; null in the forward */
  void* stream;                /* cudaStream_t */
} flashdsa_peer_attention;

/* "name@version". Required. */
const char* flashdsa_peer_name(void);

int flashdsa_peer_forward(const flashdsa_peer_attention* problem);
int flashdsa_peer_backward(const flashdsa_peer_attention* problem);

#ifdef __cplusplus
}
#endif

#endif /* FLASHDSA_BENCH_PEER_H_ */
