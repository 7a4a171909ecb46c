"""What this machine does at best, by PyTorch, in the run that it is a ceiling of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .timing import Timing, time_calls

_DEVICE_SIZE, _HOST_SIZE = 8192, 1024
_DEVICE_COPY, _HOST_COPY = 2**30, 2**27  # bytes, several times any cache


class Ceiling(NamedTuple):
    """Of one regime."""

    tflops: float
    bytes_per_s: float


def measure_ceiling(timing: Timing, device: torch.device) -> Ceiling:
    """The rate of a dense product, and of a copy, read and written bytes together. On a GPU that is
    the product 8192 x 8192 x 8192 of BF16 numbers by cuBLAS, the median in the regime; on the host
    1024 x 1024 x 1024, the faster of BF16 and FP32, and the best of the rounds."""
    on_host = device.type != "cuda"
    best = np.min if on_host else np.median
    size = _HOST_SIZE if on_host else _DEVICE_SIZE
    dtypes = (torch.bfloat16, torch.float32) if on_host else (torch.bfloat16,)
    milliseconds = []
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        milliseconds.append(best(time_calls([lambda: torch.mm(a, b, out=out)], timing, device)[0]))
    source = torch.zeros(_HOST_COPY if on_host else _DEVICE_COPY, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copied = best(time_calls([lambda: target.copy_(source)], timing, device)[0])
    return Ceiling(2e-9 * size**3 / min(milliseconds), 2e3 * source.numel() / float(copied))
