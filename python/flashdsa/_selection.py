"""Canonical index rows."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _checks
from ._frameworks import framework_of
from ._library import library

MAX_KEYS = 2**31 - 2

_compact = library.compact_and_sort


class CompactRows(NamedTuple):
    """Result of `compact_and_sort`."""

    indices: Any
    """int32 [T, K]: the valid indices of each row ascending, then -1"""
    lengths: Any
    """int32 [T]: valid slots of each row"""


def compact_and_sort(indices: Any, key_count: int, *, backend: str = "auto", threads: int = 0,
                     check: Optional[bool] = None) -> CompactRows:
    """Brings index rows into canonical form: the valid indices ascending, then -1.

    Args:
        indices: int32 [T, K], K in 1..2048; an index is valid when 0 <= index < key_count.
            Duplicates are kept, each slot counts.
        key_count: rows of the key tensor, 0..2^31-2.
        backend, threads, check: as in `attention_forward`.

    Raises:
        TypeError: wrong framework or dtype, key_count not an int.
        ValueError: wrong shape or stride, key_count out of range.
        RuntimeError: no backend takes the tensor, a failing device.

    Source: section 4 of docs/spec.md, include/flashdsa/selection.h.
    """
    name = "compact_and_sort"
    framework = framework_of(name, "indices", indices)
    keys = _checks.integer(name, "key_count", key_count, 0, MAX_KEYS)
    shape = _checks.sizes(indices, 2)
    sorted_indices = framework.empty(indices, shape, framework.int32)
    lengths = framework.empty(indices, shape[:1], framework.int32)
    framework.run(_compact, name, ("indices",), (indices, sorted_indices, lengths), keys,
                  *_checks.options(name, backend, threads, check))
    return CompactRows(framework.result(sorted_indices), framework.result(lengths))
