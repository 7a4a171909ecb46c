"""A sparse MLA forward and backward in TileLang, written for this benchmark.
https://github.com/tile-ai/tilelang"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..library import Forward, Gradients, Library, load_name
from ..shapes import VALUE_DIM, Shape
from ..workloads import Problem, Selection


class TileLang(Library):
    """The kernels are compiled on the first call, before anything is timed."""

    name = "tilelang"
    operations = ("forward", "backward")

    def load(self) -> str:
        _, version = load_name("tilelang", "compile", "tilelang")
        return version

    def refusal(self, operation: str, problem: Problem) -> str:
        return "" if problem.device.type == "cuda" else "needs a GPU"

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        kernel = _compiled_forward(problem.t_q, problem.t_k, problem.shape)
        out, lse = kernel(problem.q, problem.kv[:, 0], selection.topk_indices[:, 0],
                          selection.topk_length)
        return Forward(out, lse)

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        delta_kernel, kernel = _compiled_backward(problem.t_q, problem.t_k, problem.shape)
        kv = problem.kv[:, 0]
        delta = delta_kernel(forward.out, problem.grad_out)
        grad_kv = torch.zeros_like(kv, dtype=torch.float32)
        grad_q = kernel(problem.q, kv, selection.topk_indices[:, 0], selection.topk_length,
                        problem.grad_out, forward.lse, delta, grad_kv)
        return Gradients(grad_q, grad_kv.to(kv.dtype)[:, None])


@functools.lru_cache(maxsize=None)
def _compiled_forward(t_q: int, t_k: int, shape: Shape) -> Callable[..., tuple[Tensor, Tensor]]:
    import tilelang

    from ._tilelang_forward import sparse_mla_forward

    program = sparse_mla_forward(t_q, t_k, shape.heads, shape.topk, shape.head_dim, VALUE_DIM,
                                 shape.softmax_scale)
    return tilelang.compile(program, out_idx=[4, 5])


@functools.lru_cache(maxsize=None)
def _compiled_backward(t_q: int, t_k: int, shape: Shape
                       ) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    import tilelang

    from ._tilelang_backward import sparse_mla_backward, sparse_mla_delta

    delta = sparse_mla_delta(t_q, shape.heads, VALUE_DIM)
    gradients = sparse_mla_backward(t_q, t_k, shape.heads, shape.topk, shape.head_dim, VALUE_DIM,
                                    shape.softmax_scale)
    return tilelang.compile(delta, out_idx=[2]), tilelang.compile(gradients, out_idx=[8])
