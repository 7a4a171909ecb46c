"""The functions of cuDNN Frontend's `cudnn.DSA`.

Where an argument tunes the original's kernels (block sizes, stages), it is accepted and has no
effect; an argument that asks for something else than FlashDSA computes is refused by its name.
`stream` is a CUDA stream's handle or a torch.cuda.Stream; None: PyTorch's current stream.
"""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _checks
from .._attention import attention_backward
from .._few_rows import FEW_ROWS
from .._indexer import MAX_TOPK
from ..torch._operators import require_tensors
from ._dense_scores import dense_scores
from ._dense_topk import dense_topk
from ._segments import require_bounds, segments_of
from ._support import Result, on_stream, readable, refuse


def indexer_forward_wrapper(
        q: Tensor, k: Tensor, w: Tensor, ratio: int = 4, qhead_per_kv_head: Optional[int] = None,
        m_block_size: int = 128, n_block_size: int = 128, q_stage: int = 2, kv_stage: int = 4,
        sm_scale: float = 1.0, out: Optional[Tensor] = None, stream: Any = None,
        cu_seqlens_q: Optional[Tensor] = None, cu_seqlens_k: Optional[Tensor] = None,
        max_seqlen_q: Optional[int] = None, max_seqlen_k: Optional[int] = None,
        q_causal_offsets: Optional[Tensor] = None, precision: str = "bf16",
        q_scale: Optional[Tensor] = None, k_scale: Optional[Tensor] = None,
        cu_seqlens_q_scale_padded: Optional[Tensor] = None,
        cu_seqlens_k_scale_padded: Optional[Tensor] = None, sf_vec_size: int = 32,
        return_lse: bool = False, lse_out: Optional[Tensor] = None) -> Result:
    """The indexer's scores as a dense matrix.

    ::

        scores[t,s] = sm_scale * sum_h w[t,h] * max(0, dot(q[t,h,:], k[s,:]))

    for the first q_causal_offsets[segment] + row + 1 keys of a row's segment, -inf elsewhere.

    Args:
        q: bfloat16 [T_q, H, 128], or without cu_seqlens [B, S_q, H, 128]; H in 1..64.
        k: bfloat16 [T_k, 1, 128], or [B, S_k, 1, 128].
        w: bfloat16 or float32 [T_q, H], or [B, S_q, H].
        ratio: 1.
        qhead_per_kv_head: H, or None.
        sm_scale: positive and finite.
        out: float32, of the result's shape, to write into.
        cu_seqlens_q, cu_seqlens_k: int32 [S+1], bounds of the segments of packed rows and keys.
        max_seqlen_q, max_seqlen_k: longest segments, ints; needed beside cu_seqlens.
        q_causal_offsets: int32 [S] (or [B]), position of a segment's first query among its keys;
            None: 0.
        precision: "bf16".
        q_scale, k_scale, cu_seqlens_q_scale_padded, cu_seqlens_k_scale_padded: None.
        sf_vec_size, return_lse, lse_out: as they are by default.
        m_block_size, n_block_size, q_stage, kv_stage: no effect.
        stream: a CUDA stream's handle or a torch.cuda.Stream; None: PyTorch's current stream.

    Returns:
        scores: float32 [T_q, max_seqlen_k] in columns of the segment, or [B, S_q, S_k].

    Raises:
        TypeError: wrong dtypes, max_seqlen_k not an int. ValueError: wrong shapes or devices, a
        value that is not served. RuntimeError: no backend takes the tensors.
    """
    name = "indexer_forward_wrapper"
    refuse(name, ratio=(ratio, 1), precision=(str(precision).lower(), "bf16"),
           q_scale=(q_scale, None), k_scale=(k_scale, None), sf_vec_size=(sf_vec_size, 32),
           return_lse=(return_lse, False), lse_out=(lse_out, None),
           cu_seqlens_q_scale_padded=(cu_seqlens_q_scale_padded, None),
           cu_seqlens_k_scale_padded=(cu_seqlens_k_scale_padded, None))
    require_tensors(name, ("q", "k", "w", "out", "cu_seqlens_q", "cu_seqlens_k",
                           "q_causal_offsets"),
                    (q, k, w, out, cu_seqlens_q, cu_seqlens_k, q_causal_offsets), optional=4)
    if qhead_per_kv_head is not None and q.dim() >= 3 and qhead_per_kv_head != q.shape[-2]:
        raise ValueError(f"{name}: qhead_per_kv_head must be H = {q.shape[-2]}, "
                         f"got {qhead_per_kv_head!r}")
    with on_stream(stream, q, k, w, out, cu_seqlens_q, cu_seqlens_k, q_causal_offsets):
        return Result(scores=dense_scores(name, q, k, w, _scale(name, "sm_scale", sm_scale), out,
                                          cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                          q_causal_offsets))


def indexer_top_k_wrapper(input_values: Tensor, seq_lens: Tensor, top_k: int, next_n: int = 1,
                          return_val: bool = True, num_copy_bits: int = 256, stream: Any = None,
                          tie_break: int = 0, deterministic: bool = False) -> Result:
    """The top_k largest of the first columns of every row, exactly.

    Larger values first, NaN above +inf, -0 equal to +0, of equal values the smaller column
    (tie_break 2: the larger). Always deterministic. -inf inside the columns is a value as others.

    Args:
        input_values: float32, float16 or bfloat16 [n_rows, columns].
        seq_lens: int32 [n_rows / next_n]; row r of a group of next_n sees the first
            seq_lens - next_n + r + 1 columns.
        top_k: 1..2048.
        return_val: return values too.
        tie_break: 0 or 1 (the smaller column), 2 (the larger).
        num_copy_bits, deterministic: no effect.
        stream: as in `indexer_forward_wrapper`.

    Returns:
        indices: int32 [n_rows, top_k], ascending, then -1.
        values: the dtype of input_values, in the same order, then -inf; None without return_val.

    Raises:
        TypeError: wrong dtypes, top_k or next_n not an int. ValueError: wrong shapes or ranges.
    """
    name = "indexer_top_k_wrapper"
    require_tensors(name, ("input_values", "seq_lens"), (input_values, seq_lens))
    if input_values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"{name}: input_values must be float32, float16 or bfloat16, "
                        f"got {input_values.dtype}")
    if seq_lens.dtype != torch.int32:
        raise TypeError(f"{name}: seq_lens must be int32, got {seq_lens.dtype}")
    width = _checks.integer(name, "top_k", top_k, 1, MAX_TOPK)
    group = _checks.integer(name, "next_n", next_n, 1, 2**31 - 1)
    larger = _checks.integer(name, "tie_break", tie_break, 0, 2) == 2
    if input_values.dim() != 2 or seq_lens.dim() != 1 or (
            input_values.shape[0] != seq_lens.shape[0] * group):
        raise ValueError(f"{name}: input_values must be [seq_lens * next_n, columns] = "
                         f"[{seq_lens.numel()} * {group}, columns], got "
                         f"{list(input_values.shape)} and seq_lens {list(seq_lens.shape)}")
    _require_device(name, "seq_lens", seq_lens, "input_values", input_values)
    with on_stream(stream, input_values, seq_lens):
        rows = torch.arange(input_values.shape[0], device=seq_lens.device)
        lengths = seq_lens[:, None].expand(-1, group).flatten().long() - group + 1 + rows % group
        indices, values = dense_topk(input_values, lengths, width, larger)
        return Result(indices=indices, values=values if return_val else None)


def sparse_attention_backward_wrapper(
        q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
        attn_sink: Optional[Tensor], topk_idxs: Tensor, softmax_scale: Optional[float] = None,
        topk_length: Optional[Tensor] = None, dq: Optional[Tensor] = None,
        dkv: Optional[Tensor] = None, block_tile: int = 64, stream: Any = None, *,
        deterministic: bool = False, workspace: Optional[Tensor] = None,
        q_cluster_mode: str = "off") -> Result:
    """Gradients of sparse MLA attention: `flashdsa.attention_backward`.

    Args:
        q: bfloat16 [T_q, H, d], d 576 or 512, H in 1..128.
        kv: bfloat16 [T_k, d].
        out, dout: bfloat16 [T_q, H, 512].
        lse: float32 [T_q, H], natural logarithm, without the sink.
        attn_sink: float32 [H], -inf for no sink.
        topk_idxs: int32 [T_q, K], K in 1..2048; slots outside 0..T_k-1 do not count.
        softmax_scale: None: d^-0.5.
        topk_length: int32 [T_q], only the first slots of a row exist.
        dq, dkv: to write into, of q's and kv's shape and dtype.
        deterministic: same bits on every run; also with torch.use_deterministic_algorithms.
        block_tile, workspace, q_cluster_mode: no effect.
        stream: as in `indexer_forward_wrapper`.

    Returns:
        dq like q, dkv like kv, d_sink float32 [H].

    Raises:
        TypeError, ValueError, RuntimeError: as `flashdsa.attention_backward`.
    """
    name = "sparse_attention_backward_wrapper"
    require_tensors(name, ("q", "kv", "out", "dout", "lse", "topk_idxs", "attn_sink", "topk_length",
                           "dq", "dkv"),
                    (q, kv, out, dout, lse, topk_idxs, attn_sink, topk_length, dq, dkv), optional=4)
    if kv.dim() != 2 or topk_idxs.dim() != 2:
        raise ValueError(f"{name}: kv must be [T_k, d] and topk_idxs [T_q, K], got "
                         f"{list(kv.shape)} and {list(topk_idxs.shape)}")
    if softmax_scale is None:
        softmax_scale = kv.shape[1]**-0.5
    _check_result(name, "dq", dq, q)
    _check_result(name, "dkv", dkv, kv)
    fixed_order = (bool(deterministic) or torch.are_deterministic_algorithms_enabled()
                   or topk_idxs.shape[0] <= FEW_ROWS)
    with on_stream(stream, q, kv, out, dout, lse, topk_idxs, attn_sink, topk_length, dq, dkv):
        grads = attention_backward(
            readable(q), readable(kv)[:, None], readable(topk_idxs)[:, None], softmax_scale,
            readable(out), readable(lse), readable(dout),
            None if topk_length is None else topk_length.contiguous(),
            None if attn_sink is None else attn_sink.contiguous(),
            deterministic=fixed_order)
        return Result(dq=_deliver(grads.grad_q, dq), dkv=_deliver(grads.grad_kv[:, 0], dkv),
                      d_sink=grads.grad_attn_sink)


def compactify_wrapper(indices: Tensor, stream: Any = None) -> Result:
    """Moves the slots >= 0 of every row to its front, in their order.

    Args:
        indices: int32 [rows, K], or [B, S, K], which counts as [B*S, K].
        stream: as in `indexer_forward_wrapper`.

    Returns:
        indices: int32 [rows, K], -1 behind the valid slots.
        topk_length: int32 [rows], the number of valid slots.

    Raises:
        TypeError: indices not int32. ValueError: another rank.
    """
    name = "compactify_wrapper"
    require_tensors(name, ("indices",), (indices,))
    if indices.dtype != torch.int32:
        raise TypeError(f"{name}: indices must be int32, got {indices.dtype}")
    if indices.dim() not in (2, 3):
        raise ValueError(f"{name}: indices must be [rows, K] or [B, S, K], "
                         f"got {list(indices.shape)}")
    with on_stream(stream, indices):
        rows = indices.reshape(math.prod(indices.shape[:-1]), indices.shape[-1])
        hole = rows < 0
        order = hole.to(torch.uint8).sort(dim=1, stable=True).indices
        return Result(indices=rows.gather(1, order).clamp_(min=-1),
                      topk_length=(~hole).sum(1, dtype=torch.int32))


def local_to_global_wrapper(local_indices: Tensor, seqlen_k: int,
                            cu_seqlens_q: Optional[Tensor] = None,
                            cu_seqlens_k: Optional[Tensor] = None, stream: Any = None) -> Result:
    """Columns of a segment's keys as rows of the whole key tensor.

    Args:
        local_indices: int32 or int64 [T_q, K] beside cu_seqlens; [B, S_q, K] without, where batch b
            starts at b * seqlen_k.
        seqlen_k: keys of one batch; not read beside cu_seqlens.
        cu_seqlens_q, cu_seqlens_k: int32 [S+1], bounds of the segments of rows and of keys.
        stream: as in `indexer_forward_wrapper`.

    Returns:
        indices: int32, of the same shape; -1 where a slot is negative.

    Raises:
        TypeError: wrong dtypes, seqlen_k not an int. ValueError: wrong shapes, one cu_seqlens
        without the other, tensors on two devices.
    """
    name = "local_to_global_wrapper"
    require_tensors(name, ("local_indices", "cu_seqlens_q", "cu_seqlens_k"),
                    (local_indices, cu_seqlens_q, cu_seqlens_k), optional=2)
    if local_indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: local_indices must be int32 or int64, got {local_indices.dtype}")
    length = _checks.integer(name, "seqlen_k", seqlen_k, 0, 2**31 - 1)
    packed = require_bounds(name, local_indices, cu_seqlens_q, cu_seqlens_k)
    if local_indices.dim() != (2 if packed else 3):
        shape = "[T_q, K] beside cu_seqlens" if packed else "[B, S_q, K] without cu_seqlens"
        raise ValueError(f"{name}: local_indices must be {shape}, got {list(local_indices.shape)}")
    with on_stream(stream, local_indices, cu_seqlens_q, cu_seqlens_k):
        if packed:
            first = cu_seqlens_k[segments_of(local_indices.shape[0], cu_seqlens_q)][:, None]
        else:
            batch = torch.arange(local_indices.shape[0], device=local_indices.device)
            first = (batch * length)[:, None, None]
        moved = local_indices + first
        return Result(indices=moved.masked_fill(local_indices < 0, -1).to(torch.int32))


def _scale(operation: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{operation}: {name} must be a float or an int, "
                        f"got {_checks.type_name(value)}")
    if not 0 < value < math.inf:
        raise ValueError(f"{operation}: {name} must be positive and finite, got {value}")
    return float(value)


def _require_device(operation: str, name: str, tensor: Tensor, first: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{operation}: {name} must be on {like.device} as {first} is, "
                         f"got {tensor.device}")


def _check_result(operation: str, name: str, given: Optional[Tensor], like: Tensor) -> None:
    if given is not None and (given.shape != like.shape or given.dtype != like.dtype
                              or given.device != like.device):
        raise ValueError(f"{operation}: {name} must be {like.dtype} {list(like.shape)} on "
                         f"{like.device}, got {given.dtype} {list(given.shape)} on {given.device}")


def _deliver(result: Tensor, given: Optional[Tensor]) -> Tensor:
    """The result in the caller's tensor, when there is one."""
    return result if given is None else given.copy_(result)
