"""Exact top-k of the rows of a dense matrix."""

from __future__ import annotations

import torch
from torch import Tensor

_LOWEST = torch.iinfo(torch.int64).min
_NO_COLUMN = torch.iinfo(torch.int32).max
_NAN_RANK = torch.iinfo(torch.int32).max  # above the rank of +inf

# Rows are taken in chunks with about this many elements, for which int64 ranks take 128 MiB.
_CHUNK_ELEMENTS = 2**24


def dense_topk(values: Tensor, lengths: Tensor, width: int,
               larger_column: bool) -> tuple[Tensor, Tensor]:
    """Columns, ascending, and values of the `width` best of the first lengths[row] columns of every
    row; then -1 and -inf. values [rows, columns], lengths int64 [rows], any integers."""
    rows, columns = values.shape
    indices = torch.full((rows, width), -1, dtype=torch.int32, device=values.device)
    picked = values.new_full((rows, width), float("-inf"))
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    count = min(width, columns)
    for first in range(0, rows if count else 0, step):
        chunk = slice(first, first + step)
        best = _best(values[chunk], lengths[chunk], count, larger_column)
        taken = best != _NO_COLUMN
        indices[chunk, :count] = best.where(taken, -1)
        found = values[chunk].gather(1, best.where(taken, 0).long())
        picked[chunk, :count] = found.masked_fill_(~taken, float("-inf"))
    return indices, picked


def _best(values: Tensor, lengths: Tensor, count: int, larger_column: bool) -> Tensor:
    """Columns of the best `count` of every row, int32, ascending; _NO_COLUMN past a row's length.

    Value and column make one int64 number, of which no two are equal, so that torch.topk has no
    choice."""
    column = torch.arange(values.shape[1], device=values.device)
    tie = column if larger_column else _NO_COLUMN - column
    rank = (_value_rank(values).long() << 32) | tie
    rank.masked_fill_(column >= lengths[:, None], _LOWEST)
    best = rank.topk(count, dim=1).values
    low = best & _NO_COLUMN
    found = (low if larger_column else _NO_COLUMN - low).to(torch.int32)
    return found.masked_fill_(best == _LOWEST, _NO_COLUMN).sort(dim=1).values


def _value_rank(values: Tensor) -> Tensor:
    """int32 numbers in the order of the values: NaN highest, -0 as +0."""
    single = values.float() + 0.0  # -0 + 0 is +0
    bits = single.view(torch.int32)
    rank = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return rank.masked_fill_(single.isnan(), _NAN_RANK)
