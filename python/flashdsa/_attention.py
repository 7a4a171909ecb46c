"""Sparse MLA attention, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _checks
from ._frameworks import framework_of
from ._library import library
from ._plan import SelectionPlan, parts_of, shape_of

VALUE_DIM = 512
MAX_HEADS = 128

_forward = library.attention_forward
_backward = library.attention_backward

INPUTS = ("q", "kv", "topk_indices", "topk_length", "attn_sink", "plan.storage")
BACKWARD_INPUTS = (*INPUTS, "out", "lse", "grad_out")


class AttentionForward(NamedTuple):
    """Result of `attention_forward`."""

    out: Any
    """bfloat16 [T_q, H, 512]"""
    lse: Any
    """float32 [T_q, H], natural logarithm, without the sink"""
    max_logits: Any
    """float32 [T_q, H], the largest scaled logit without the sink; None unless asked for"""


class AttentionGradients(NamedTuple):
    """Result of `attention_backward`."""

    grad_q: Any
    """bfloat16 [T_q, H, D]"""
    grad_kv: Any
    """bfloat16 or float32 [T_k, 1, D]"""
    grad_attn_sink: Any
    """float32 [H]; None without attn_sink"""


def attention_forward(q: Any, kv: Any, topk_indices: Any, softmax_scale: float,
                      topk_length: Optional[Any] = None, attn_sink: Optional[Any] = None, *,
                      return_max_logits: bool = False, plan: Optional[SelectionPlan] = None,
                      backend: str = "auto", threads: int = 0, deterministic: bool = False,
                      invariant: bool = False, check: Optional[bool] = None) -> AttentionForward:
    """Sparse MLA attention of every query row over its own selection of keys.

    ::

        S[t,h,j] = softmax_scale * dot(q[t,h,:], kv[i_j,:]),   P = softmax_j(S, and the sink)
        out[t,h,:] = sum_j P[t,h,j] * kv[i_j,:512],   lse[t,h] = ln sum_j exp(S[t,h,j])

    A key in two slots counts twice. A row without keys gives out 0, lse -inf, max_logits -inf.
    All tensors are arrays of one framework on one device; float64 throughout is taken by the
    reference backend. Inputs may have any strides but on the last axis, which is contiguous.

    Args:
        q: bfloat16 [T_q, H, D], H in 1..128, D 576 (512 latent and 64 rope channels) or 512.
        kv: bfloat16 [T_k, 1, D]; the value of a key is its first 512 channels.
        topk_indices: int32 [T_q, 1, K], K in 1..2048, rows of kv; slots outside 0..T_k-1 (-1 for
            one) do not count.
        softmax_scale: factor of the logits, positive and finite.
        topk_length: int32 [T_q], only the first slots of a row exist; None: all.
        attn_sink: float32 [H], logit of a virtual key of value zero; None: no such key.
        return_max_logits: compute max_logits too.
        plan: of `build_selection_plan` for this selection and number of heads; None: every row
            alone. Refused when its T_q, K, T_k or G are others. Whether the selection still holds
            what it held at the build is not looked at: with other contents the results are
            unspecified.
        backend: "auto", "cpu", "reference", "sm90" or "sm80"; auto is the best that the device has.
        threads: threads of a host call; 0: as many as the process may run.
        deterministic: same bits on every run and stream.
        invariant: deterministic, and a row's result does not depend on the other rows.
        check: report bad contents of topk_indices and topk_length with their row; None: as the
            environment variable FLASHDSA_CHECK says (1: yes).

    Raises:
        TypeError: wrong framework or dtype, a softmax_scale that is no finite number, a plan that
            is no SelectionPlan.
        ValueError: wrong shape, stride or device, a softmax_scale <= 0, a plan of other sizes, bad
            contents when checking.
        RuntimeError: no backend takes the tensors, out of memory, a failing device.

    Not recorded by PyTorch's autograd; `flashdsa.torch.sparse_attention` is.
    Source: section 5 of docs/spec.md, include/flashdsa/attention.h.
    """
    name = "attention_forward"
    framework = framework_of(name, "q", q)
    rows, heads, _ = _sizes_of(q)
    single = framework.single(q)
    out = framework.empty(q, (rows, heads, VALUE_DIM), q.dtype)
    lse = framework.empty(q, (rows, heads), single)
    max_logits = None
    storage, sizes = parts_of(name, plan)
    if _checks.boolean(name, "return_max_logits", return_max_logits):
        max_logits = framework.empty(q, (rows, heads), single)
    framework.run(_forward, name, INPUTS,
                  (q, kv, topk_indices, topk_length, attn_sink, storage, out, lse, max_logits),
                  _checks.scale(name, softmax_scale), shape_of(name, sizes),
                  *_checks.options(name, backend, threads, check, deterministic, invariant))
    return AttentionForward(framework.result(out), framework.result(lse),
                            framework.result(max_logits))


def attention_backward(q: Any, kv: Any, topk_indices: Any, softmax_scale: float, out: Any, lse: Any,
                       grad_out: Any, topk_length: Optional[Any] = None,
                       attn_sink: Optional[Any] = None, *, grad_kv_float32: bool = False,
                       plan: Optional[SelectionPlan] = None, backend: str = "auto",
                       threads: int = 0, deterministic: bool = False, invariant: bool = False,
                       check: Optional[bool] = None) -> AttentionGradients:
    """Gradients of `attention_forward`.

    ::

        D[t,h] = sum_c grad_out*out,   dS = P * (grad_out . value - D) * softmax_scale
        grad_q[t,h,:] = sum_j dS * kv[i_j,:]
        grad_kv[s,:] = sum over the slots that hold s of dS * q[t,h,:], plus P * grad_out[t,h,:] on
            the first 512 channels
        grad_attn_sink[h] = - sum_t P_sink * D

    Rows of grad_kv that nobody selected are zero; a row without keys contributes nothing.

    Args:
        q, kv, topk_indices, softmax_scale, topk_length, attn_sink, plan: as in the forward call;
            a plan may be given here alone too.
        out: bfloat16 [T_q, H, 512], of the forward call.
        lse: float32 [T_q, H], of the forward call.
        grad_out: bfloat16 [T_q, H, 512]; its last axis is contiguous.
        grad_kv_float32: grad_kv in float32, for a sum over ranks, instead of kv's dtype.
        backend, threads, deterministic, invariant, check: as in `attention_forward`. By default the
            backward may use atomics on a GPU.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention_forward`.

    Source: section 6 of docs/spec.md, include/flashdsa/attention.h.
    """
    name = "attention_backward"
    framework = framework_of(name, "q", q)
    keep = _checks.boolean(name, "grad_kv_float32", grad_kv_float32)
    grad_q = framework.empty(q, _sizes_of(q), q.dtype)
    grad_kv = framework.empty(q, _checks.sizes(kv, 3), framework.float32 if keep else q.dtype)
    grad_attn_sink = None
    storage, sizes = parts_of(name, plan)
    if attn_sink is not None:
        grad_attn_sink = framework.empty(q, _checks.sizes(attn_sink, 1), framework.single(q))
    framework.run(_backward, name, BACKWARD_INPUTS,
                  (q, kv, topk_indices, topk_length, attn_sink, storage, out, lse, grad_out, grad_q,
                   grad_kv, grad_attn_sink),
                  _checks.scale(name, softmax_scale), shape_of(name, sizes),
                  *_checks.options(name, backend, threads, check, deterministic, invariant))
    return AttentionGradients(framework.result(grad_q), framework.result(grad_kv),
                              framework.result(grad_attn_sink))


def _sizes_of(q: Any) -> tuple[int, ...]:
    """The shape of q, as results have it; zeros when the library will refuse it, so that a wrong
    shape asks for no memory."""
    shape = _checks.sizes(q, 3)
    return shape if shape[1] <= MAX_HEADS else (0, 0, 0)
