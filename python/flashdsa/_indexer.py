"""The lightning indexer's selection of keys, and the gradient of the selected scores."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _checks
from ._frameworks import framework_of
from ._library import library

MAX_TOPK = 2048
MAX_HEADS = 64
INDEX_DIM = 128

_topk = library.indexer_topk
_backward = library.indexer_backward

INPUTS = ("index_q", "index_k", "head_weights", "starts", "causal_lengths")
BACKWARD_INPUTS = ("index_q", "index_k", "head_weights", "topk_indices", "grad_scores",
                   "topk_length")


class Selection(NamedTuple):
    """Result of `indexer_topk`."""

    topk_indices: Any
    """int32 [T_q, 1, K]: storage rows of the selected keys, strictly ascending, then -1"""
    topk_length: Any
    """int32 [T_q]: how many keys a row selected, min(K, its visible keys)"""
    topk_scores: Any
    """float32 [T_q, K] in the order of the indices, then -inf; None unless asked for"""


class IndexerGradients(NamedTuple):
    """Result of `indexer_backward`."""

    grad_index_q: Any
    """bfloat16 [T_q, H_index, 128]"""
    grad_index_k: Any
    """bfloat16 or float32 [T_k, 128]"""
    grad_head_weights: Any
    """float32 or bfloat16 [T_q, H_index], as head_weights"""


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


def indexer_backward(index_q: Any, index_k: Any, head_weights: Any, topk_indices: Any,
                     grad_scores: Any, topk_length: Optional[Any] = None, *,
                     grad_index_k_float32: bool = False, backend: str = "auto", threads: int = 0,
                     check: Optional[bool] = None) -> IndexerGradients:
    """Gradients of the scores that `indexer_topk` selected.

    ::

        dot = dot(index_q[t,h,:], index_k[i_j,:]),   f = grad_scores[t,j] * head_weights[t,h] where
            dot > 0, else 0 (at 0 and for NaN too)
        grad_head_weights[t,h] = sum_j grad_scores[t,j] * max(0, dot)
        grad_index_q[t,h,:] = sum_j f * index_k[i_j,:]
        grad_index_k[s,:] = sum over the slots that hold s of f * index_q[t,h,:]

    A key in two slots counts twice. Rows of grad_index_k that nobody selected are zero; a row
    without keys contributes nothing. The same bits on every run and for any threads.

    Args:
        index_q, index_k, head_weights: as in `indexer_topk`.
        topk_indices: int32 [T_q, 1, K], K in 1..2048, rows of index_k; slots outside 0..T_k-1 (-1
            for one) do not count, whatever grad_scores holds there.
        grad_scores: float32 [T_q, K], by slot; its last axis is contiguous.
        topk_length: int32 [T_q], only the first slots of a row exist; None: all.
        grad_index_k_float32: grad_index_k in float32, for a sum over ranks, instead of index_k's
            dtype.
        backend, threads, check: as in `attention_forward`. In this version "sm90" has none.

    Raises:
        TypeError, ValueError, RuntimeError: as `indexer_topk`.

    Not recorded by PyTorch's autograd; the scores of `flashdsa.torch.indexer_topk` are.
    Source: section 3 of docs/spec.md, include/flashdsa/indexer.h.
    """
    name = "indexer_backward"
    framework = framework_of(name, "index_q", index_q)
    keep = _checks.boolean(name, "grad_index_k_float32", grad_index_k_float32)
    rows, heads, dim = _checks.sizes(index_q, 3)
    if heads > MAX_HEADS or dim != INDEX_DIM:  # refused by the library, without memory for it
        rows, heads, dim = 0, 0, 0
    keys = _checks.sizes(index_k, 2)
    if keys[1] != INDEX_DIM:
        keys = 0, 0
    grad_q = framework.empty(index_q, (rows, heads, dim), index_q.dtype)
    grad_k = framework.empty(index_q, keys, framework.float32 if keep else index_q.dtype)
    # By name: the library refuses head_weights of another framework or dtype.
    narrow = str(getattr(head_weights, "dtype", "")) == str(index_q.dtype)
    grad_weights = framework.empty(index_q, (rows, heads),
                                   index_q.dtype if narrow else framework.single(index_q))
    framework.run(_backward, name, BACKWARD_INPUTS,
                  (index_q, index_k, head_weights, topk_indices, grad_scores, topk_length, grad_q,
                   grad_k, grad_weights),
                  *_checks.options(name, backend, threads, check))
    return IndexerGradients(framework.result(grad_q), framework.result(grad_k),
                            framework.result(grad_weights))


def rows_of(operation: str, packed_metadata: Any) -> tuple[Any, Any, int]:
    try:
        return (packed_metadata.starts, packed_metadata.causal_lengths,
                packed_metadata.total_key_tokens)
    except AttributeError:
        raise TypeError(f"{operation}: packed_metadata must be a PackedMetadata, "
                        f"got {_checks.type_name(packed_metadata)}") from None
