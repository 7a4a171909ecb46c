"""What FlashDSA and every peer are to the benchmark."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, NamedTuple

from torch import Tensor

from .errors import CompareError
from .workloads import Problem, Selection


class Forward(NamedTuple):
    """Result of a forward call."""

    out: Tensor
    """bfloat16 [T_q, H, 512]"""
    lse: Tensor
    """float32 [T_q, H], natural logarithm"""


class Gradients(NamedTuple):
    """Result of a backward call."""

    grad_q: Tensor
    """bfloat16 [T_q, H, D]"""
    grad_kv: Tensor
    """bfloat16 [T_k, 1, D]"""


class NotInstalledError(Exception):
    """Why a peer cannot run; the text stands in the place of its version."""


class Library:
    """One implementation. Of the three calls it has those that `operations` names; a call takes
    and returns what its own convention does not need to differ from, and converts the rest inside
    of its time."""

    name: str
    operations: tuple[str, ...]

    def load(self) -> str:
        """Imports the library and returns its version; raises NotInstalledError."""
        raise NotImplementedError

    def refusal(self, operation: str, problem: Problem) -> str:
        """Why it does not take a problem; empty: it does."""
        return ""

    def topk(self, problem: Problem, metadata: Any) -> Selection:
        raise NotImplementedError

    def forward(self, problem: Problem, selection: Selection) -> Forward:
        raise NotImplementedError

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        raise NotImplementedError

    def prepare(self, problem: Problem, selection: Selection) -> Selection:
        """What is done once for all layers that share a selection."""
        return selection


def load_name(module: str, name: str, package: str, calls: tuple[str, ...] = ()
              ) -> tuple[Any, str]:
    """`name` of an installed module, which must have `calls`, and the version of the package that
    it belongs to. A stand-in of FlashDSA's own is refused: it would be timed beside itself."""
    try:
        value = getattr(importlib.import_module(module), name)
        parts = [value, *(getattr(value, call) for call in calls)]
    except Exception as error:  # whatever another library raises
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = f"{module}.{name} does not load: {error}".splitlines()[0]
        raise NotInstalledError("not installed" if absent else reason) from None
    if any(map(_is_ours, parts)):
        raise CompareError(f"peer {module} must be another library, got the stand-in that "
                           "flashdsa.compat.install() registered")
    try:
        return value, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return value, "unknown"


def _is_ours(value: Any) -> bool:
    origin = getattr(getattr(value, "__spec__", None), "origin", None)
    owner = getattr(value, "__module__", None) or ""
    return origin == "flashdsa.compat" or owner.split(".")[0] == "flashdsa"


def padded_heads(tensor: Tensor, heads: int) -> Tensor:
    """A copy of [T_q, H, ...] with heads of zeros up to `heads`; without a copy where it has as
    many."""
    if tensor.shape[1] == heads:
        return tensor
    padded = tensor.new_zeros((tensor.shape[0], heads, *tensor.shape[2:]))
    padded[:, :tensor.shape[1]] = tensor
    return padded


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
