"""Packed rows and the segments that they lie in."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def require_bounds(operation: str, like: Tensor, cu_seqlens_q: Optional[Tensor],
                   cu_seqlens_k: Optional[Tensor]) -> bool:
    """Whether a call is packed. TypeError or ValueError for bounds that are none."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return False
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError(f"{operation}: cu_seqlens_q and cu_seqlens_k must be given both or "
                         "neither")
    for name, bounds in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if bounds.dtype != torch.int32:
            raise TypeError(f"{operation}: {name} must be int32 [S+1], got {bounds.dtype}")
        if bounds.dim() != 1 or bounds.numel() < 2 or bounds.shape != cu_seqlens_q.shape:
            raise ValueError(f"{operation}: {name} must be int32 [S+1] with S >= 1 and as long as "
                             f"cu_seqlens_q, got {list(bounds.shape)}")
        if bounds.device != like.device:
            raise ValueError(f"{operation}: {name} must be on {like.device}, got {bounds.device}")
    return True


def segments_of(rows: int, cu_seqlens: Tensor) -> Tensor:
    """The segment of each of `rows` packed rows, int64; the last one for rows behind its end."""
    position = torch.arange(rows, dtype=torch.int32, device=cu_seqlens.device)
    bounds = cu_seqlens.contiguous()
    return (torch.searchsorted(bounds, position, right=True) - 1).clamp_(0, bounds.numel() - 2)
