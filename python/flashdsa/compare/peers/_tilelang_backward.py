"""The backward of the peer `tilelang`: two kernels. Their annotations are part of the programs, so
this module keeps them as objects.

One thread block per query row and up to 64 heads. Queries and grad_out stay in shared memory, and
grad_q in registers. A block of 64 gathered keys gives the probabilities and their gradients, these
give its share of grad_q and, 128 channels at a time, what the row adds to grad_kv, in FP32, by
atomic adds. The next block of keys is loaded meanwhile. 224 KiB of shared memory, with 64 heads.
Slots of the last block that lie behind topk_length are masked and add zeros to key 0.
"""

import tilelang.language as T

_LOG2E = 1.4426950408889634
_BLOCK_KEYS = 64
_BLOCK_CHANNELS = 128
_DELTA_HEADS = 8
_THREADS = 256


def sparse_mla_delta(t_q: int, heads: int, value_dim: int):
    """delta float32 [t_q, heads]: out * grad_out, summed over channels."""

    @T.prim_func
    def delta_of_out(
            out: T.Tensor((t_q, heads, value_dim), "bfloat16"),
            grad_out: T.Tensor((t_q, heads, value_dim), "bfloat16"),
            delta: T.Tensor((t_q, heads), "float32"),
    ):
        with T.Kernel(T.ceildiv(heads, _DELTA_HEADS), t_q, threads=_THREADS) as (head_block, row):
            products = T.alloc_fragment((_DELTA_HEADS, value_dim), "float32")
            total = T.alloc_fragment((_DELTA_HEADS,), "float32")

            first = head_block * _DELTA_HEADS
            for h, c in T.Parallel(_DELTA_HEADS, value_dim):
                products[h, c] = (T.cast(out[row, first + h, c], "float32")
                                  * T.cast(grad_out[row, first + h, c], "float32"))
            T.reduce_sum(products, total, dim=1)
            T.copy(total, delta[row, first:first + _DELTA_HEADS])

    return delta_of_out


def sparse_mla_backward(t_q: int, t_k: int, heads: int, topk: int, head_dim: int, value_dim: int,
                        softmax_scale: float):
    """grad_q bfloat16 [t_q, heads, head_dim]. Adds to grad_kv float32 [t_k, head_dim]. lse is
    natural."""
    block_heads = min(64, -(-heads // 16) * 16)
    rope_dim = head_dim - value_dim
    scale_log2e = softmax_scale * _LOG2E

    @T.prim_func
    def sparse_mla_gradients(
            q: T.Tensor((t_q, heads, head_dim), "bfloat16"),
            kv: T.Tensor((t_k, head_dim), "bfloat16"),
            topk_indices: T.Tensor((t_q, topk), "int32"),
            topk_length: T.Tensor((t_q,), "int32"),
            grad_out: T.Tensor((t_q, heads, value_dim), "bfloat16"),
            lse: T.Tensor((t_q, heads), "float32"),
            delta: T.Tensor((t_q, heads), "float32"),
            grad_kv: T.Tensor((t_k, head_dim), "float32"),
            grad_q: T.Tensor((t_q, heads, head_dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(heads, block_heads), t_q, threads=_THREADS) as (head_block, row):
            s_q = T.alloc_shared((block_heads, value_dim), "bfloat16")
            s_q_rope = T.alloc_shared((block_heads, rope_dim), "bfloat16")
            s_grad_out = T.alloc_shared((block_heads, value_dim), "bfloat16")
            s_keys = T.alloc_shared((_BLOCK_KEYS, value_dim), "bfloat16")
            s_keys_rope = T.alloc_shared((_BLOCK_KEYS, rope_dim), "bfloat16")
            s_p = T.alloc_shared((block_heads, _BLOCK_KEYS), "bfloat16")
            s_d_s = T.alloc_shared((block_heads, _BLOCK_KEYS), "bfloat16")
            acc = T.alloc_fragment((block_heads, value_dim), "float32")
            acc_rope = T.alloc_fragment((block_heads, rope_dim), "float32")
            p = T.alloc_fragment((block_heads, _BLOCK_KEYS), "float32")
            d_s = T.alloc_fragment((block_heads, _BLOCK_KEYS), "float32")
            of_keys = T.alloc_fragment((_BLOCK_KEYS, _BLOCK_CHANNELS), "float32")
            of_keys_rope = T.alloc_fragment((_BLOCK_KEYS, rope_dim), "float32")
            row_lse = T.alloc_fragment((block_heads,), "float32")
            row_delta = T.alloc_fragment((block_heads,), "float32")

            first = head_block * block_heads
            T.copy(q[row, first:first + block_heads, 0:value_dim], s_q)
            T.copy(q[row, first:first + block_heads, value_dim:head_dim], s_q_rope)
            T.copy(grad_out[row, first:first + block_heads, 0:value_dim], s_grad_out)
            T.copy(lse[row, first:first + block_heads], row_lse)
            T.copy(delta[row, first:first + block_heads], row_delta)
            T.fill(acc, 0)
            T.fill(acc_rope, 0)

            for block in T.Pipelined(T.ceildiv(topk_length[row], _BLOCK_KEYS), num_stages=1):
                slot = block * _BLOCK_KEYS
                for i, c in T.Parallel(_BLOCK_KEYS, value_dim):
                    s_keys[i, c] = kv[T.max(topk_indices[row, slot + i], 0), c]
                for i, c in T.Parallel(_BLOCK_KEYS, rope_dim):
                    s_keys_rope[i, c] = kv[T.max(topk_indices[row, slot + i], 0), value_dim + c]
                for h, i in T.Parallel(block_heads, _BLOCK_KEYS):
                    p[h, i] = T.if_then_else(slot + i < topk_length[row], 0,
                                             -T.infinity("float32"))
                T.gemm(s_q, s_keys, p, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(s_q_rope, s_keys_rope, p, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(s_grad_out, s_keys, d_s, transpose_B=True, clear_accum=True,
                       policy=T.GemmWarpPolicy.FullCol)
                for h, i in T.Parallel(block_heads, _BLOCK_KEYS):
                    p[h, i] = T.exp2(p[h, i] * scale_log2e - row_lse[h] * _LOG2E)
                    d_s[h, i] = p[h, i] * (d_s[h, i] - row_delta[h]) * softmax_scale
                T.copy(p, s_p)
                T.copy(d_s, s_d_s)
                T.gemm(s_d_s, s_keys, acc, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(s_d_s, s_keys_rope, acc_rope, policy=T.GemmWarpPolicy.FullCol)

                for part in T.serial(value_dim // _BLOCK_CHANNELS):
                    channel = part * _BLOCK_CHANNELS
                    T.gemm(s_d_s, s_q[:, channel:channel + _BLOCK_CHANNELS], of_keys,
                           transpose_A=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                    T.gemm(s_p, s_grad_out[:, channel:channel + _BLOCK_CHANNELS], of_keys,
                           transpose_A=True, policy=T.GemmWarpPolicy.FullCol)
                    for i, c in T.Parallel(_BLOCK_KEYS, _BLOCK_CHANNELS):
                        T.atomic_add(grad_kv[T.max(topk_indices[row, slot + i], 0), channel + c],
                                     of_keys[i, c])
                T.gemm(s_d_s, s_q_rope, of_keys_rope, transpose_A=True, clear_accum=True,
                       policy=T.GemmWarpPolicy.FullCol)
                for i, c in T.Parallel(_BLOCK_KEYS, rope_dim):
                    T.atomic_add(grad_kv[T.max(topk_indices[row, slot + i], 0), value_dim + c],
                                 of_keys_rope[i, c])

            T.copy(acc, grad_q[row, first:first + block_heads, 0:value_dim])
            T.copy(acc_rope, grad_q[row, first:first + block_heads, value_dim:head_dim])

    return sparse_mla_gradients
