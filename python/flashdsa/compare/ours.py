"""FlashDSA's own calls."""

from __future__ import annotations

from typing import Any

from .. import __version__, attention_backward, attention_forward, indexer_topk
from .library import Forward, Gradients, Library
from .workloads import Problem, Selection


class FlashDsa(Library):
    """The plain functions of the package: every call takes memory for its results."""

    name = "flashdsa"
    operations = ("topk", "forward", "backward", "step")

    def __init__(self, backend: str, threads: int):
        self._options: dict[str, Any] = {"backend": backend, "threads": threads}

    def load(self) -> str:
        return __version__

    def topk(self, problem: Problem, metadata: Any) -> Selection:
        chosen = indexer_topk(problem.index_q, problem.index_k, problem.head_weights, metadata,
                              problem.shape.topk, **self._options)
        return Selection(chosen.topk_indices, chosen.topk_length)

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        result = attention_forward(problem.q, problem.kv, selection.topk_indices,
                                   problem.shape.softmax_scale, selection.topk_length,
                                   **self._options)
        return Forward(result.out, result.lse)

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        result = attention_backward(problem.q, problem.kv, selection.topk_indices,
                                    problem.shape.softmax_scale, forward.out, forward.lse,
                                    problem.grad_out, selection.topk_length, **self._options)
        return Gradients(result.grad_q, result.grad_kv)
