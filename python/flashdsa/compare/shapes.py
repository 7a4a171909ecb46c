"""Sizes of the models."""

from __future__ import annotations

import dataclasses
from typing import Optional

VALUE_DIM = 512
_YARN = 1.3688879454113936  # 0.1 ln 40 + 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one rank's call."""

    name: str
    heads: int
    index_heads: int
    softmax_scale: float
    topk: int = 2048
    head_dim: int = 576
    rows: Optional[int] = None
    """T_q, of a context-parallel rank"""
    keys: Optional[int] = None
    """T_k, likewise; other workloads do not have this shape"""

    def full_name(self, t_k: int) -> str:
        """With the number of keys, as in a record: "glm5.2-8k"."""
        return f"{self.name}-{t_k // 1024}k" if t_k % 1024 == 0 else f"{self.name}-{t_k}"


SHAPES = {
    "glm5.2": Shape("glm5.2", 64, 32, 0.0625),
    "glm5.2-tp8": Shape("glm5.2-tp8", 8, 32, 0.0625),
    "glm5.2-cp8-32k": Shape("glm5.2-cp8", 64, 32, 0.0625, rows=4096, keys=32768),
    "dsv3.2": Shape("dsv3.2", 128, 64, _YARN * _YARN / 192**0.5),
}
