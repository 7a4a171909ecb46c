"""Sparse MLA attention with autograd."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _checks
from .._attention import (BACKWARD_INPUTS, INPUTS, VALUE_DIM, attention_backward,
                          attention_forward)
from .._plan import SelectionPlan, from_parts, parts_of
from ._operators import LIBRARY, define, is_deterministic, require_device, require_tensors

_PLAN = "Tensor? plan, SymInt[]? plan_sizes"
_OPTIONS = "str backend, int threads, bool deterministic, bool invariant, bool? check"


def _forward(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
             topk_length: Optional[Tensor], attn_sink: Optional[Tensor], plan: Optional[Tensor],
             plan_sizes: Optional[list[int]], backend: str, threads: int, deterministic: bool,
             invariant: bool, check: Optional[bool]) -> tuple[Tensor, Tensor]:
    result = attention_forward(q, kv, topk_indices, softmax_scale, topk_length, attn_sink,
                               plan=from_parts(plan, plan_sizes), backend=backend, threads=threads,
                               deterministic=deterministic, invariant=invariant, check=check)
    return result.out, result.lse


def _fake_forward(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
                  topk_length: Optional[Tensor], attn_sink: Optional[Tensor],
                  plan: Optional[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    require_device("attention_forward", INPUTS,
                   (q, kv, topk_indices, topk_length, attn_sink, plan))
    rows, heads, _ = q.shape
    return q.new_empty(rows, heads, VALUE_DIM), _single(q, rows, heads)


def _backward(grad_out: Tensor, q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
              topk_length: Optional[Tensor], attn_sink: Optional[Tensor], plan: Optional[Tensor],
              plan_sizes: Optional[list[int]], out: Tensor, lse: Tensor, backend: str, threads: int,
              deterministic: bool, invariant: bool,
              check: Optional[bool]) -> tuple[Tensor, Tensor, Tensor]:
    # .sum().backward() hands out one number with strides of zero.
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    grads = attention_backward(q, kv, topk_indices, softmax_scale, out, lse, grad_out, topk_length,
                               attn_sink, plan=from_parts(plan, plan_sizes), backend=backend,
                               threads=threads, deterministic=deterministic, invariant=invariant,
                               check=check)
    if attn_sink is None:
        return grads.grad_q, grads.grad_kv, _single(q, 0)
    return grads


def _fake_backward(grad_out: Tensor, q: Tensor, kv: Tensor, topk_indices: Tensor,
                   softmax_scale: float, topk_length: Optional[Tensor],
                   attn_sink: Optional[Tensor], plan: Optional[Tensor], plan_sizes: Any,
                   out: Tensor, lse: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    require_device("attention_backward", BACKWARD_INPUTS,
                   (q, kv, topk_indices, topk_length, attn_sink, plan, out, lse, grad_out))
    heads = 0 if attn_sink is None else q.shape[1]
    return q.new_empty(q.shape), q.new_empty(kv.shape), _single(q, heads)


def _single(q: Tensor, *shape: int) -> Tensor:
    return q.new_empty(shape, dtype=q.dtype if q.dtype == torch.float64 else torch.float32)


_forward_op = define(
    "sparse_attention(Tensor q, Tensor kv, Tensor topk_indices, float softmax_scale, "
    f"Tensor? topk_length, Tensor? attn_sink, {_PLAN}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward, _fake_forward)

# The last result is empty without a sink.
_backward_op = define(
    "sparse_attention_backward(Tensor grad_out, Tensor q, Tensor kv, Tensor topk_indices, "
    f"float softmax_scale, Tensor? topk_length, Tensor? attn_sink, {_PLAN}, Tensor out, "
    f"Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _backward, _fake_backward)


class _SparseAttention(torch.autograd.Function):
    """Saves the caller's tensors as they are, so that layers with one selection share it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
                topk_length: Optional[Tensor], attn_sink: Optional[Tensor],
                plan: Optional[Tensor], plan_sizes: Optional[tuple[int, ...]],
                *options: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _forward_op(q, kv, topk_indices, softmax_scale, topk_length, attn_sink, plan,
                                   plan_sizes, *options)
        ctx.save_for_backward(q, kv, topk_indices, topk_length, attn_sink, plan, out, lse)
        ctx.softmax_scale = softmax_scale
        ctx.plan_sizes = plan_sizes
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Optional[Tensor], _: None) -> tuple[Any, ...]:
        grads: list[Any] = [None] * (8 + len(ctx.options))
        if grad_out is not None:
            q, kv, topk_indices, topk_length, attn_sink, plan, out, lse = ctx.saved_tensors
            grads[0], grads[1], grad_attn_sink = _backward_op(
                grad_out, q, kv, topk_indices, ctx.softmax_scale, topk_length, attn_sink, plan,
                ctx.plan_sizes, out, lse, *ctx.options)
            if attn_sink is not None:
                grads[5] = grad_attn_sink
        return tuple(grads)


# In place of torch.library.register_autograd, whose bookkeeping takes 45 microseconds a call.
def _autograd(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
              topk_length: Optional[Tensor], attn_sink: Optional[Tensor],
              *rest: Any) -> tuple[Tensor, Tensor]:
    # Forward-mode derivatives are refused there too.
    if forward_ad._current_level >= 0 or torch.is_grad_enabled() and (
            q.requires_grad or kv.requires_grad or (
                attn_sink is not None and attn_sink.requires_grad)):
        return _SparseAttention.apply(q, kv, topk_indices, softmax_scale, topk_length, attn_sink,
                                      *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op(q, kv, topk_indices, softmax_scale, topk_length, attn_sink, *rest)


LIBRARY.impl("sparse_attention", _autograd, "Autograd")


def sparse_attention(q: Tensor, kv: Tensor, topk_indices: Tensor, softmax_scale: float,
                     topk_length: Optional[Tensor] = None, attn_sink: Optional[Tensor] = None, *,
                     return_lse: bool = False, plan: Optional[SelectionPlan] = None,
                     backend: str = "auto", threads: int = 0, deterministic: Optional[bool] = None,
                     invariant: bool = False,
                     check: Optional[bool] = None) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """`flashdsa.attention_forward`, differentiable in q, kv and attn_sink.

    Under autocast, q and kv in float32 or float16 become autocast's dtype, attn_sink float32. Saved
    for the backward are q, kv, topk_indices, topk_length, attn_sink, the plan's storage, out and
    lse, none copied. The gradients have the dtypes of their tensors; a second derivative is
    refused.

    Args:
        q: bfloat16 [T_q, H, D], H in 1..128, D 576 or 512 (or float64 throughout).
        kv: bfloat16 [T_k, 1, D]; the value of a key is its first 512 channels.
        topk_indices: int32 [T_q, 1, K], K in 1..2048; slots outside 0..T_k-1 do not count.
        softmax_scale: factor of the logits, positive and finite.
        topk_length: int32 [T_q], only the first slots of a row exist.
        attn_sink: float32 [H], logit of a virtual key of value zero.
        return_lse: return (out, lse); lse is float32 [T_q, H] and not differentiable.
        plan: of `build_selection_plan` for this selection and number of heads, used by forward and
            backward; the layers that share the selection share it.
        deterministic: same bits on every run, forward and backward; None: what
            torch.are_deterministic_algorithms_enabled() says.
        backend, threads, invariant, check: as in `flashdsa.attention_forward`.

    Returns:
        out, bfloat16 [T_q, H, 512], or (out, lse).

    Raises:
        TypeError, ValueError, RuntimeError: as `flashdsa.attention_forward`; TypeError for a
        subclass of torch.Tensor that reaches the kernel.

    Source: sections 5 and 6 of docs/spec.md.
    """
    name = "attention_forward"
    storage, sizes = parts_of(name, plan)
    require_tensors(name, INPUTS, (q, kv, topk_indices, topk_length, attn_sink, storage),
                    optional=3)
    softmax_scale = _checks.scale(name, softmax_scale)
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, kv, attn_sink = autocast_inputs(q, kv, attn_sink)
    # Outside of a trace the first thing that the dispatcher does is skipped: calling _autograd.
    run = _forward_op if torch.compiler.is_compiling() else _autograd
    out, lse = run(q, kv, topk_indices, softmax_scale, topk_length, attn_sink, storage, sizes,
                   backend, threads, is_deterministic(deterministic), invariant, check)
    return (out, lse) if return_lse else out


def autocast_inputs(q: Tensor, kv: Tensor, attn_sink: Optional[Tensor]
                    ) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Arguments of the attention as autocast wants them."""
    dtype = torch.get_autocast_dtype(q.device.type)
    narrow = (torch.float32, torch.float16)
    if q.dtype in narrow:
        q = q.to(dtype)
    if kv.dtype in narrow:
        kv = kv.to(dtype)
    if attn_sink is not None and attn_sink.dtype in (torch.bfloat16, torch.float16):
        attn_sink = attn_sink.float()
    return q, kv, attn_sink
