"""The selection plan as an operator."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .. import _checks
from .._plan import INPUTS, SelectionPlan
from .._plan import build_selection_plan as plain_build_selection_plan
from ._operators import define, require_device, require_tensors


def _build(topk_indices: Tensor, topk_length: Optional[Tensor], total_key_tokens: int, heads: int,
           backend: str, check: Optional[bool]) -> Tensor:
    return plain_build_selection_plan(topk_indices, total_key_tokens, heads, topk_length,
                                      backend=backend, check=check).storage


def _fake_build(topk_indices: Tensor, topk_length: Optional[Tensor], total_key_tokens: int,
                heads: int, *_: Any) -> Tensor:
    require_device("build_selection_plan", INPUTS, (topk_indices, topk_length))
    rows, _, topk = topk_indices.shape
    return topk_indices.new_empty(_storage_bytes(rows, topk, _group_of(heads)), dtype=torch.uint8)


# The library tells both of a plan that it has built. A trace has sizes that may be symbols, and no
# plan: what it knows of one are these two.


def _group_of(heads: int) -> int:
    """G, the most rows that are computed together."""
    if heads <= 8:
        return 8
    if heads <= 16:
        return 4
    return 2 if heads <= 32 else 1


def _storage_bytes(rows: int, topk: int, group: int) -> int:
    """Bytes of a plan: those of its arrays, each rounded up to 64."""
    arrays = [4, 32 * rows, 4 * rows, 4 * rows]
    if group > 1:
        arrays += [4 * rows * topk, 4 * rows * group * ((topk + 31) // 32)]
    return sum((size + 63) // 64 * 64 for size in arrays)


_build_op = define(
    "build_selection_plan(Tensor topk_indices, Tensor? topk_length, SymInt total_key_tokens, "
    "SymInt heads, str backend, bool? check) -> Tensor",
    _build, _fake_build)


def build_selection_plan(topk_indices: Tensor, total_key_tokens: int, heads: int,
                         topk_length: Optional[Tensor] = None, *, backend: str = "auto",
                         check: Optional[bool] = None) -> SelectionPlan:
    """`flashdsa.build_selection_plan` as an operator, which torch.compile keeps in its graph.

    Args:
        topk_indices, total_key_tokens, heads, topk_length, backend, check: as there.

    Returns:
        SelectionPlan, as there.

    Raises:
        TypeError, ValueError, RuntimeError: as there.
    """
    name = "build_selection_plan"
    require_tensors(name, INPUTS, (topk_indices, topk_length), optional=1)
    for argument, value in (("total_key_tokens", total_key_tokens), ("heads", heads)):
        if not _checks.is_integer(value) and not isinstance(value, torch.SymInt):
            raise TypeError(f"{name}: {argument} must be an int, got {_checks.type_name(value)}")
    storage = _build_op(topk_indices, topk_length, total_key_tokens, heads, backend, check)
    rows, _, topk = topk_indices.shape
    return SelectionPlan(storage, rows, topk, total_key_tokens, _group_of(heads))
