#!/usr/bin/env python3
"""Times sparse attention and the indexer in plain NumPy FP32, beside `flashdsa bench`.

    numpy_baseline.py [--t-q 256] [--t-k 4096] [--heads 64] [--topk 2048] [--index-t-k 65536] [--jsonl FILE]

The shapes and FLOP counts are those of `flashdsa bench`; the matrix products are NumPy's BLAS on all
cores. Inputs are BF16 numbers held as FP32, as a person without a kernel would hold them.
"""
import argparse
import json
import time

import numpy as np

VALUE_DIM, INDEX_DIM = 512, 128


def normal_bf16(rng, *shape):
    """Normal numbers rounded towards zero to BF16, as FP32."""
    values = rng.standard_normal(shape, dtype=np.float32) / 16
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def row_softmax(q, keys, scale):
    logits = scale * (q @ keys.T)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def forward(q, kv, indices, scale):
    out = np.empty((*q.shape[:2], VALUE_DIM), np.float32)
    for t, picks in enumerate(indices):
        keys = kv[picks]
        out[t] = row_softmax(q[t], keys, scale) @ keys[:, :VALUE_DIM]
    return out


def backward(q, kv, indices, scale, grad_out):
    """grad_q and grad_kv; the rows' probabilities are made again."""
    grad_q, grad_kv = np.empty_like(q), np.zeros_like(kv)
    for t, picks in enumerate(indices):
        keys, g = kv[picks], grad_out[t]
        p = row_softmax(q[t], keys, scale)
        d_p = g @ keys[:, :VALUE_DIM].T
        d_s = p * (d_p - (p * d_p).sum(axis=1, keepdims=True)) * scale
        grad_q[t] = d_s @ keys
        slots = d_s.T @ q[t]
        slots[:, :VALUE_DIM] += p.T @ g
        grad_kv[picks] += slots                      # the picks of a row are distinct
    return grad_q, grad_kv


def topk(index_q, index_k, weights, visible, width):
    rows = np.empty((len(visible), width), np.int64)
    for t, count in enumerate(visible):
        scores = weights[t] @ np.maximum(index_q[t] @ index_k[:count].T, 0)
        rows[t] = np.sort(np.argpartition(scores, count - width)[count - width:])
    return rows


def median_seconds(function, samples):
    seconds = []
    for _ in range(samples):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--t-q", type=int, default=256)
    parser.add_argument("--t-k", type=int, default=4096)
    parser.add_argument("--index-t-k", type=int, default=65536, help="T_k of the indexer")
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--index-heads", type=int, default=32)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=576)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--jsonl", help="append one JSON object a row")
    args = parser.parse_args()
    rng = np.random.default_rng(1)

    q = normal_bf16(rng, args.t_q, args.heads, args.head_dim)
    kv = normal_bf16(rng, args.t_k, args.head_dim)
    grad_out = normal_bf16(rng, args.t_q, args.heads, VALUE_DIM)
    indices = [np.sort(rng.permutation(args.t_k)[:args.topk]) for _ in range(args.t_q)]
    picks = args.t_q * args.topk
    index_q = normal_bf16(rng, args.t_q, args.index_heads, INDEX_DIM)
    index_k = normal_bf16(rng, args.index_t_k, INDEX_DIM)
    weights = normal_bf16(rng, args.t_q, args.index_heads)
    visible = args.index_t_k - args.t_q + 1 + np.arange(args.t_q)

    operations = {
        "forward": (lambda: forward(q, kv, indices, 1 / 16),
                    2 * args.heads * picks * (args.head_dim + VALUE_DIM), args.t_k),
        "backward": (lambda: backward(q, kv, indices, 1 / 16, grad_out),
                     2 * args.heads * picks * (3 * args.head_dim + 2 * VALUE_DIM), args.t_k),
        "topk": (lambda: topk(index_q, index_k, weights, visible, args.topk),
                 2 * args.index_heads * INDEX_DIM * int(visible.sum()), args.index_t_k),
    }
    for name, (function, flop, t_k) in operations.items():
        seconds = median_seconds(function, args.samples)
        record = {"op": name, "backend": f"numpy-{np.__version__}", "heads": args.heads,
                  "index_heads": args.index_heads, "t_q": args.t_q, "t_k": t_k,
                  "topk": args.topk, "head_dim": args.head_dim, "samples": args.samples,
                  "median_ms": seconds * 1e3, "tflops": flop / seconds * 1e-12}
        print(f"{name:<9} {seconds * 1e3:9.1f} ms  {flop / seconds * 1e-9:7.1f} GFLOP/s")
        if args.jsonl:
            with open(args.jsonl, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
