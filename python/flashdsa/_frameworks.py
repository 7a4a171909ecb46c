"""How arrays of each framework get into a call of the library, and results out of it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from typing import Any, Callable, Sequence

import numpy as np
import tvm_ffi
from ml_dtypes import bfloat16

from ._checks import type_name
from ._library import library

# DLPack's device types.
HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost
CUDA = 2


class Framework(ABC):
    """One array library. A call asks it for memory for the results and lets it run the function."""

    kind: str  # how sentences name its arrays
    int32: Any
    float32: Any
    float64: Any

    @abstractmethod
    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        """Memory for a result on the device of `like`."""

    @abstractmethod
    def run(self, function: Callable[..., Any], operation: str, names: Sequence[str],
            tensors: Sequence[Any], *scalars: Any) -> Any:
        """Calls function(*tensors, mask, *scalars); `names` are those of the first tensors, which
        are the caller's, the rest come from `empty`. Bit i of mask: tensor i is BF16 as uint16."""

    @abstractmethod
    def result(self, tensor: Any) -> Any:
        """What `empty` or the library returned, as the caller shall see it. None stays None."""

    def single(self, like: Any) -> Any:
        """The dtype of statistics beside `like`: float64 beside float64, else float32."""
        return self.float64 if like.dtype == self.float64 else self.float32

    def refuse(self, operation: str, names: Sequence[str], position: int, array: Any) -> None:
        """Raises the TypeError of an array that is not of this framework."""
        name = names[position] if position < len(names) else "a result"
        raise TypeError(f"{operation}: {name} must be a {self.kind} as {names[0]} is, "
                        f"got {type_name(array)}")


class NumpyFramework(Framework):
    """NumPy arrays, with ml_dtypes' bfloat16, which travels as uint16."""

    kind = "numpy.ndarray"
    int32 = np.dtype(np.int32)
    float32 = np.dtype(np.float32)
    float64 = np.dtype(np.float64)

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        try:
            return np.empty(shape, dtype)
        except MemoryError as error:
            raise RuntimeError(
                f"flashdsa: expected memory for a result, got none: {error}") from None

    def run(self, function: Callable[..., Any], operation: str, names: Sequence[str],
            tensors: Sequence[Any], *scalars: Any) -> Any:
        mask = 0
        arguments = []
        position = 0
        try:
            for array in tensors:
                if array is not None:
                    if type(array) is not np.ndarray and not is_numpy(type(array)):
                        self.refuse(operation, names, position, array)
                    if array.dtype.type is bfloat16:
                        array = array.view(np.uint16)
                        mask |= 1 << position
                    if not array.flags.writeable:
                        array = readable(array)
                arguments.append(array)
                position += 1
            return function(*arguments, mask, *scalars)
        except BufferError as error:
            self.explain(operation, names, tensors)
            raise ValueError(f"{operation}: {error}") from None

    def explain(self, operation: str, names: Sequence[str], tensors: Sequence[Any]) -> None:
        """Raises the error of the array that NumPy did not hand out."""
        for name, array in zip(names, tensors):
            if array is None or array.dtype.type is bfloat16:
                continue
            if array.dtype.kind not in "biufc" or not array.dtype.isnative:
                raise TypeError(f"{operation}: {name} must be an array of numbers in native byte "
                                f"order, got dtype {array.dtype}")
            if array.dtype.itemsize > 8 and array.dtype.kind == "f":
                raise TypeError(f"{operation}: {name} must be an array of numbers of at most 64 "
                                f"bits, got dtype {array.dtype}")
            if any(stride % array.dtype.itemsize for stride in array.strides):
                raise ValueError(f"{operation}: {name} must have strides of whole elements, got "
                                 f"{array.strides} bytes for dtype {array.dtype}")

    def result(self, tensor: Any) -> Any:
        if not isinstance(tensor, tvm_ffi.Tensor):
            return tensor
        array = np.from_dlpack(tensor)
        return array if array.flags.writeable else array.copy()  # read-only before NumPy 2.1


def is_numpy(kind: type) -> bool:
    """Whether a type's objects are plain memory; a masked array is more than its memory."""
    return issubclass(kind, np.ndarray) and not issubclass(kind, np.ma.MaskedArray)


class _Writable:
    """The memory of a read-only array, without the mark, which NumPy would not export."""

    def __init__(self, array: np.ndarray):
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = array


def readable(array: np.ndarray) -> np.ndarray:
    """A read-only array as one that DLPack hands out. The library does not write into inputs."""
    return np.asarray(_Writable(array)) if array.dtype.kind in "biufc" else array


class DlpackFramework(Framework):
    """Any other arrays with __dlpack__ in host memory (JAX, tvm_ffi).

    Results are allocated by the library and then handed over: such arrays may not be written into,
    JAX's for one.
    """

    int32, float32, float64 = "int32", "float32", "float64"

    def __init__(self, array: Any):
        self.array_type = type(array)
        self.kind = type_name(array)
        namespace = getattr(array, "__array_namespace__", None)
        self.from_dlpack: Callable[[Any], Any] = lambda tensor: tensor
        if namespace is not None:
            self.from_dlpack = namespace().from_dlpack

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        return library.allocate(str(dtype), tvm_ffi.Shape(shape))

    def run(self, function: Callable[..., Any], operation: str, names: Sequence[str],
            tensors: Sequence[Any], *scalars: Any) -> Any:
        for position, array in enumerate(tensors[:len(names)]):
            if array is None:
                continue
            if type(array) is not self.array_type:
                self.refuse(operation, names, position, array)
            if array.__dlpack_device__()[0] not in HOST_DEVICES:
                raise TypeError(f"{operation}: {names[position]} must be a torch.Tensor or a "
                                f"cupy.ndarray to be on a GPU, got {self.kind}")
        return function(*tensors, 0, *scalars)

    def single(self, like: Any) -> Any:
        return self.float64 if str(like.dtype) == self.float64 else self.float32

    def result(self, tensor: Any) -> Any:
        return self.from_dlpack(tensor) if isinstance(tensor, tvm_ffi.Tensor) else tensor


class CupyFramework(Framework):
    """CuPy's arrays, on CuPy's current stream. BF16 travels as uint16, as NumPy's does."""

    kind = "cupy.ndarray"
    int32, float32, float64 = NumpyFramework.int32, NumpyFramework.float32, NumpyFramework.float64

    def __init__(self) -> None:
        self.cupy = sys.modules["cupy"]

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        with like.device:
            return self.cupy.empty(shape, dtype)

    def run(self, function: Callable[..., Any], operation: str, names: Sequence[str],
            tensors: Sequence[Any], *scalars: Any) -> Any:
        mask = 0
        arguments = []
        for position, array in enumerate(tensors):
            if array is not None:
                if type(array) is not self.cupy.ndarray:
                    self.refuse(operation, names, position, array)
                if array.dtype == bfloat16:
                    array = array.view(np.uint16)
                    mask |= 1 << position
            arguments.append(array)
        device = tensors[0].device
        with device, tvm_ffi.use_raw_stream(tvm_ffi.device(CUDA, device.id),
                                            self.cupy.cuda.get_current_stream().ptr):
            return function(*arguments, mask, *scalars)

    def result(self, tensor: Any) -> Any:
        return self.cupy.from_dlpack(tensor) if isinstance(tensor, tvm_ffi.Tensor) else tensor


# What an array of an unknown framework must have.
ARRAY_PARTS = ("__dlpack__", "__dlpack_device__", "shape", "dtype")

_FRAMEWORKS: dict[type, Framework] = {np.ndarray: NumpyFramework()}


def framework_of(operation: str, name: str, array: Any) -> Framework:
    """The framework of a call's first array. TypeError for what is no array."""
    framework = _FRAMEWORKS.get(type(array))
    if framework is None:
        framework = _FRAMEWORKS[type(array)] = _new_framework(operation, name, array)
    return framework


def _new_framework(operation: str, name: str, array: Any) -> Framework:
    kind = type(array)
    if is_numpy(kind):
        return _FRAMEWORKS[np.ndarray]
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        from ._torch_framework import TORCH, is_plain

        if not is_plain(kind):
            raise TypeError(f"{operation}: {name} must be a plain torch.Tensor, "
                            f"got {type_name(array)}")
        return TORCH
    cupy = sys.modules.get("cupy")
    if cupy is not None and kind is cupy.ndarray:
        return CupyFramework()
    if not issubclass(kind, np.ndarray) and all(hasattr(array, part) for part in ARRAY_PARTS):
        return DlpackFramework(array)
    raise TypeError(f"{operation}: {name} must be a numpy.ndarray, a torch.Tensor or another array "
                    f"with __dlpack__, got {type_name(array)}")
