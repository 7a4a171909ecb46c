"""Small problems with random inputs, as NumPy arrays."""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16


def bf16(rng, *shape):
    return rng.standard_normal(shape).astype(BF16)


def ones(*shape):
    return np.ones(shape, BF16)


def attention(rows=20, keys=24, heads=4, dim=576, width=8, seed=0):
    """Arguments of attention_forward by name: holes, lengths and a sink included."""
    rng = np.random.default_rng(seed)
    return {
        "q": bf16(rng, rows, heads, dim),
        "kv": bf16(rng, keys, 1, dim),
        "topk_indices": rng.integers(-1, keys, (rows, 1, width)).astype(np.int32),
        "softmax_scale": 0.05,
        "topk_length": rng.integers(0, width + 1, rows).astype(np.int32),
        "attn_sink": rng.standard_normal(heads).astype(np.float32),
    }


def indexer(rows=40, heads=4, seed=0):
    """index_q, index_k, head_weights of one document."""
    rng = np.random.default_rng(seed)
    return (bf16(rng, rows, heads, 128), bf16(rng, rows, 128),
            rng.standard_normal((rows, heads)).astype(np.float32))


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
