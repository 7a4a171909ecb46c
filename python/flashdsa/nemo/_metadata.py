"""Packed metadata under the reference module's names."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .. import _checks
from .._metadata import prepare_packed_metadata
from .._selection import compact_and_sort
from ..torch._operators import require_tensors

_BUILD = "prepare_cudnn_dsa_packed_metadata"


@dataclasses.dataclass(frozen=True)
class CudnnDsaPackedMetadata:
    """Where every local query row finds its keys, in padded-storage rows, and the segments of rows
    that share a document. The fields are those of `flashdsa.PackedMetadata`, in the same order."""

    starts: Tensor
    causal_lengths: Tensor
    query_valid: Tensor
    valid_row_indices: Optional[Tensor]
    segment_cu_q: Tensor
    segment_cu_k: Tensor
    q_causal_offsets: Tensor
    key_source_indices: Optional[Tensor]
    max_seqlen_q: int
    max_seqlen_k: int
    total_key_tokens: int
    all_rows_nonempty: bool


_FIELDS = tuple(field.name for field in dataclasses.fields(CudnnDsaPackedMetadata))


def prepare_cudnn_dsa_packed_metadata(
        cu_seqlens: Tensor, total_key_tokens: int,
        max_seqlen: Optional[Union[int, Tensor]] = None, *,
        query_indices: Optional[Tensor] = None, cu_seqlens_padded: Optional[Tensor] = None,
        padding_mask: Optional[Tensor] = None) -> CudnnDsaPackedMetadata:
    """Builds the metadata of packed THD rows, once for all layers.

    `flashdsa.prepare_packed_metadata` with one contiguous interval of queries, on the device of
    cu_seqlens, the host included. On a GPU it waits for the device once.

    Args:
        cu_seqlens: int32 [N+1], contiguous: real lengths summed up.
        total_key_tokens: T_k, rows of the gathered, padded storage, 1..2^31-2.
        max_seqlen: an int, or an int32 or int64 tensor of one element; checked to be the largest
            real length.
        query_indices: int32 or int64 [T_q], storage positions of the local rows; None: all T_k.
        cu_seqlens_padded: int32 [N+1], storage boundaries; None: cu_seqlens.
        padding_mask: bool [T_q], True = padding.

    Raises:
        TypeError: cu_seqlens or cu_seqlens_padded not int32, query_indices not int32 or int64,
            max_seqlen of another type.
        ValueError: everything else: another shape, device or stride, a padding_mask that is not
            bool, a total_key_tokens that is not a positive int, wrong contents.

    Source: section 2 of docs/spec.md.
    """
    require_tensors(_BUILD, ("cu_seqlens", "query_indices", "cu_seqlens_padded", "padding_mask"),
                    (cu_seqlens, query_indices, cu_seqlens_padded, padding_mask), optional=3)
    if padding_mask is not None and padding_mask.dtype != torch.bool:
        raise ValueError(f"{_BUILD}: padding_mask must be bool [T_q], got {padding_mask.dtype}")
    maxima = None
    if isinstance(max_seqlen, Tensor):
        _check_max_seqlen(max_seqlen)
        if max_seqlen.is_cuda and _is_packed(cu_seqlens):
            maxima, max_seqlen = _Maxima(max_seqlen, cu_seqlens), None
        else:
            max_seqlen = int(max_seqlen)
    rows = prepare_packed_metadata(cu_seqlens, total_key_tokens, max_seqlen,
                                   query_indices=query_indices,
                                   cu_seqlens_padded=cu_seqlens_padded, padding_mask=padding_mask)
    if maxima is not None:
        maxima.check()
    return CudnnDsaPackedMetadata(*(getattr(rows, name) for name in _FIELDS))


def _check_max_seqlen(max_seqlen: Tensor) -> None:
    if max_seqlen.numel() != 1 or max_seqlen.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{_BUILD}: max_seqlen must be an int or an int32 or int64 tensor of one "
                         f"element, got {max_seqlen.dtype} {list(max_seqlen.shape)}")


def _is_packed(cu_seqlens: Tensor) -> bool:
    """Whether there are real lengths on a GPU to compare with; others the build refuses."""
    return (cu_seqlens.is_cuda and cu_seqlens.dtype == torch.int32 and cu_seqlens.dim() == 1
            and cu_seqlens.numel() >= 2)


class _Maxima:
    """A max_seqlen on the GPU beside the largest real length, on their way to the host while the
    metadata is built, so that the build's wait is the only one."""

    def __init__(self, max_seqlen: Tensor, cu_seqlens: Tensor):
        largest = (cu_seqlens[1:] - cu_seqlens[:-1]).max()
        given = max_seqlen.reshape(()).to(cu_seqlens.device, torch.int64)
        self.pair = torch.empty(2, dtype=torch.int64, pin_memory=True)
        self.pair.copy_(torch.stack((given, largest.long())), non_blocking=True)
        self.arrived = torch.cuda.current_stream(cu_seqlens.device).record_event()

    def check(self) -> None:
        self.arrived.synchronize()
        given, largest = self.pair.tolist()
        if given != largest:
            raise ValueError(f"{_BUILD}: max_seqlen must be the largest real length {largest}, "
                             f"got {given}")


def _unpack_packed_metadata(packed_metadata: CudnnDsaPackedMetadata, *, total_query_tokens: int,
                            total_key_tokens: int, device: torch.device) -> CudnnDsaPackedMetadata:
    """`packed_metadata` unchanged, checked against a call's sizes without a look at the device.

    Raises:
        TypeError: packed_metadata of another type, all_rows_nonempty not a bool.
        ValueError: a field of another shape, dtype, device or stride, or fields that disagree.
    """
    meta = packed_metadata
    if not isinstance(meta, CudnnDsaPackedMetadata):
        raise TypeError("packed_metadata must be a CudnnDsaPackedMetadata, "
                        f"got {_checks.type_name(meta)}")
    if meta.all_rows_nonempty is not True and meta.all_rows_nonempty is not False:
        raise TypeError("packed all_rows_nonempty must be a bool, "
                        f"got {_checks.type_name(meta.all_rows_nonempty)}")
    rows = total_query_tokens
    _check_field(meta, "starts", torch.int32, rows, device)
    _check_field(meta, "causal_lengths", torch.int32, rows, device)
    _check_field(meta, "query_valid", torch.bool, rows, device)
    _check_valid_rows(meta, device)
    _check_segments(meta, device)
    if meta.key_source_indices is not None:
        _check_field(meta, "key_source_indices", torch.int64, None, device)
    if meta.total_key_tokens != total_key_tokens:
        raise ValueError(f"packed total_key_tokens must be {total_key_tokens}, "
                         f"got {meta.total_key_tokens}")
    return meta


def _check_valid_rows(meta: CudnnDsaPackedMetadata, device: torch.device) -> None:
    if not meta.all_rows_nonempty:
        _check_field(meta, "valid_row_indices", torch.int64, None, device)
    elif meta.valid_row_indices is not None:
        raise ValueError("packed valid_row_indices must be None when all_rows_nonempty is True")


def _check_segments(meta: CudnnDsaPackedMetadata, device: torch.device) -> None:
    _check_field(meta, "segment_cu_q", torch.int32, None, device)
    bounds = meta.segment_cu_q.numel()
    if bounds < 2:
        raise ValueError(f"packed segment_cu_q must have at least 2 entries, got {bounds}")
    _check_field(meta, "segment_cu_k", torch.int32, bounds, device)
    _check_field(meta, "q_causal_offsets", torch.int32, bounds - 1, device)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(meta, name)
        if not _checks.is_integer(value) or value <= 0:
            raise ValueError(f"packed {name} must be a positive int, got {value!r}")


def _check_field(meta: CudnnDsaPackedMetadata, name: str, dtype: torch.dtype,
                 length: Optional[int], device: torch.device) -> None:
    """A field must be a contiguous tensor of one axis; length None: of any length."""
    field: Any = getattr(meta, name)
    if (isinstance(field, Tensor) and field.dtype == dtype and field.dim() == 1
            and length in (None, field.shape[0]) and field.device == device
            and field.is_contiguous()):
        return
    kind = str(dtype).rpartition(".")[2]
    want = "" if length is None else length
    got = _checks.type_name(field)
    if isinstance(field, Tensor):
        got = (f"{field.dtype} {list(field.shape)} with strides {list(field.stride())} "
               f"on {field.device}")
    raise ValueError(f"packed {name} must be contiguous {kind} [{want}] on {device}, got {got}")


def _compact_and_sort_indices(indices: Tensor, key_count: int) -> tuple[Tensor, Tensor]:
    """Index rows [T, K] in canonical form, int32, and the int32 [T] number of valid slots."""
    if indices.dtype == torch.int64:  # what int32 cannot hold is no key
        valid = (indices >= 0) & (indices < key_count)
        indices = indices.where(valid, -1).to(torch.int32)
    return tuple(compact_and_sort(indices, key_count))
