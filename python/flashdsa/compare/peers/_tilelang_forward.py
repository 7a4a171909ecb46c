"""The forward of the peer `tilelang`. Its annotations are part of the program, so this module keeps
them as objects.

One thread block per query row and up to 64 heads. Queries stay in shared memory; blocks of 64
gathered keys pass through two stages, and each serves the product with the queries and, by its
first channels, that with the probabilities. 224 KiB of shared memory, with 64 heads. All K slots
are walked, those behind topk_length masked: a pipeline of two stages has a number of blocks that is
known when it is compiled.
"""

import tilelang.language as T

_LOG2E = 1.4426950408889634
_BLOCK_KEYS = 64
_STAGES = 2
_THREADS = 256


def sparse_mla_forward(t_q: int, t_k: int, heads: int, topk: int, head_dim: int, value_dim: int,
                       softmax_scale: float):
    """out bfloat16 [t_q, heads, value_dim] and lse float32 [t_q, heads], natural."""
    block_heads = min(64, -(-heads // 16) * 16)
    rope_dim = head_dim - value_dim
    scale_log2e = softmax_scale * _LOG2E

    @T.prim_func
    def sparse_mla(
            q: T.Tensor((t_q, heads, head_dim), "bfloat16"),
            kv: T.Tensor((t_k, head_dim), "bfloat16"),
            topk_indices: T.Tensor((t_q, topk), "int32"),
            topk_length: T.Tensor((t_q,), "int32"),
            out: T.Tensor((t_q, heads, value_dim), "bfloat16"),
            lse: T.Tensor((t_q, heads), "float32"),
    ):
        with T.Kernel(T.ceildiv(heads, block_heads), t_q, threads=_THREADS) as (head_block, row):
            s_q = T.alloc_shared((block_heads, value_dim), "bfloat16")
            s_q_rope = T.alloc_shared((block_heads, rope_dim), "bfloat16")
            s_keys = T.alloc_shared((_BLOCK_KEYS, value_dim), "bfloat16")
            s_keys_rope = T.alloc_shared((_BLOCK_KEYS, rope_dim), "bfloat16")
            s_p = T.alloc_shared((block_heads, _BLOCK_KEYS), "bfloat16")
            acc = T.alloc_fragment((block_heads, value_dim), "float32")
            logits = T.alloc_fragment((block_heads, _BLOCK_KEYS), "float32")
            highest = T.alloc_fragment((block_heads,), "float32")
            before = T.alloc_fragment((block_heads,), "float32")
            total = T.alloc_fragment((block_heads,), "float32")
            of_block = T.alloc_fragment((block_heads,), "float32")

            first = head_block * block_heads
            T.copy(q[row, first:first + block_heads, 0:value_dim], s_q)
            T.copy(q[row, first:first + block_heads, value_dim:head_dim], s_q_rope)
            T.fill(acc, 0)
            T.fill(total, 0)
            T.fill(highest, -T.infinity("float32"))

            for block in T.Pipelined(T.ceildiv(topk, _BLOCK_KEYS), num_stages=_STAGES):
                slot = block * _BLOCK_KEYS
                for i, c in T.Parallel(_BLOCK_KEYS, value_dim):
                    s_keys[i, c] = kv[T.max(topk_indices[row, slot + i], 0), c]
                for i, c in T.Parallel(_BLOCK_KEYS, rope_dim):
                    s_keys_rope[i, c] = kv[T.max(topk_indices[row, slot + i], 0), value_dim + c]
                for h, i in T.Parallel(block_heads, _BLOCK_KEYS):
                    logits[h, i] = T.if_then_else(slot + i < topk_length[row], 0,
                                                  -T.infinity("float32"))
                T.gemm(s_q, s_keys, logits, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(s_q_rope, s_keys_rope, logits, transpose_B=True,
                       policy=T.GemmWarpPolicy.FullCol)

                T.copy(highest, before)
                T.reduce_max(logits, highest, dim=1, clear=False)
                for h, i in T.Parallel(block_heads, _BLOCK_KEYS):
                    logits[h, i] = T.exp2((logits[h, i] - highest[h]) * scale_log2e)
                T.reduce_sum(logits, of_block, dim=1)
                for h in T.Parallel(block_heads):
                    before[h] = T.exp2((before[h] - highest[h]) * scale_log2e)
                    total[h] = total[h] * before[h] + of_block[h]
                for h, c in T.Parallel(block_heads, value_dim):
                    acc[h, c] *= before[h]
                T.copy(logits, s_p)
                T.gemm(s_p, s_keys, acc, policy=T.GemmWarpPolicy.FullCol)

            for h, c in T.Parallel(block_heads, value_dim):
                acc[h, c] /= total[h]
            for h in T.Parallel(block_heads):
                total[h] = (T.log2(total[h]) + highest[h] * scale_log2e) / _LOG2E
            T.copy(acc, out[row, first:first + block_heads, 0:value_dim])
            T.copy(total, lse[row, first:first + block_heads])

    return sparse_mla
