"""The operations that are compared: how a library runs one, what is right, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from . import judge
from .drift import INDEX_DIM
from .judge import Figure
from .library import Forward, Gradients, Library
from .shapes import VALUE_DIM
from .workloads import Problem, Selection

LAYERS = 4  # of a step: they share one selection, as in GLM-5.2


class Work(NamedTuple):
    """FLOP and bytes by the formulae of docs/benchmarks.md."""

    flop: float
    bytes: float

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.flop + other.flop, self.bytes + other.bytes)

    def times(self, count: int) -> Work:
        return Work(self.flop * count, self.bytes * count)


class StepResult(NamedTuple):
    """Of the last layer that ran."""

    selection: Selection
    forward: Forward
    gradients: Gradients


class Inputs(NamedTuple):
    """What all libraries' calls of one operation get."""

    problem: Problem
    selection: Selection
    """of forward and backward"""
    forward: Forward
    """of backward: FlashDSA's results"""


class Operation(NamedTuple):
    """One operation."""

    run: Callable[[Library, Inputs], Any]
    check: Callable[[Inputs, Any, bool], Figure]
    """the last argument: whether the result is that of a host backend of FlashDSA"""
    work: Callable[[Problem], Work]
    layers: int = 1


def refusal(operation: str, problem: Problem) -> str:
    """Why a workload does not have the operation; empty: it does."""
    if operation == "step" and not problem.causal:
        return f"step needs documents, and in workload {problem.workload} every row sees all keys"
    return ""


def _run_step(library: Library, inputs: Inputs) -> StepResult:
    problem = inputs.problem
    selection = library.topk(problem, problem.build_metadata())
    selection = library.prepare(problem, selection)
    forwards = [library.forward(problem, selection) for _ in range(LAYERS)]
    for forward in reversed(forwards):
        gradients = library.backward(problem, selection, forward)
    return StepResult(selection, forwards[0], gradients)


def _check_step(inputs: Inputs, result: StepResult, tight: bool) -> Figure:
    problem, selection = inputs.problem, result.selection
    chosen = judge.check_topk(problem, selection)
    if not chosen.ok:
        return chosen
    return judge.worst(chosen, judge.check_forward(problem, selection, result.forward, tight),
                       judge.check_backward(problem, selection, result.gradients))


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _picks(problem: Problem) -> int:
    """Keys selected, summed over rows."""
    return int(np.minimum(problem.visible, problem.shape.topk).sum(dtype=np.int64))


def _topk_work(problem: Problem) -> Work:
    """Rows that select everything read nothing but their bounds."""
    shape = problem.shape
    scored = problem.visible > shape.topk
    pairs = int(problem.visible[scored].sum(dtype=np.int64))
    per_row = (_bytes(problem.index_q) + _bytes(problem.head_weights)) / problem.t_q
    read = per_row * int(scored.sum()) + (_bytes(problem.index_k) if pairs else 0)
    bounds = _bytes(problem.metadata.starts, problem.metadata.causal_lengths)
    written = 4 * problem.t_q * (shape.topk + 1)
    return Work(2 * shape.index_heads * INDEX_DIM * pairs, read + bounds + written)


def _result_bytes(problem: Problem) -> int:
    """Of out and lse."""
    return problem.t_q * problem.shape.heads * (2 * VALUE_DIM + 4)


def _forward_work(problem: Problem) -> Work:
    shape, picks = problem.shape, _picks(problem)
    return Work(2 * shape.heads * picks * (shape.head_dim + VALUE_DIM),
                picks * (2 * shape.head_dim + 4) + _bytes(problem.q) + _result_bytes(problem))


def _backward_work(problem: Problem) -> Work:
    shape, picks = problem.shape, _picks(problem)
    tensors = (problem.q, problem.q, problem.kv, problem.grad_out)  # grad_q and grad_kv too
    return Work(2 * shape.heads * picks * (3 * shape.head_dim + 2 * VALUE_DIM),
                picks * (2 * shape.head_dim + 4) + _bytes(*tensors) + _result_bytes(problem))


def _step_work(problem: Problem) -> Work:
    layer = _forward_work(problem) + _backward_work(problem)
    return _topk_work(problem) + layer.times(LAYERS)


OPERATIONS = {
    "topk": Operation(lambda library, inputs: library.topk(inputs.problem, inputs.problem.metadata),
                      lambda inputs, result, tight: judge.check_topk(inputs.problem, result),
                      _topk_work),
    "forward": Operation(lambda library, inputs: library.forward(inputs.problem, inputs.selection),
                         lambda inputs, result, tight: judge.check_forward(
                             inputs.problem, inputs.selection, result, tight), _forward_work),
    "backward": Operation(lambda library, inputs: library.backward(*inputs),
                          lambda inputs, result, tight: judge.check_backward(
                              inputs.problem, inputs.selection, result), _backward_work),
    "step": Operation(_run_step, _check_step, _step_work, LAYERS),
}
