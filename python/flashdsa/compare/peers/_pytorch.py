"""Plain PyTorch: gathered keys, batched products, softmax, torch.topk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..library import Forward, Gradients, Library
from ..shapes import VALUE_DIM
from ..workloads import Problem, Selection

_ROWS = 64  # of one product: 151 MB of gathered keys at K = 2048
_SCORES = 2**28  # of all heads together, likewise


class PyTorch(Library):
    """BF16 operands and FP32 sums; on the host FP32 throughout, where products of BF16 would round
    their results."""

    name = "torch"
    operations = ("topk", "forward", "backward", "step")

    def load(self) -> str:
        return torch.__version__

    def topk(self, problem: Problem, metadata: Any) -> Selection:
        width = problem.shape.topk
        indices = torch.full((problem.t_q, width), problem.t_k, dtype=torch.int64,
                             device=problem.device)
        ends = problem.starts + problem.visible
        for rows in _slices(problem.t_q, max(1, _SCORES // (problem.shape.index_heads
                                                            * problem.t_k))):
            first, end = int(problem.starts[rows][0]), int(ends[rows].max())
            scores = _scores(problem, rows, first, end)
            column = torch.arange(first, end, device=problem.device)
            last = (metadata.starts + metadata.causal_lengths)[rows, None]
            unseen = (column < metadata.starts[rows, None]) | (column >= last)
            scores.masked_fill_(unseen, -torch.inf)
            best = scores.topk(min(width, end - first), sorted=False)
            chosen = (best.indices + first).where(best.values > -torch.inf, problem.t_k)
            indices[rows, :chosen.shape[1]] = chosen
        ascending = indices.sort(1).values
        lengths = (ascending < problem.t_k).sum(1, dtype=torch.int32)
        filled = ascending.where(ascending < problem.t_k, -1).int()
        return Selection(filled[:, None], lengths)

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        out = problem.q.new_empty(*problem.q.shape[:2], VALUE_DIM)
        lse = problem.q.new_empty(problem.q.shape[:2], dtype=torch.float32)
        for rows in _slices(problem.t_q, _ROWS):
            keys, logits = _logits(problem, selection, rows)
            lse[rows] = logits.logsumexp(2)
            p = logits.softmax(2).to(out.dtype)
            out[rows] = torch.bmm(p, keys[..., :VALUE_DIM])
        return Forward(out, lse)

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        scale, dtype = problem.shape.softmax_scale, problem.q.dtype
        grad_q = torch.empty_like(problem.q)
        grad_kv = torch.zeros(problem.kv.shape[::2], device=problem.device)
        for rows in _slices(problem.t_q, _ROWS):
            keys, logits = _logits(problem, selection, rows)
            grad_out = problem.grad_out[rows]
            p = torch.exp(logits - forward.lse[rows, :, None])
            d_p = _product(grad_out, keys[..., :VALUE_DIM].mT)
            d = (grad_out.float() * forward.out[rows].float()).sum(2, keepdim=True)
            d_s = (p * (d_p - d) * scale).to(dtype)
            grad_q[rows] = torch.bmm(d_s, keys)
            slots = _product(d_s.mT, problem.q[rows])
            slots[..., :VALUE_DIM] += _product(p.to(dtype).mT, grad_out)
            picks = selection.topk_indices[rows, 0].clamp_min(0).flatten()
            grad_kv.index_add_(0, picks, slots.flatten(0, 1))
        return Gradients(grad_q, grad_kv.to(dtype)[:, None])


def _slices(rows: int, step: int) -> Iterator[slice]:
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched, of BF16 numbers, in FP32."""
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _scores(problem: Problem, rows: slice, first: int, end: int) -> Tensor:
    """float32 [rows, end - first]"""
    q, weights = problem.index_q[rows], problem.head_weights[rows].float()
    dots = _product(q.flatten(0, 1)[None], problem.index_k[first:end].mT[None])[0].relu_()
    return torch.bmm(weights[:, None], dots.view(*q.shape[:2], -1))[:, 0]


def _logits(problem: Problem, selection: Selection, rows: slice) -> tuple[Tensor, Tensor]:
    """Keys of the slots [rows, K, D], and scaled logits [rows, H, K], -inf in empty slots."""
    picks = selection.topk_indices[rows, 0]
    keys = problem.kv[picks.clamp_min(0), 0]
    logits = _product(problem.q[rows], keys.mT) * problem.shape.softmax_scale
    return keys, logits.masked_fill_((picks < 0)[:, None], -torch.inf)
