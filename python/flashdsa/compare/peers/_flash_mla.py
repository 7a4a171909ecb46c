"""FlashMLA's sparse forward. https://github.com/deepseek-ai/FlashMLA"""

from __future__ import annotations

from ..library import Forward, Library, load_name, padded_heads, round_up
from ..shapes import VALUE_DIM
from ..workloads import Problem, Selection

_HEADS = 64  # the kernel takes multiples of it


class FlashMla(Library):
    """A number of heads that is no multiple of 64 is filled up with zeros: q is copied, and out and
    lse are cut, on every call."""

    name = "flash_mla"
    operations = ("forward",)

    def load(self) -> str:
        self._forward, version = load_name("flash_mla", "flash_mla_sparse_fwd", "flash_mla")
        return version

    def refusal(self, operation: str, problem: Problem) -> str:
        return "" if problem.device.type == "cuda" else "needs a GPU"

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        heads = problem.shape.heads
        out, _, lse = self._forward(padded_heads(problem.q, round_up(heads, _HEADS)), problem.kv,
                                    selection.topk_indices, problem.shape.softmax_scale,
                                    d_v=VALUE_DIM, topk_length=selection.topk_length)
        return Forward(out[:, :heads].contiguous(), lse[:, :heads].contiguous())
