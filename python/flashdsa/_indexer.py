"""The lightning indexer's selection of keys."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _checks
from ._frameworks import framework_of
from ._library import library

MAX_TOPK = 2048

_topk = library.indexer_topk

INPUTS = ("index_q", "index_k", "head_weights", "starts", "causal_lengths")


class Selection(NamedTuple):
    """Result of `indexer_topk`."""

    topk_indices: Any
    """int32 [T_q, 1, K]: storage rows of the selected keys, strictly ascending, then -1"""
    topk_length: Any
    """int32 [T_q]: how many keys a row selected, min(K, its visible keys)"""
    topk_scores: Any
    """float32 [T_q, K] in the order of the indices, then -inf; None unless asked for"""


def indexer_topk(index_q: Any, index_k: Any, head_weights: Any, packed_metadata: Any,
                 index_topk: int, *, return_scores: bool = False, backend: str = "auto",
                 threads: int = 0, check: Optional[bool] = None) -> Selection:
    """Selects the min(index_topk, visible) best visible keys of every query row.

    ::

        score[t,s] = sum_h head_weights[t,h] * max(0, dot(index_q[t,h,:], index_k[s,:]))

    Higher scores first, NaN above +inf, -0 equal to +0, the smaller key among equals. The result of
    a row depends on nothing but the row and its visible keys, bit for bit. Rows that see no more
    than index_topk keys compute no score unless scores are asked for.

    Args:
        index_q: bfloat16 [T_q, H_index, 128], H_index in 1..64 (or float64, as index_k).
        index_k: bfloat16 [T_k, 128].
        head_weights: float32 or bfloat16 [T_q, H_index], scaled by the caller; used as they are.
        packed_metadata: PackedMetadata, or any object with its starts, causal_lengths and
            total_key_tokens; total_key_tokens must be T_k.
        index_topk: K, width of the selection, 1..2048.
        return_scores: return topk_scores too.
        backend, threads, check: as in `attention_forward`; checked is that every row's keys lie
            inside of index_k.

    Raises:
        TypeError: wrong framework or dtype, index_topk not an int.
        ValueError: wrong shape, stride or device, index_topk outside 1..2048, metadata of another
            T_q or T_k, bad contents when checking.
        RuntimeError: no backend takes the tensors, out of memory, a failing device.

    Source: section 3 of docs/spec.md, include/flashdsa/indexer.h.
    """
    name = "indexer_topk"
    framework = framework_of(name, "index_q", index_q)
    starts, lengths, total = rows_of(name, packed_metadata)
    width = _checks.integer(name, "index_topk", index_topk, 1, MAX_TOPK)
    rows = _checks.sizes(index_q, 3)[0]
    if _checks.sizes(starts, 1)[0] != rows:  # refused by the library; ask for no memory before that
        rows = 0
    indices = framework.empty(index_q, (rows, 1, width), framework.int32)
    length = framework.empty(index_q, (rows,), framework.int32)
    scores = None
    if _checks.boolean(name, "return_scores", return_scores):
        scores = framework.empty(index_q, (rows, width), framework.single(index_q))
    framework.run(_topk, name, INPUTS,
                  (index_q, index_k, head_weights, starts, lengths, indices, length, scores),
                  total, *_checks.options(name, backend, threads, check))
    return Selection(framework.result(indices), framework.result(length), framework.result(scores))


def rows_of(operation: str, packed_metadata: Any) -> tuple[Any, Any, int]:
    try:
        return (packed_metadata.starts, packed_metadata.causal_lengths,
                packed_metadata.total_key_tokens)
    except AttributeError:
        raise TypeError(f"{operation}: packed_metadata must be a PackedMetadata, "
                        f"got {_checks.type_name(packed_metadata)}") from None
