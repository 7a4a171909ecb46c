"""The two kernel calls under the reference module's names."""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .. import _checks
from .._few_rows import FEW_ROWS
from .._info import backends
from ..torch import indexer_topk, sparse_attention
from ..torch._operators import require_tensors
from ._metadata import (CudnnDsaPackedMetadata, _unpack_packed_metadata,
                        prepare_cudnn_dsa_packed_metadata)

_INDEXER = "cudnn_indexer_topk"
_ATTENTION = "cudnn_sparse_attention"

_DEVICE_BACKENDS = ("sm90", "sm80")


def is_cudnn_dsa_available() -> bool:
    """Whether a GPU is present that this build has kernels for."""
    if torch.compiler.is_compiling():  # a trace sees no more; the operators refuse what they cannot
        return torch.cuda.is_available()
    return _device_is_present()


@functools.lru_cache(maxsize=None)
def _device_is_present() -> bool:
    return any(backend.available for backend in backends() if backend.name in _DEVICE_BACKENDS)


def cudnn_indexer_topk(index_q: Tensor, index_k: Tensor, head_weights: Tensor, cu_seqlens: Tensor,
                       index_topk: int, query_indices: Optional[Tensor] = None,
                       cu_seqlens_padded: Optional[Tensor] = None,
                       packed_metadata: Optional[CudnnDsaPackedMetadata] = None) -> Tensor:
    """The lightning indexer's selection for packed THD rows on a GPU.

    `flashdsa.torch.indexer_topk` with float32 head_weights rounded to bfloat16 first.

    Args:
        index_q: bfloat16 [T_q, H_index, 128], H_index in 1..64.
        index_k: bfloat16 [T_k, 128], T_k < 2^31 - 1.
        head_weights: float32 or bfloat16 [T_q, H_index], scaled by the caller.
        cu_seqlens: int32 [N+1], real lengths summed up.
        index_topk: K, width of the selection, 1..2048.
        query_indices, cu_seqlens_padded: as in `prepare_cudnn_dsa_packed_metadata`.
        packed_metadata: of that function. With it nothing is built and nothing waits for the
            device; without it the metadata is built from the arguments before it.

    Returns:
        int32 [T_q, 1, K]: storage rows of the selected keys, ascending, then -1.

    Raises:
        RuntimeError: no GPU with kernels, a tensor that is not on a GPU.
        TypeError: index_topk not an int, wrong dtypes, packed_metadata of another type.
        ValueError: index_topk out of range, wrong shapes, tensors on several devices, wrong
            contents of the metadata.

    Source: section 3 of docs/spec.md.
    """
    _require_available(_INDEXER)
    names = ("index_q", "index_k", "head_weights", "cu_seqlens")
    tensors = (index_q, index_k, head_weights, cu_seqlens)
    require_tensors(_INDEXER, names, tensors)
    _require_gpu(_INDEXER, names, tensors)
    _require_bfloat16(_INDEXER, names[:2], tensors[:2])
    if head_weights.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"{_INDEXER}: head_weights must be float32 or bfloat16 [T_q, H_index], "
                        f"got {head_weights.dtype}")
    if not _checks.is_integer(index_topk):  # before metadata is built
        raise TypeError(f"{_INDEXER}: index_topk must be an int, "
                        f"got {_checks.type_name(index_topk)}")
    if index_q.dim() != 3 or index_k.dim() != 2:
        raise ValueError(f"{_INDEXER}: index_q must be [T_q, H_index, 128] and index_k [T_k, 128], "
                         f"got {list(index_q.shape)} and {list(index_k.shape)}")
    if packed_metadata is None:
        packed_metadata = prepare_cudnn_dsa_packed_metadata(
            cu_seqlens, index_k.shape[0], query_indices=query_indices,
            cu_seqlens_padded=cu_seqlens_padded)
    else:
        packed_metadata = _unpack_packed_metadata(
            packed_metadata, total_query_tokens=index_q.shape[0],
            total_key_tokens=index_k.shape[0], device=index_q.device)
    return indexer_topk(_readable(index_q), _readable(index_k),
                        _readable(head_weights.to(torch.bfloat16)), _rows_of(packed_metadata),
                        index_topk).topk_indices


class _Rows(NamedTuple):
    """What the indexer reads of metadata."""

    starts: Tensor
    causal_lengths: Tensor
    total_key_tokens: int


def _rows_of(meta: CudnnDsaPackedMetadata) -> _Rows:
    lengths = meta.causal_lengths
    if not meta.all_rows_nonempty:  # a replaced query_valid counts, as in the reference module
        lengths = lengths.masked_fill(~meta.query_valid, 0)
    return _Rows(meta.starts, lengths, meta.total_key_tokens)


def cudnn_sparse_attention(q: Tensor, kv_latent: Tensor, topk_indices: Tensor,
                           softmax_scale: float, topk_length: Optional[Tensor] = None,
                           all_rows_nonempty: bool = False,
                           valid_row_indices: Optional[Tensor] = None) -> Tensor:
    """Sparse MLA attention on a GPU, differentiable in q and kv_latent.

    `flashdsa.torch.sparse_attention`. Same bits on every run when
    torch.are_deterministic_algorithms_enabled().

    Args:
        q: bfloat16 [T_q, H, 576], H in 1..128 (or 512 channels, as kv_latent).
        kv_latent: bfloat16 [T_k, 1, 576]; the value of a key is its first 512 channels.
        topk_indices: int32 [T_q, 1, K], K in 1..2048; slots outside 0..T_k-1 do not count.
        softmax_scale: factor of the logits, positive and finite.
        topk_length: int32 [T_q], contiguous: only the first slots of a row exist.
        all_rows_nonempty: every row has a key. Checked only against valid_row_indices: rows without
            keys give out 0 and gradients 0 in any case.
        valid_row_indices: int64 [T_valid], contiguous, the rows with keys. Checked, not needed.

    Returns:
        bfloat16 [T_q, H, 512].

    Raises:
        RuntimeError: no GPU with kernels, a tensor that is not on a GPU.
        TypeError: wrong dtypes, a softmax_scale that is no finite number, all_rows_nonempty not a
            bool.
        ValueError: wrong shapes, softmax_scale <= 0, K out of range, tensors on several devices,
            topk_length not int32 [T_q], valid_row_indices not int64, beside all_rows_nonempty or
            without topk_length.

    Source: sections 5 and 6 of docs/spec.md.
    """
    _require_available(_ATTENTION)
    names = ("q", "kv_latent", "topk_indices")
    tensors = (q, kv_latent, topk_indices)
    require_tensors(_ATTENTION, (*names, "topk_length", "valid_row_indices"),
                    (*tensors, topk_length, valid_row_indices), optional=2)
    _require_gpu(_ATTENTION, names, tensors)
    _require_bfloat16(_ATTENTION, names[:2], tensors[:2])
    if topk_indices.dtype != torch.int32:
        raise TypeError(f"{_ATTENTION}: topk_indices must be int32 [T_q, 1, K], "
                        f"got {topk_indices.dtype}")
    _checks.boolean(_ATTENTION, "all_rows_nonempty", all_rows_nonempty)
    if topk_length is not None:
        _require_vector("topk_length", topk_length, torch.int32, q)
    _check_valid_rows(valid_row_indices, topk_length, all_rows_nonempty, q)
    few = q.dim() == 3 and q.shape[0] <= FEW_ROWS
    return sparse_attention(_readable(q), _readable(kv_latent), _readable(topk_indices),
                            softmax_scale, topk_length, deterministic=True if few else None)


def _check_valid_rows(valid_row_indices: Optional[Tensor], topk_length: Optional[Tensor],
                      all_rows_nonempty: bool, q: Tensor) -> None:
    if valid_row_indices is None:
        return
    if all_rows_nonempty:
        raise ValueError(f"{_ATTENTION}: valid_row_indices must be None when all_rows_nonempty is "
                         "True")
    if topk_length is None:
        raise ValueError(f"{_ATTENTION}: valid_row_indices must come with topk_length")
    _require_vector("valid_row_indices", valid_row_indices, torch.int64, q)
    rows, count = q.shape[0], valid_row_indices.shape[0]
    if count > rows:
        raise ValueError(f"{_ATTENTION}: valid_row_indices must have at most T_q = {rows} entries, "
                         f"got {count}")


def _require_available(operation: str) -> None:
    if not is_cudnn_dsa_available():
        raise RuntimeError(f"{operation}: expected a GPU that this build has kernels for, found "
                           f"none: {_reasons()}")


def _reasons() -> str:
    return ", ".join(f"{backend.name}: {backend.detail}" for backend in backends()
                     if backend.name in _DEVICE_BACKENDS)


def _require_gpu(operation: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    device = tensors[0].device
    for name, tensor in zip(names, tensors):
        if not tensor.is_cuda:
            raise RuntimeError(f"{operation}: {name} must be on a CUDA device, got {tensor.device}")
        if tensor.device != device:
            raise ValueError(f"{operation}: {name} must be on {device} as {names[0]} is, "
                             f"got {tensor.device}")


def _require_bfloat16(operation: str, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(names, tensors):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{operation}: {name} must be bfloat16, got {tensor.dtype}")


def _require_vector(name: str, tensor: Tensor, dtype: torch.dtype, q: Tensor) -> None:
    """One contiguous axis, where the reference module raises ValueError for the dtype too."""
    if (tensor.dtype != dtype or tensor.dim() != 1 or tensor.device != q.device
            or not tensor.is_contiguous()):
        raise ValueError(f"{_ATTENTION}: {name} must be contiguous {dtype} with one axis on "
                         f"{q.device}, got {tensor.dtype} {list(tensor.shape)} with strides "
                         f"{list(tensor.stride())} on {tensor.device}")


def _readable(tensor: Tensor) -> Tensor:
    """The library takes any strides but on the last axis."""
    if tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()
