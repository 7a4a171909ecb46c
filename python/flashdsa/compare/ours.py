"""FlashDSA's own calls."""

from __future__ import annotations

from typing import Any

from .. import (__version__, attention_backward, attention_forward, build_selection_plan,
                indexer_topk)
from .library import Forward, Gradients, Library
from .workloads import Problem, Selection

PLAN_USES = ("none", "reused", "built")


class FlashDsa(Library):
    """The plain functions of the package: every call takes memory for its results. With plans of
    use "built", a call of forward or backward whose selection comes without a plan builds one."""

    name = "flashdsa"
    operations = ("topk", "forward", "backward", "step")

    def __init__(self, backend: str, threads: int, plan_use: str):
        self._backend = backend
        self._options: dict[str, Any] = {"backend": backend, "threads": threads}
        self._plan_use = plan_use

    def load(self) -> str:
        return __version__

    def topk(self, problem: Problem, metadata: Any) -> Selection:
        chosen = indexer_topk(problem.index_q, problem.index_k, problem.head_weights, metadata,
                              problem.shape.topk, **self._options)
        return Selection(chosen.topk_indices, chosen.topk_length)

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        result = attention_forward(problem.q, problem.kv, selection.topk_indices,
                                   problem.shape.softmax_scale, selection.topk_length,
                                   plan=self._plan_of(problem, selection), **self._options)
        return Forward(result.out, result.lse)

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        result = attention_backward(problem.q, problem.kv, selection.topk_indices,
                                    problem.shape.softmax_scale, forward.out, forward.lse,
                                    problem.grad_out, selection.topk_length,
                                    plan=self._plan_of(problem, selection), **self._options)
        return Gradients(result.grad_q, result.grad_kv)

    def prepare(self, problem: Problem, selection: Selection) -> Selection:
        return selection._replace(plan=self._plan_of(problem, selection))

    def build_plan(self, problem: Problem, selection: Selection) -> Any:
        return build_selection_plan(selection.topk_indices, problem.t_k, problem.shape.heads,
                                    selection.topk_length, backend=self._backend)

    def _plan_of(self, problem: Problem, selection: Selection) -> Any:
        if selection.plan is not None or self._plan_use == "none":
            return selection.plan
        return self.build_plan(problem, selection)
