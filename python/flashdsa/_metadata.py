"""Where every packed row finds its keys."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

from . import _checks
from ._frameworks import framework_of
from ._library import library

MAX_KEYS = 2**31 - 2

# The values of flashdsa::QueryMode (include/flashdsa/metadata.h).
QUERY_MODES = {"contiguous": 0, "general": 1}

_prepare = library.prepare_packed_metadata

_INPUTS = ("cu_seqlens", "query_indices", "cu_seqlens_padded", "padding_mask")


@dataclasses.dataclass(frozen=True, eq=False)
class PackedMetadata:
    """Where every local query row finds its keys, and the segments of rows that share a document.

    Storage means the rows of the gathered, padded key tensor; the tensors lie on the device of
    cu_seqlens.
    """

    starts: Any
    """int32 [T_q]: storage row where the query's document starts"""
    causal_lengths: Any
    """int32 [T_q]: visible keys start .. start+length-1; 0 for an invalid row"""
    query_valid: Any
    """bool [T_q]: real rows, not padding"""
    valid_row_indices: Any
    """int64 [T_valid]; None when every row is valid"""
    segment_cu_q: Any
    """int32 [S+1]: offsets of the runs of local rows whose queries lie in one document"""
    segment_cu_k: Any
    """int32 [S+1]: offsets of each segment's key prefix"""
    q_causal_offsets: Any
    """int32 [S]: document-relative position of a segment's first query"""
    key_source_indices: Any
    """int64 [segment_cu_k[S]]: storage row of every key of the prefixes; None when the queries are
    all T_k rows"""
    max_seqlen_q: int
    """longest segment in queries"""
    max_seqlen_k: int
    """longest segment in keys"""
    total_key_tokens: int
    """T_k"""
    all_rows_nonempty: bool
    """every row has at least one key"""
    status: Any = None
    """int32 [1], of a capture-safe build alone: 0, or the first rule that the input broke"""


def prepare_packed_metadata(cu_seqlens: Any, total_key_tokens: int,
                            max_seqlen: Optional[Any] = None, *,
                            query_indices: Optional[Any] = None,
                            cu_seqlens_padded: Optional[Any] = None,
                            padding_mask: Optional[Any] = None, query_mode: str = "contiguous",
                            lenient: bool = False, capture_safe: bool = False,
                            key_sources: bool = True, backend: str = "auto", threads: int = 0,
                            check: Optional[bool] = None) -> PackedMetadata:
    """Builds the metadata of packed THD rows.

    For a query at storage position g in document d (padded[d] <= g < padded[d+1]): start =
    padded[d], valid = g < start + real length and not masked, causal_length = valid ? g + 1 - start
    : 0. On a GPU it costs one device-to-host synchronisation, a capture-safe build none.

    Args:
        cu_seqlens: int32 [N+1], contiguous: real lengths summed up, 0, l0, l0+l1, ...
        total_key_tokens: T_k, rows of the gathered, padded storage, 1..2^31-2.
        max_seqlen: an int, or an int32 or int64 tensor without axes (reading it from a GPU
            synchronises); checked to be the largest real length, never trusted.
        query_indices: int32 or int64 [T_q]: storage positions of the local rows; None: all T_k.
        cu_seqlens_padded: int32 [N+1]: storage boundaries; None: cu_seqlens.
        padding_mask: bool [T_q], True = padding; it outranks cu_seqlens.
        query_mode: "contiguous" (query_indices is one increasing interval) or "general" (any
            strictly increasing list: zigzag and striped context-parallel shards).
        lenient: allow documents of real length 0, as a fixed-length cu_seqlens has.
        capture_safe: no synchronisation: sizes follow from shapes alone, bad contents set `status`
            and make every row empty (include/flashdsa/metadata.h).
        key_sources: False leaves key_source_indices out of a capture-safe build.
        backend, threads, check: as in `attention_forward`.

    Raises:
        TypeError: wrong framework or dtype, max_seqlen of another type.
        ValueError: everything else that section 2 of docs/spec.md lists, a total_key_tokens that is
            no int included.
        RuntimeError: no backend takes the tensors, out of memory, a failing device.

    Source: section 2 of docs/spec.md, include/flashdsa/metadata.h.
    """
    name = "prepare_packed_metadata"
    framework = framework_of(name, "cu_seqlens", cu_seqlens)
    if not isinstance(query_mode, str) or query_mode not in QUERY_MODES:
        raise ValueError(f"{name}: query_mode must be contiguous or general, got {query_mode!r}")
    parts = framework.run(
        _prepare, name, _INPUTS, (cu_seqlens, query_indices, cu_seqlens_padded, padding_mask),
        _total_key_tokens(name, total_key_tokens), _max_seqlen(name, max_seqlen),
        QUERY_MODES[query_mode], _checks.boolean(name, "lenient", lenient),
        _checks.boolean(name, "capture_safe", capture_safe),
        _checks.boolean(name, "key_sources", key_sources),
        *_checks.options(name, backend, threads, check))
    *tensors, numbers = parts[:]  # a slice costs a third of iterating over tvm-ffi's array
    *tensors, status = map(framework.result, tensors)
    max_seqlen_q, max_seqlen_k, total, all_nonempty = numbers
    return PackedMetadata(*tensors, max_seqlen_q, max_seqlen_k, total, all_nonempty == 1, status)


# The reference module raises ValueError here whatever is wrong, the type included.
def _total_key_tokens(operation: str, value: Any) -> int:
    if not _checks.is_integer(value):
        raise ValueError(f"{operation}: total_key_tokens must be an int, "
                         f"got {_checks.type_name(value)}")
    return _checks.integer(operation, "total_key_tokens", value, 1, MAX_KEYS)


def _max_seqlen(operation: str, value: Any) -> Optional[int]:
    if value is None:
        return None
    if hasattr(value, "dtype") and not _checks.is_integer(value):
        dtype = str(value.dtype).rpartition(".")[2]
        if dtype not in ("int32", "int64") or len(value.shape) != 0:
            raise ValueError(f"{operation}: max_seqlen must be an int or an int32 or int64 tensor "
                             f"[], got {dtype} {list(value.shape)}")
        value = int(value)
    return _checks.integer(operation, "max_seqlen", value, -_checks.INT64_MAX, _checks.INT64_MAX)
