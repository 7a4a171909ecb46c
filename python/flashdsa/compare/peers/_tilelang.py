"""A sparse MLA forward in TileLang, written for this benchmark.
https://github.com/tile-ai/tilelang"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from ..library import Forward, Library, load_name
from ..shapes import VALUE_DIM, Shape
from ..workloads import Problem, Selection


class TileLang(Library):
    """The kernel is compiled on the first call, before anything is timed."""

    name = "tilelang"
    operations = ("forward",)

    def load(self) -> str:
        _, version = load_name("tilelang", "compile", "tilelang")
        return version

    def refusal(self, operation: str, problem: Problem) -> str:
        return "" if problem.device.type == "cuda" else "needs a GPU"

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        kernel = _compiled(problem.t_q, problem.t_k, problem.shape)
        out, lse = kernel(problem.q, problem.kv[:, 0], selection.topk_indices[:, 0],
                          selection.topk_length)
        return Forward(out, lse)


@functools.lru_cache(maxsize=None)
def _compiled(t_q: int, t_k: int, shape: Shape) -> Callable[..., tuple[Tensor, Tensor]]:
    import tilelang

    from ._tilelang_kernel import sparse_mla_forward

    program = sparse_mla_forward(t_q, t_k, shape.heads, shape.topk, shape.head_dim, VALUE_DIM,
                                 shape.softmax_scale)
    return tilelang.compile(program, out_idx=[4, 5])
