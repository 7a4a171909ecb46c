"""The lightning indexer's selection as an operator."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _checks
from .._indexer import INPUTS, Selection, rows_of
from .._indexer import indexer_topk as plain_indexer_topk
from ._operators import define, require_tensors


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
    rows = index_q.shape[0]
    return (index_q.new_empty(rows, 1, index_topk, dtype=torch.int32),
            index_q.new_empty(rows, dtype=torch.int32),
            _scores(index_q, index_topk if return_scores else 0))


def _scores(index_q: Tensor, width: int) -> Tensor:
    single = index_q.dtype if index_q.dtype == torch.float64 else torch.float32
    return index_q.new_empty(index_q.shape[0], width, dtype=single)


# The last result has no columns unless scores are asked for.
_topk_op = define(
    "indexer_topk(Tensor index_q, Tensor index_k, Tensor head_weights, Tensor starts, "
    "Tensor causal_lengths, SymInt total_key_tokens, int index_topk, bool return_scores, "
    "str backend, int threads, bool? check) -> (Tensor, Tensor, Tensor)",
    _topk, _fake_topk)


def indexer_topk(index_q: Tensor, index_k: Tensor, head_weights: Tensor, packed_metadata: Any,
                 index_topk: int, *, return_scores: bool = False, backend: str = "auto",
                 threads: int = 0, check: Optional[bool] = None) -> Selection:
    """`flashdsa.indexer_topk` as an operator, which torch.compile keeps in its graph.

    Arguments, result and errors are those of the plain function. The selection has no gradient; nor
    have the scores in this version, so with return_scores an input that requires one is refused.
    """
    name = "indexer_topk"
    starts, causal_lengths, total = rows_of(name, packed_metadata)
    require_tensors(name, INPUTS, (index_q, index_k, head_weights, starts, causal_lengths))
    _checks.boolean(name, "return_scores", return_scores)
    if return_scores and torch.is_grad_enabled() and (
            index_q.requires_grad or index_k.requires_grad or head_weights.requires_grad):
        raise RuntimeError(f"{name}: topk_scores have no gradient, expected inputs without "
                           "requires_grad or torch.no_grad()")
    if not _checks.is_integer(index_topk):
        raise TypeError(f"{name}: index_topk must be an int, got {_checks.type_name(index_topk)}")
    # Without gradients from here on: PyTorch would warn of an operator that has none.
    with torch.no_grad():
        indices, length, scores = _topk_op(index_q, index_k, head_weights, starts, causal_lengths,
                                           total, index_topk, return_scores, backend, threads,
                                           check)
    return Selection(indices, length, scores if return_scores else None)
