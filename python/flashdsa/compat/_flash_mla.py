"""FlashMLA's sparse forward."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from .._attention import VALUE_DIM, attention_forward
from ..torch._operators import require_tensors
from ._support import readable, refuse

_NAME = "flash_mla_sparse_fwd"


def flash_mla_sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512,
                         attn_sink: Optional[Tensor] = None, topk_length: Optional[Tensor] = None,
                         *, indexer_topk: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """`flashdsa.attention_forward` in FlashMLA's convention.

    Args:
        q: bfloat16 [s_q, h_q, d], d 576 or 512, h_q in 1..128.
        kv: bfloat16 [s_kv, 1, d].
        indices: int32 [s_q, 1, topk], topk in 1..2048; -1 and numbers >= s_kv do not count.
        sm_scale: factor of the logits, positive and finite.
        d_v: 512.
        attn_sink: float32 [h_q]; multiplies the output by exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: int32 [s_q], only the first slots of a row exist.
        indexer_topk: 0.

    Returns:
        (output bfloat16 [s_q, h_q, 512], max_logits float32 [s_q, h_q], lse float32 [s_q, h_q]).
        lse is the natural logarithm, without the sink. A row without keys gives output 0,
        max_logits -inf and lse +inf.

    Raises:
        TypeError: wrong dtypes, a sm_scale that is no finite number.
        ValueError: wrong shapes or devices, sm_scale <= 0, another d_v or indexer_topk.
        RuntimeError: no backend takes the tensors, out of memory, a failing device.
    """
    require_tensors(_NAME, ("q", "kv", "indices", "attn_sink", "topk_length"),
                    (q, kv, indices, attn_sink, topk_length), optional=2)
    refuse(_NAME, d_v=(d_v, VALUE_DIM), indexer_topk=(indexer_topk, 0))
    with torch.no_grad():
        out, lse, max_logits = attention_forward(
            readable(q), readable(kv), readable(indices), sm_scale,
            None if topk_length is None else topk_length.contiguous(),
            None if attn_sink is None else attn_sink.contiguous(), return_max_logits=True,
            deterministic=torch.are_deterministic_algorithms_enabled())
        return out, max_logits, lse.masked_fill_(lse == -math.inf, math.inf)
