"""The selection plan: which query rows attention computes together."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import tvm_ffi

from . import _checks
from ._frameworks import framework_of
from ._library import library

MAX_KEYS = 2**31 - 2
MAX_HEADS = 128

INPUTS = ("topk_indices", "topk_length")

_build = library.build_selection_plan


class SelectionPlan(NamedTuple):
    """Result of `build_selection_plan`, the argument `plan` of the attention.

    It belongs to the contents of topk_indices and topk_length at the time of the build.
    """

    storage: Any
    """uint8 [nbytes], opaque, on the device of topk_indices"""
    query_rows: int
    """T_q"""
    topk: int
    """K"""
    total_key_tokens: int
    """T_k"""
    group: int
    """G, the most rows computed together: 8 up to 8 heads, 4 up to 16, 2 up to 32, 1 above; a plan
    serves every number of heads of its G"""

    @property
    def nbytes(self) -> int:
        """Bytes of the storage: 40 T_q + 4, and where G > 1 also T_q (4 K + 4 G ceil(K / 32)), each
        array rounded up to 64."""
        return self.storage.shape[0]


def build_selection_plan(topk_indices: Any, total_key_tokens: int, heads: int,
                         topk_length: Optional[Any] = None, *, backend: str = "auto",
                         check: Optional[bool] = None) -> SelectionPlan:
    """Finds out which neighbouring query rows attention shall compute together, over which keys.

    Made once for a selection, then passed to the attention of every layer that shares the indices,
    forward and backward. It changes how fast they are, not what they compute. The same indices give
    the same plan. On a GPU nothing waits for the device, so that a graph can capture the call.

    Args:
        topk_indices: int32 [T_q, 1, K], K in 1..2048; its last axis is contiguous.
        total_key_tokens: T_k, rows of kv, 0..2^31-2; slots outside 0..T_k-1 do not count.
        heads: H of the attention calls, 1..128.
        topk_length: int32 [T_q], only the first slots of a row exist; None: all.
        backend, check: as in `attention_forward`.

    Raises:
        TypeError: wrong framework or dtype, total_key_tokens or heads not an int.
        ValueError: wrong shape, stride or device, total_key_tokens or heads out of range, bad
            contents when checking.
        RuntimeError: no backend takes the tensors, out of memory, a failing device.

    Source: docs/selection_plan.md, include/flashdsa/selection.h.
    """
    name = "build_selection_plan"
    framework = framework_of(name, "topk_indices", topk_indices)
    parts = framework.run(
        _build, name, INPUTS, (topk_indices, topk_length),
        _checks.integer(name, "total_key_tokens", total_key_tokens, 0, MAX_KEYS),
        _checks.integer(name, "heads", heads, 1, MAX_HEADS),
        *_checks.options(name, backend, 0, check))
    storage, sizes = parts[:]
    return SelectionPlan(framework.result(storage), *sizes)


def parts_of(operation: str, plan: Any) -> tuple[Any, Optional[tuple[int, ...]]]:
    """The storage of a plan and its sizes; None and None without one."""
    if plan is None:
        return None, None
    if not isinstance(plan, SelectionPlan):
        raise TypeError(f"{operation}: plan must be a SelectionPlan, "
                        f"got {_checks.type_name(plan)}")
    return plan.storage, plan[1:]


def from_parts(storage: Any, sizes: Optional[Sequence[int]]) -> Optional[SelectionPlan]:
    """The plan of what `parts_of` returned."""
    return None if sizes is None else SelectionPlan(storage, *sizes)


def shape_of(operation: str, sizes: Optional[tuple[int, ...]]) -> Optional[tvm_ffi.Shape]:
    """The sizes of a plan as the library takes them."""
    if sizes is None:
        return None
    names = SelectionPlan._fields[1:]
    return tvm_ffi.Shape([_checks.integer(operation, f"plan.{name}", size, 0, _checks.INT64_MAX)
                          for name, size in zip(names, sizes)])
