"""What the library cannot see: kinds of Python objects, names of options."""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from typing import Any, Optional

# The values of flashdsa::Backend and flashdsa::Mode (include/flashdsa/runtime.h).
BACKENDS = {"auto": 0, "reference": 1, "cpu": 2, "sm90": 3, "sm80": 4}
DEFAULT, DETERMINISTIC, INVARIANT = 0, 1, 2

CHECK_VARIABLE = "FLASHDSA_CHECK"
INT64_MAX = 2**63 - 1


def type_name(value: Any) -> str:
    """The type of `value` as sentences name it: "list", "torch.Tensor"."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def integer(operation: str, name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int. TypeError for anything but an integer, ValueError outside low..high."""
    if not is_integer(value):
        raise TypeError(f"{operation}: {name} must be an int, got {type_name(value)}")
    number = int(value)
    if not low <= number <= high:
        raise ValueError(f"{operation}: {name} must be in {low}..{high}, got {number}")
    return number


def boolean(operation: str, name: str, value: Any) -> bool:
    if value is not True and value is not False:
        raise TypeError(f"{operation}: {name} must be a bool, got {type_name(value)}")
    return value


def scale(operation: str, value: Any) -> float:
    """A softmax scale as a float; the library refuses what is not positive."""
    if type(value) is not float:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(
                f"{operation}: softmax_scale must be a float or an int, got {type_name(value)}")
        value = float(value)
    if not -math.inf < value < math.inf:  # also of a symbol, which torch.compile may make of it
        raise TypeError(
            f"{operation}: softmax_scale must be a positive finite FP32 number, got {value}")
    return value


def checking(operation: str, check: Optional[bool]) -> bool:
    """Whether a call looks at its tensors' contents: `check`, or FLASHDSA_CHECK when it is None."""
    if check is not None:
        return boolean(operation, "check", check)
    text = os.environ.get(CHECK_VARIABLE)
    if not text or text == "0":
        return False
    if text != "1":
        raise ValueError(f"{operation}: {CHECK_VARIABLE} must be 0 or 1, got '{text}'")
    return True


def options(operation: str, backend: str, threads: int, check: Optional[bool],
            deterministic: bool = False, invariant: bool = False) -> tuple[int, int, int, bool]:
    """The last arguments of every function of the library: backend, mode, threads, check."""
    code = BACKENDS.get(backend) if isinstance(backend, str) else None
    if code is None:
        raise ValueError(f"{operation}: backend must be one of {', '.join(BACKENDS)}, "
                         f"got {backend!r}")
    if type(threads) is not int or threads < 0:
        threads = integer(operation, "threads", threads, 0, 2**31 - 1)
    mode = DEFAULT
    if boolean(operation, "deterministic", deterministic):
        mode = DETERMINISTIC
    if boolean(operation, "invariant", invariant):
        mode = INVARIANT
    return code, mode, threads, checking(operation, check)


def sizes(array: Any, rank: int) -> tuple[int, ...]:
    """The shape of `array`, from which those of the results follow. Zeros for another rank: the
    library refuses `array` before it looks at them."""
    shape = getattr(array, "shape", ())
    return tuple(shape) if len(shape) == rank else (0,) * rank
