"""PyTorch's tensors. Imported when the first one is seen, so that the package needs no PyTorch.

Tensors travel through the exchange interface of DLPack, which brings PyTorch's current stream and
its allocator along.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from ._frameworks import Framework


def is_plain(kind: type) -> bool:
    """Whether a type's objects are their memory. Subclasses may be anything: a fake tensor has
    none, a distributed one only a part."""
    return kind is torch.Tensor or kind is torch.nn.Parameter


class TorchFramework(Framework):
    kind = "torch.Tensor"
    int32, float32, float64 = torch.int32, torch.float32, torch.float64

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device=like.device)

    def run(self, function: Callable[..., Any], operation: str, names: Sequence[str],
            tensors: Sequence[Any], *scalars: Any) -> Any:
        for position, tensor in enumerate(tensors):
            if tensor is None:
                continue
            if type(tensor) is not torch.Tensor and not is_plain(type(tensor)):
                self.refuse(operation, names, position, tensor)
            if tensor.is_neg():  # DLPack would hand out the memory without the sign
                raise ValueError(f"{operation}: {names[position]} must not be a lazily negated "
                                 "view, call resolve_neg() first")
        try:
            return function(*tensors, 0, *scalars)
        except (BufferError, RuntimeError):
            self.explain(operation, names, tensors)
            raise

    def explain(self, operation: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Raises the error of the tensor that PyTorch did not hand out, if that was the reason."""
        for name, tensor in zip(names, tensors):
            if tensor is None:
                continue
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                raise TypeError(f"{operation}: {name} must be a plain torch.Tensor, got one of a "
                                "transform of torch.func")
            if tensor.is_quantized:
                raise TypeError(f"{operation}: {name} must not be quantised, got {tensor.dtype}")
            if tensor.layout != torch.strided:
                raise ValueError(f"{operation}: {name} must be a strided tensor, "
                                 f"got layout {tensor.layout}")
            if tensor.device.type not in ("cpu", "cuda"):
                raise ValueError(f"{operation}: {name} must be in host memory or on a CUDA device, "
                                 f"got {tensor.device}")

    def result(self, tensor: Any) -> Any:
        return tensor


TORCH = TorchFramework()
