"""Timing of calls that take turns: the regimes of `flashdsa bench` (docs/benchmarks.md)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import torch

REGIMES = ("cold", "warm", "sustained")

Call = Callable[[], Any]

_REST_SECONDS = 0.7
_COLD_WARMUPS, _COLD_ROUNDS = 3, 10
_BUSY_SECONDS = {"warm": 0.15, "sustained": 1.5}
_MEASURED_SECONDS = 0.1  # short beside the regimes' own times
_MIN_ROUNDS, _MAX_ROUNDS = 10, 200
_ROUNDS_WITHOUT_WAITING = 4
_FLUSH_BYTES = 256 * 2**20  # several times any L2 cache
_HOST_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Timing:
    """How calls are timed."""

    regime: str = "warm"
    l2: str = "warm"
    repeats: int = 0
    """timed rounds; 0: as many as the regime has"""
    min_seconds: float = 0.5
    """on the host: time of the first call's rounds at least"""


def time_calls(calls: Sequence[Call], timing: Timing, device: torch.device) -> list[np.ndarray]:
    """Milliseconds of every round of each call, ascending. Results are dropped at once."""
    timed = _time_on_device if device.type == "cuda" else _time_on_host
    return [np.sort(times) for times in np.asarray(timed(calls, timing, device)).T]


def peak_bytes(call: Call, device: torch.device) -> Optional[int]:
    """The most memory that PyTorch held for one call at a moment, its results included; None on the
    host, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def _time_on_host(calls: Sequence[Call], timing: Timing, device: torch.device) -> list[list[float]]:
    rounds: list[list[float]] = []
    total = 0.0
    while len(rounds) < (timing.repeats or _HOST_ROUNDS) or total < timing.min_seconds:
        times = []
        for call in calls:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
        total += times[0] / 1e3
        rounds.append(times)
    return rounds


def _time_on_device(calls: Sequence[Call], timing: Timing,
                    device: torch.device) -> list[list[float]]:
    """Rounds are queued without waiting; events tell the time of every call."""
    flushed = torch.empty(_FLUSH_BYTES if timing.l2 == "flushed" else 0, dtype=torch.uint8,
                          device=device)

    def queue_round() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = []
        for call in calls:
            flushed.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        return events

    with torch.cuda.device(device):
        warm_up = _rest if timing.regime == "cold" else _keep_busy
        rounds = warm_up(queue_round, timing.regime)
        queue_round()  # so that the host is ahead of the device
        events = [queue_round() for _ in range(timing.repeats or rounds)]
        torch.cuda.synchronize()
    return [[begin.elapsed_time(end) for begin, end in of_round] for of_round in events]


def _rest(queue_round: Call, regime: str) -> int:
    torch.cuda.synchronize()
    time.sleep(_REST_SECONDS)
    for _ in range(_COLD_WARMUPS):
        queue_round()
    return _COLD_ROUNDS


def _keep_busy(queue_round: Call, regime: str) -> int:
    """Returns how many rounds fit into the time of measuring."""
    begin, rounds, passed = time.perf_counter(), 0, 0.0
    while passed < _BUSY_SECONDS[regime]:
        for _ in range(_ROUNDS_WITHOUT_WAITING):
            queue_round()
        rounds += _ROUNDS_WITHOUT_WAITING
        torch.cuda.synchronize()
        passed = time.perf_counter() - begin
    return min(max(int(rounds * _MEASURED_SECONDS / passed), _MIN_ROUNDS), _MAX_ROUNDS)
