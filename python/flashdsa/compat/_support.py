"""What the calls share: their result type, refused arguments, the caller's stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

import torch
from torch import Tensor


class Result(dict):
    """Named results: result["name"], result.name, result[0], and unpacking in order. A name that a
    dict has itself, `values`, is reached by key or position."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return tuple(self.values())[key]
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no {name!r}, it has {', '.join(self.keys())}"
                                 ) from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def refuse(operation: str, **arguments: tuple[Any, Any]) -> None:
    """ValueError for the first argument that is not the only value that is served; each argument is
    given as (value, served value)."""
    for name, (value, served) in arguments.items():
        if type(value) is not type(served) or value != served:
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{operation}: {name} must be {served!r}, the only value that "
                             f"FlashDSA serves, got {got}")


def readable(tensor: Tensor) -> Tensor:
    """The library takes any strides but on the last axis."""
    if tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


@contextlib.contextmanager
def on_stream(stream: Any, *tensors: Optional[Tensor]) -> Iterator[None]:
    """Without autograd, and on the caller's stream: None for PyTorch's current one, a
    torch.cuda.Stream, or the handle of a stream, as cuda.bindings' CUstream is. The memory of
    `tensors` is not used again before the stream is done with it. On the host a stream means
    nothing."""
    with torch.no_grad():
        device = next(tensor for tensor in tensors if tensor is not None).device
        if stream is None or device.type != "cuda":
            yield
            return
        if not isinstance(stream, torch.cuda.Stream):
            stream = torch.cuda.ExternalStream(int(stream), device)
        with torch.cuda.stream(stream):
            yield
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
