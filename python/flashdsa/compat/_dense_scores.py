"""The indexer's scores as a dense matrix.

A selection as wide as what a row sees returns every score of it, in the order of the keys. So the
matrix is written in windows of as many columns as a selection can hold, by the indexer's own
kernels, whose scores it therefore repeats bit for bit. Nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .. import _checks
from .._indexer import MAX_TOPK, indexer_topk
from ._segments import require_bounds, segments_of
from ._support import readable

# Rows of one call: its selection and scores take 256 MiB.
_CHUNK_ROWS = 16384


class _Rows(NamedTuple):
    """Where each row's keys start in k, and how many it sees: what the indexer reads of
    metadata."""

    starts: Tensor
    causal_lengths: Tensor
    total_key_tokens: int

    def window(self, rows: slice, column: int, width: int) -> _Rows:
        """The keys of some rows that lie in columns column .. column+width-1."""
        lengths = (self.causal_lengths[rows] - column).clamp_(0, width)
        return _Rows(self.starts[rows] + column, lengths, self.total_key_tokens)


def dense_scores(operation: str, q: Tensor, k: Tensor, w: Tensor, sm_scale: float,
                 out: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
                 cu_seqlens_k: Optional[Tensor], max_seqlen_q: Optional[int],
                 max_seqlen_k: Optional[int], q_causal_offsets: Optional[Tensor]) -> Tensor:
    """The scores of `indexer_forward_wrapper`."""
    packed = require_bounds(operation, q, cu_seqlens_q, cu_seqlens_k)
    rank = 3 if packed else 4
    if q.dim() != rank or k.dim() != rank or k.shape[-2] != 1 or w.shape != q.shape[:-1]:
        shapes = ("[T_q, H, 128], k [T_k, 1, 128] and w [T_q, H]" if packed else
                  "[B, S_q, H, 128], k [B, S_k, 1, 128] and w [B, S_q, H]")
        raise ValueError(f"{operation}: q must be {shapes}, got {list(q.shape)}, {list(k.shape)} "
                         f"and {list(w.shape)}")
    segments = (cu_seqlens_q.shape[0] - 1) if packed else q.shape[0]
    _check_offsets(operation, q_causal_offsets, segments, q)
    if packed:
        _longest(operation, "max_seqlen_q", max_seqlen_q)
        columns = _longest(operation, "max_seqlen_k", max_seqlen_k)
        rows = _packed_rows(q.shape[0], k.shape[0], cu_seqlens_q, cu_seqlens_k, q_causal_offsets)
        shape = (q.shape[0], columns)
    else:
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"{operation}: k must have q's B = {q.shape[0]}, got {k.shape[0]}")
        rows = _batched_rows(q, k, q_causal_offsets)
        shape = (*q.shape[:2], k.shape[1])
        q, k, w = q.flatten(0, 1), k.flatten(0, 1), w.flatten(0, 1)
    scores = _result(operation, out, shape, q)
    _fill(scores.view(q.shape[0], shape[-1]), readable(q), readable(k)[:, 0], readable(w), rows,
          sm_scale)
    if out is None or scores is out:
        return scores
    return out.copy_(scores)


def _fill(scores: Tensor, q: Tensor, k: Tensor, w: Tensor, rows: _Rows, sm_scale: float) -> None:
    for first in range(0, scores.shape[0], _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        for column in range(0, scores.shape[1], MAX_TOPK):
            width = min(MAX_TOPK, scores.shape[1] - column)
            window = indexer_topk(q[chunk], k, w[chunk], rows.window(chunk, column, width), width,
                                  return_scores=True).topk_scores
            scores[chunk, column:column + width] = window
    if sm_scale != 1:
        scores *= sm_scale  # positive, so that -inf stays


def _packed_rows(rows: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
                 q_causal_offsets: Optional[Tensor]) -> _Rows:
    segment = segments_of(rows, cu_seqlens_q)
    position = torch.arange(rows, dtype=torch.int32, device=segment.device)
    visible = position - cu_seqlens_q[segment] + 1
    if q_causal_offsets is not None:
        visible += q_causal_offsets[segment]
    starts = cu_seqlens_k[segment]
    visible = visible.minimum(cu_seqlens_k[segment + 1] - starts)
    behind = position >= cu_seqlens_q[-1]  # rows of no segment
    return _Rows(starts, visible.masked_fill_(behind, 0), keys)


def _batched_rows(q: Tensor, k: Tensor, q_causal_offsets: Optional[Tensor]) -> _Rows:
    batches, rows = q.shape[:2]
    visible = torch.arange(1, rows + 1, dtype=torch.int32, device=q.device).repeat(batches, 1)
    if q_causal_offsets is not None:
        visible += q_causal_offsets[:, None]
    starts = torch.arange(batches, dtype=torch.int32, device=q.device) * k.shape[1]
    return _Rows(starts[:, None].expand(-1, rows).flatten(), visible.flatten(),
                 batches * k.shape[1])


def _longest(operation: str, name: str, value: Optional[int]) -> int:
    if value is None:
        raise ValueError(f"{operation}: {name} must be given beside cu_seqlens, got None")
    return _checks.integer(operation, name, value, 0, 2**31 - 2)


def _check_offsets(operation: str, offsets: Optional[Tensor], segments: int, q: Tensor) -> None:
    if offsets is None:
        return
    if offsets.dtype != torch.int32:
        raise TypeError(f"{operation}: q_causal_offsets must be int32 [{segments}], "
                        f"got {offsets.dtype}")
    if offsets.shape != (segments,) or offsets.device != q.device:
        raise ValueError(f"{operation}: q_causal_offsets must be int32 [{segments}] on {q.device}, "
                         f"got {list(offsets.shape)} on {offsets.device}")


def _result(operation: str, out: Optional[Tensor], shape: tuple[int, ...], q: Tensor) -> Tensor:
    """Memory for the scores: the caller's, unless it has gaps."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=q.device)
    if out.dtype != torch.float32:
        raise TypeError(f"{operation}: out must be float32 {list(shape)}, got {out.dtype}")
    if out.shape != shape or out.device != q.device:
        raise ValueError(f"{operation}: out must be float32 {list(shape)} on {q.device}, got "
                         f"{list(out.shape)} on {out.device}")
    return out if out.is_contiguous() else torch.empty_like(
        out, memory_format=torch.contiguous_format)
