"""What the operators share: their library, argument checks, PyTorch's switches."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .._checks import type_name

# Kept for the life of the process: an operator goes when its library does.
LIBRARY = torch.library.Library("flashdsa", "DEF")

# Compiled code hands over the strides that eager code would have.
TAGS = (torch.Tag.pt2_compliant_tag,
        getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """A new operator: its kernel for tensors of any device, and what it makes of fake ones."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=TAGS)
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, kernel, "CUDA")
    torch.library.register_fake(f"flashdsa::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.flashdsa, name).default


def require_tensors(operation: str, names: Sequence[str], tensors: Sequence[Any],
                    optional: int = 0) -> None:
    """TypeError for what is no tensor of PyTorch; the last `optional` may be None."""
    required = len(tensors) - optional
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or position < required):
            raise TypeError(f"{operation}: {names[position]} must be a torch.Tensor, "
                            f"got {type_name(tensor)}")
        if type(tensor) is FakeTensor:
            _require_fake(operation, names, tensors, tensor)


def _require_fake(operation: str, names: Sequence[str], tensors: Sequence[Any],
                  fake: FakeTensor) -> None:
    """TypeError for a tensor with memory beside `fake`, unless its mode takes them together."""
    if fake.fake_mode.allow_non_fake_inputs:
        return
    for name, tensor in zip(names, tensors):
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
            raise TypeError(f"{operation}: {name} must be a fake tensor as others are, "
                            f"got {type_name(tensor)}")


def require_device(operation: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """ValueError for a tensor on another device than the first, where the library, which checks
    this, is not called: of fake tensors and those on the meta device."""
    device = tensors[0].device
    for name, tensor in zip(names, tensors):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{operation}: {name} must be on {device} as {names[0]} is, "
                             f"got {tensor.device}")


def is_deterministic(deterministic: Optional[bool]) -> bool:
    """The caller's wish, or PyTorch's switch when there is none."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return deterministic
