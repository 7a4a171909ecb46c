"""What the ranks compute beside what one rank with the whole sequence computes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

import flashdsa
from flashdsa.torch.context_parallel import ContextParallel

from .exchanges import Copies, Exchanges, gathered_keys, installed
from .problem import Problem, index_inputs, make_inputs, run_step
from .ranks import Ranks

BOUNDS = {"out": 4e-3, "grad_q": 1e-2, "grad_kv": 1e-2}  # of the relative RMSE (docs/spec.md)
ROW_BOUND = 4  # of one row, in bounds of its tensor

Results = dict[str, list[Tensor]]  # by the names of BOUNDS, one of every layer


class Figure(NamedTuple):
    name: str
    value: float
    bound: float

    @property
    def good(self) -> bool:
        return self.value <= self.bound  # NaN is not

    @property
    def share(self) -> float:
        return math.inf if math.isnan(self.value) else self.value / self.bound

    def __str__(self) -> str:
        return f"{self.name} {self.value:.1e} / {self.bound:.1e}"


def select_on_one_rank(problem: Problem) -> flashdsa.Selection:
    rows = flashdsa.prepare_packed_metadata(problem.cu_seqlens(), problem.tokens)
    return flashdsa.indexer_topk(*index_inputs(problem, problem.all_blocks()), rows, problem.topk,
                                 threads=problem.threads)


def count_unequal_rows(cp: ContextParallel, topk_indices: Tensor, one_rank: Tensor) -> int:
    """`one_rank` has the selection of all rows."""
    return int((topk_indices.cpu() != cp.shard(one_rank).cpu()).any(-1).sum())


def attend_on_one_rank(problem: Problem) -> Results:
    """By the plain functions."""
    inputs = make_inputs(problem, problem.all_blocks())
    selection = select_on_one_rank(problem)
    results: Results = {name: [] for name in BOUNDS}
    for layer in inputs.layers:
        arguments = (layer.q.detach(), layer.kv.detach(), selection.topk_indices,
                     problem.softmax_scale)
        out, lse, _ = flashdsa.attention_forward(*arguments, selection.topk_length,
                                                 threads=problem.threads)
        grads = flashdsa.attention_backward(*arguments, out, lse, inputs.grad_out,
                                            selection.topk_length, threads=problem.threads)
        for name, x in zip(BOUNDS, (out, grads.grad_q, grads.grad_kv)):
            results[name].append(x)
    return results


class RankResults(NamedTuple):
    cp: ContextParallel
    results: Results


def attend_on_ranks(problem: Problem, order: str, ranks: Ranks) -> list[RankResults]:
    """The step, of the ranks of this process."""
    found = []
    grad_kv: list[Tensor] = []
    for _ in ranks.play():
        cp = ContextParallel(problem.tokens, order=order)
        inputs = make_inputs(problem, problem.blocks_of(cp))
        rows = cp.prepare_packed_metadata(problem.cu_seqlens())
        grads: list[Tensor] = []
        exchanges: Any = Exchanges()
        if ranks.simulated:
            exchanges = Copies(cp.rank, gathered_keys(problem, cp), grads)
        with installed(exchanges):
            outs = run_step(cp, problem, inputs, rows).outs
        found.append(RankResults(cp, {"out": [out.detach() for out in outs],
                                      "grad_q": [layer.q.grad for layer in inputs.layers],
                                      "grad_kv": [layer.kv.grad for layer in inputs.layers]}))
        grad_kv = [a + b for a, b in zip(grad_kv, grads)] if grad_kv else grads
    if ranks.simulated:  # the sums that the ranks would have made, of the last layer first
        for cp, results in found:
            own = slice(cp.rank * cp.local_tokens, (cp.rank + 1) * cp.local_tokens)
            results["grad_kv"] = [x[own].bfloat16() for x in reversed(grad_kv)]
    return found


def figures_of(name: str, got: Tensor, want: Tensor) -> list[Figure]:
    """Of all rows [rows, ..., channels], and of the worst one, against its own size or that of a
    usual one where that is larger: small ones are differences of larger numbers."""
    got, want = got.double(), want.double()
    error, size = (got - want).norm(dim=-1), want.norm(dim=-1)
    usual = size.square().mean().sqrt()
    return [Figure(f"{name} rmse", float(error.square().mean().sqrt() / usual), BOUNDS[name]),
            Figure(f"{name} row", float((error / size.clamp(min=usual)).max()),
                   ROW_BOUND * BOUNDS[name])]


def worst_figure(problem: Problem, order: str, ranks: Ranks) -> Figure:
    """The one nearest to its bound, over layers and the ranks of this process."""
    want = attend_on_one_rank(problem)
    figures = [figure for cp, results in attend_on_ranks(problem, order, ranks)
               for name in BOUNDS for a, b in zip(results[name], want[name])
               for figure in figures_of(name, a, cp.shard(b))]
    return max(figures, key=lambda figure: figure.share)
