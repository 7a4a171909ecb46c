"""One rank that holds the rows of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import flashdsa
import torch
from torch import Tensor


class Gathered(NamedTuple):
    x: Tensor

    def wait(self) -> Tensor:
        return self.x.detach()


class OneRank:
    """In the place of flashdsa.torch.context_parallel.ContextParallel with zigzag shards: the
    methods that the model calls, without an exchange.

    A key's gradient is a sum over queries. Here it is taken shard by shard, as the ranks would take
    it that hold one shard each, so that every rounding is the same.
    """

    def __init__(self, total_tokens: int, shards: int):
        """total_tokens is a multiple of 2 * shards."""
        self.total_tokens = total_tokens
        chunks = torch.arange(total_tokens).chunk(2 * shards)
        self.parts = [torch.cat((chunks[shard], chunks[-1 - shard])) for shard in range(shards)]

    def prepare_packed_metadata(self, cu_seqlens: Tensor) -> flashdsa.PackedMetadata:
        return flashdsa.prepare_packed_metadata(cu_seqlens, self.total_tokens)

    def shard(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def start_gather(self, x: Tensor) -> Gathered:
        return Gathered(x)

    def sparse_attention(self, q: Tensor, kv: Gathered, topk_indices: Tensor, softmax_scale: float,
                         topk_length: Tensor, **options: Any) -> Tensor:
        return _Attention.apply(q, kv.x, topk_indices, softmax_scale, topk_length, self.parts,
                                options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
                topk_length: Tensor, parts: list[Tensor], options: dict[str, Any]) -> Tensor:
        out, lse, _ = flashdsa.attention_forward(q, kv, topk_indices, softmax_scale, topk_length,
                                                 **options)
        ctx.save_for_backward(q, kv, topk_indices, topk_length, out, lse)
        ctx.softmax_scale, ctx.parts, ctx.options = softmax_scale, parts, options
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        q, kv, topk_indices, topk_length, out, lse = ctx.saved_tensors
        grad_q, grad_kv = torch.empty_like(q), torch.zeros_like(kv, dtype=torch.float32)
        for part in ctx.parts:
            grads = flashdsa.attention_backward(
                q[part], kv, topk_indices[part], ctx.softmax_scale, out[part], lse[part],
                grad_out[part], topk_length[part], grad_kv_float32=True, **ctx.options)
            grad_q[part] = grads.grad_q
            grad_kv += grads.grad_kv
        return grad_q, grad_kv.to(kv.dtype), None, None, None, None, None
