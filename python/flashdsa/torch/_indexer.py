"""The lightning indexer's selection as an operator, with autograd of its scores."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _checks
from .._indexer import BACKWARD_INPUTS, INPUTS, Selection, indexer_backward, rows_of
from .._indexer import indexer_topk as plain_indexer_topk
from ._operators import LIBRARY, define, require_device, require_tensors


class _Rows:
    """What the plain function reads of packed metadata."""

    def __init__(self, starts: Tensor, causal_lengths: Tensor, total_key_tokens: int):
        self.starts = starts
        self.causal_lengths = causal_lengths
        self.total_key_tokens = total_key_tokens


def _topk(index_q: Tensor, index_k: Tensor, head_weights: Tensor, starts: Tensor,
          causal_lengths: Tensor, total_key_tokens: int, index_topk: int, return_scores: bool,
          backend: str, threads: int, check: Optional[bool]) -> tuple[Tensor, Tensor, Tensor]:
    indices, length, scores = plain_indexer_topk(
        index_q, index_k, head_weights, _Rows(starts, causal_lengths, total_key_tokens), index_topk,
        return_scores=return_scores, backend=backend, threads=threads, check=check)
    if scores is None:
        scores = _scores(index_q, 0)
    return indices, length, scores


def _fake_topk(index_q: Tensor, index_k: Tensor, head_weights: Tensor, starts: Tensor,
               causal_lengths: Tensor, total_key_tokens: int, index_topk: int, return_scores: bool,
               *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    require_device("indexer_topk", INPUTS,
                   (index_q, index_k, head_weights, starts, causal_lengths))
    rows = index_q.shape[0]
    return (index_q.new_empty(rows, 1, index_topk, dtype=torch.int32),
            index_q.new_empty(rows, dtype=torch.int32),
            _scores(index_q, index_topk if return_scores else 0))


def _scores(index_q: Tensor, width: int) -> Tensor:
    single = index_q.dtype if index_q.dtype == torch.float64 else torch.float32
    return index_q.new_empty(index_q.shape[0], width, dtype=single)


def _backward(grad_scores: Tensor, index_q: Tensor, index_k: Tensor, head_weights: Tensor,
              topk_indices: Tensor, backend: str, threads: int,
              check: Optional[bool]) -> tuple[Tensor, Tensor, Tensor]:
    # .sum().backward() hands out one number with strides of zero.
    if grad_scores.stride(-1) != 1:
        grad_scores = grad_scores.contiguous()
    return indexer_backward(index_q, index_k, head_weights, topk_indices, grad_scores,
                            backend=backend, threads=threads, check=check)


def _fake_backward(grad_scores: Tensor, index_q: Tensor, index_k: Tensor, head_weights: Tensor,
                   topk_indices: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    require_device("indexer_backward", BACKWARD_INPUTS,
                   (index_q, index_k, head_weights, topk_indices, grad_scores))
    return tuple(tensor.new_empty(tensor.shape) for tensor in (index_q, index_k, head_weights))


# The last result has no columns unless scores are asked for.
_topk_op = define(
    "indexer_topk(Tensor index_q, Tensor index_k, Tensor head_weights, Tensor starts, "
    "Tensor causal_lengths, SymInt total_key_tokens, int index_topk, bool return_scores, "
    "str backend, int threads, bool? check) -> (Tensor, Tensor, Tensor)",
    _topk, _fake_topk)

_backward_op = define(
    "indexer_backward(Tensor grad_scores, Tensor index_q, Tensor index_k, Tensor head_weights, "
    "Tensor topk_indices, str backend, int threads, bool? check) -> (Tensor, Tensor, Tensor)",
    _backward, _fake_backward)


class _ScoredTopk(torch.autograd.Function):
    """Saves the caller's tensors as they are, and the indices."""

    @staticmethod
    def forward(ctx: Any, index_q: Tensor, index_k: Tensor, head_weights: Tensor,
                *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            indices, length, scores = _topk_op(index_q, index_k, head_weights, *rest)
        ctx.save_for_backward(index_q, index_k, head_weights, indices)
        ctx.rest = rest
        ctx.mark_non_differentiable(indices, length)
        ctx.set_materialize_grads(False)
        return indices, length, scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _indices: None, _length: None,
                 grad_scores: Optional[Tensor]) -> tuple[Any, ...]:
        grads: list[Any] = [None] * (3 + len(ctx.rest))
        if grad_scores is not None:
            index_q, index_k, head_weights, indices = ctx.saved_tensors
            grads[:3] = _backward_op(grad_scores, index_q, index_k, head_weights, indices,
                                     *ctx.rest[-3:])
        return tuple(grads)


def _autograd(index_q: Tensor, index_k: Tensor, head_weights: Tensor, starts: Tensor,
              causal_lengths: Tensor, total_key_tokens: int, index_topk: int, return_scores: bool,
              *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = (index_q, index_k, head_weights, starts, causal_lengths, total_key_tokens,
                 index_topk, return_scores, *options)
    # Forward-mode derivatives are refused there too.
    if return_scores and (forward_ad._current_level >= 0 or torch.is_grad_enabled() and (
            index_q.requires_grad or index_k.requires_grad or head_weights.requires_grad)):
        return _ScoredTopk.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return _topk_op(*arguments)


LIBRARY.impl("indexer_topk", _autograd, "Autograd")


def indexer_topk(index_q: Tensor, index_k: Tensor, head_weights: Tensor, packed_metadata: Any,
                 index_topk: int, *, return_scores: bool = False, backend: str = "auto",
                 threads: int = 0, check: Optional[bool] = None) -> Selection:
    """`flashdsa.indexer_topk` as an operator, which torch.compile keeps in its graph.

    The selection has no gradient; the scores are differentiable in index_q, index_k and
    head_weights, by `flashdsa.indexer_backward`. Saved for the backward are those three and
    topk_indices, none copied. The gradients have the dtypes of their tensors; a second derivative
    is refused.

    Args:
        index_q, index_k, head_weights, packed_metadata, index_topk: as in `flashdsa.indexer_topk`.
        return_scores, backend, threads, check: as there.

    Raises:
        TypeError, ValueError, RuntimeError: as `flashdsa.indexer_topk`.
    """
    name = "indexer_topk"
    starts, causal_lengths, total = rows_of(name, packed_metadata)
    require_tensors(name, INPUTS, (index_q, index_k, head_weights, starts, causal_lengths))
    _checks.boolean(name, "return_scores", return_scores)
    if not _checks.is_integer(index_topk):
        raise TypeError(f"{name}: index_topk must be an int, got {_checks.type_name(index_topk)}")
    indices, length, scores = _topk_op(index_q, index_k, head_weights, starts, causal_lengths,
                                       total, index_topk, return_scores, backend, threads, check)
    return Selection(indices, length, scores if return_scores else None)
