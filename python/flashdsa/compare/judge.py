"""Whether a result is right: by FP64 over sampled rows, with the bounds of section 8 of
docs/spec.md."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .library import Forward, Gradients
from .shapes import VALUE_DIM
from .workloads import Problem, Selection

OUT_RMSE = 4e-3
GRAD_RMSE = 1e-2
LSE_ERROR, HOST_LSE_ERROR, LSE_RELATIVE_ERROR = 1e-4, 1e-5, 1e-6
SCORE_ERROR = 2e-5
VECTOR_FACTOR = 4  # of its tensor's bound, for every single vector
SAMPLES = 4
ENOUGH_KEYS = 64  # gradients of a row with few keys cancel; it is not sampled
_CHUNK_ROWS = 8  # of FP64 arithmetic: 75 MB of keys at K = 2048


class Figure(NamedTuple):
    """A measured figure and its bound."""

    name: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # NaN is not

    @property
    def share(self) -> float:
        return self.value / self.bound if self.bound > 0 else self.value

    def __str__(self) -> str:
        return f"{self.name} {self.value:.1e} / {self.bound:.1e}{'' if self.ok else ' FAIL'}"


def worst(*figures: Figure) -> Figure:
    """The one nearest to its bound; of those that break it, the first."""
    broken = [figure for figure in figures if not figure.ok]
    return broken[0] if broken else max(figures, key=lambda figure: figure.share)


def check_forward(problem: Problem, selection: Selection, result: Forward,
                  tight: bool = False) -> Figure:
    """`tight`: with the bound of lse that holds for the host backends."""
    shape = problem.q.shape[:2]
    wrong = (_form("out", result.out, (*shape, VALUE_DIM), torch.bfloat16)
             or _form("lse", result.lse, shape, torch.float32))
    if wrong:
        return wrong
    rows = _sampled_rows(selection)
    want = exact_forward(problem, selection, rows)
    error = (result.lse[rows].double() - want.lse).abs()
    bound = (HOST_LSE_ERROR if tight else LSE_ERROR) + LSE_RELATIVE_ERROR * want.lse.abs()
    at = (error / bound).argmax()
    return worst(*_relative_error("out", result.out[rows], want.out, OUT_RMSE),
                 Figure("lse", error.flatten()[at].item(), bound.flatten()[at].item()))


def check_backward(problem: Problem, selection: Selection, result: Gradients) -> Figure:
    wrong = (_form("grad_q", result.grad_q, problem.q.shape, torch.bfloat16)
             or _form("grad_kv", result.grad_kv, problem.kv.shape, torch.bfloat16))
    if wrong:
        return wrong
    rows = _sampled_rows(selection)
    of_first = selection.topk_indices[rows[0], 0, :int(selection.topk_length[rows[0]])]
    keys = of_first[_spread(len(of_first), SAMPLES)].long()
    return worst(
        *_relative_error("grad_q", result.grad_q[rows], exact_grad_q(problem, selection, rows),
                         GRAD_RMSE),
        *_relative_error("grad_kv", result.grad_kv[keys, 0],
                         exact_grad_kv(problem, selection, keys), GRAD_RMSE))


def check_topk(problem: Problem, result: Selection) -> Figure:
    """The form of all rows, the choice of sampled ones that see more than K keys."""
    topk = problem.shape.topk
    wrong = (_form("topk_indices", result.topk_indices, (problem.t_q, 1, topk), torch.int32)
             or _form("topk_length", result.topk_length, (problem.t_q,), torch.int32))
    if wrong:
        return wrong
    starts, visible = (torch.from_numpy(array).to(problem.device)
                       for array in (problem.starts, problem.visible))
    figures = [Figure("malformed rows", _malformed(result, starts, visible, topk), 0)]
    if figures[0].ok:
        scored = (visible > topk).nonzero()[:, 0]
        figures += [_choice(problem, result, int(row), int(starts[row]), int(visible[row]))
                    for row in scored[_spread(len(scored), SAMPLES)]]
    return worst(*reversed(figures))


def exact_forward(problem: Problem, selection: Selection, rows: Tensor) -> Forward:
    """out and lse of the rows, in FP64."""
    parts = [_Rows(problem, selection, part) for part in rows.split(_CHUNK_ROWS)]
    return Forward(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def exact_grad_q(problem: Problem, selection: Selection, rows: Tensor) -> Tensor:
    parts = (_Rows(problem, selection, part) for part in rows.split(_CHUNK_ROWS))
    return torch.cat([torch.einsum("rhk,rkd->rhd", part.grad_logits(), part.keys)
                      for part in parts])


def exact_grad_kv(problem: Problem, selection: Selection, keys: Tensor) -> Tensor:
    """grad_kv of the keys, in FP64, over all rows that select one of them."""
    total = torch.zeros(len(keys), problem.shape.head_dim, dtype=torch.float64,
                        device=problem.device)
    selecting = torch.isin(selection.topk_indices[:, 0], keys.int()).any(1).nonzero()[:, 0]
    for rows in selecting.split(_CHUNK_ROWS):
        part = _Rows(problem, selection, rows)
        of_key = ((part.picks == keys[:, None, None]) & part.exists).double()  # [keys, rows, K]
        d_s = torch.einsum("rhk,srk->srh", part.grad_logits(), of_key)
        p = torch.einsum("rhk,srk->srh", part.p, of_key)
        total += torch.einsum("srh,rhd->sd", d_s, part.q)
        total[:, :VALUE_DIM] += torch.einsum("srh,rhv->sv", p, part.grad_out)
    return total


class _Rows:
    """Some rows' attention in FP64."""

    def __init__(self, problem: Problem, selection: Selection, rows: Tensor):
        self.picks = selection.topk_indices[rows, 0]
        slot = torch.arange(self.picks.shape[1], device=rows.device)
        self.exists = (slot < selection.topk_length[rows, None]) & (self.picks >= 0)
        self.q = problem.q[rows].double()
        self.grad_out = problem.grad_out[rows].double()
        self.keys = problem.kv[self.picks.clamp_min(0), 0].double()
        self._scale = problem.shape.softmax_scale
        logits = self._scale * torch.einsum("rhd,rkd->rhk", self.q, self.keys)
        logits.masked_fill_(~self.exists[:, None], -torch.inf)
        self.lse = logits.logsumexp(2)
        self.p = torch.exp(logits - self.lse[..., None])
        self.out = torch.einsum("rhk,rkv->rhv", self.p, self.keys[..., :VALUE_DIM])

    def grad_logits(self) -> Tensor:
        """Of the unscaled logits, [rows, H, K]."""
        d_p = torch.einsum("rhv,rkv->rhk", self.grad_out, self.keys[..., :VALUE_DIM])
        d = (self.grad_out * self.out).sum(2, keepdim=True)
        return self.p * (d_p - d) * self._scale


def _form(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
          ) -> Optional[Figure]:
    """What is wrong with a whole tensor: its shape, its dtype, numbers that are none."""
    if tensor.shape != torch.Size(shape):
        return Figure(f"{name} of shape {list(tensor.shape)}, not {list(shape)},", 1, 0)
    if tensor.dtype != dtype:
        return Figure(f"{name} of {tensor.dtype}, not {dtype},", 1, 0)
    bad = 0 if not dtype.is_floating_point else int((~tensor.isfinite()).sum())
    return Figure(f"non-finite {name}", bad, 0) if bad else None


def _spread(count: int, samples: int) -> Tensor:
    """Up to `samples` of `count` places, the last among them."""
    return torch.linspace(0, count - 1, min(count, samples) + 1).round().long()[1:].unique()


def _sampled_rows(selection: Selection) -> Tensor:
    lengths = selection.topk_length
    rows = (lengths >= min(ENOUGH_KEYS, int(lengths.max()))).nonzero()[:, 0]
    return rows[_spread(len(rows), SAMPLES).to(rows.device)]


def _relative_error(name: str, got: Tensor, want: Tensor, bound: float) -> list[Figure]:
    """Of vectors along the last axis: as a whole, and of the worst of them."""
    error, size = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    return [Figure(f"{name} rmse", (error.norm() / size.norm()).item(), bound),
            Figure(f"{name} worst vector", (error / size).max().item(), VECTOR_FACTOR * bound)]


def _malformed(result: Selection, starts: Tensor, visible: Tensor, topk: int) -> int:
    """Rows that are not the right number of visible keys, ascending, and then -1."""
    indices = result.topk_indices[:, 0]
    count = visible.clamp_max(topk)
    slot = torch.arange(topk, device=indices.device)
    inside = (indices >= starts[:, None]) & (indices < (starts + visible)[:, None])
    right = torch.where(slot < count[:, None], inside, indices == -1)
    right[:, 1:] &= (indices[:, 1:] > indices[:, :-1]) | (slot[1:] >= count[:, None])
    return int((~(right.all(1) & (result.topk_length == count))).sum())


def _choice(problem: Problem, result: Selection, row: int, start: int, visible: int) -> Figure:
    """How far the scores of wrongly chosen or left keys are from the K-th."""
    dots = problem.index_k[start:start + visible].double() @ problem.index_q[row].double().T
    weights = problem.head_weights[row].double()
    scores = dots.relu() @ weights
    chosen = torch.zeros(visible, dtype=torch.bool, device=problem.device)
    chosen[result.topk_indices[row, 0].long() - start] = True
    last = scores.topk(problem.shape.topk).values[-1]
    wrong = torch.where(chosen, scores < last, scores > last)
    distance = (scores - last).abs().where(wrong, 0).max()
    largest = (dots.relu() @ weights.abs()).max()
    return Figure("selection", distance.item(), 2 * SCORE_ERROR * largest.item())
