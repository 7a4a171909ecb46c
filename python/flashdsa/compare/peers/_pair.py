"""FlashMLA's forward between cuDNN's indexer and backward, as NeMo AutoModel joins them."""

from __future__ import annotations

from typing import Any

from ..library import Forward, Gradients, Library
from ..workloads import Problem, Selection
from ._cudnn import Cudnn
from ._flash_mla import FlashMla


class FlashMlaAndCudnn(Library):
    """For the whole step, which neither has alone."""

    name = "flash_mla+cudnn"
    operations = ("step",)

    def __init__(self) -> None:
        self._flash_mla, self._cudnn = FlashMla(), Cudnn()

    def load(self) -> str:
        return f"{self._flash_mla.load()}+{self._cudnn.load()}"

    def refusal(self, operation: str, problem: Problem) -> str:
        return self._cudnn.refusal("topk", problem)

    def topk(self, problem: Problem, metadata: Any) -> Selection:
        return self._cudnn.topk(problem, metadata)

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        return self._flash_mla.forward(problem, selection)

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        return self._cudnn.backward(problem, selection, forward)
