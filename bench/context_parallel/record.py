"""One row: what was measured, in JSON and as a line of a table."""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
from typing import Any, Optional, Sequence

import torch
from torch import Tensor

import flashdsa

from .problem import Problem
from .ranks import Ranks
from .timing import AS_IT_IS, AWAITED, LOCAL, RankTimes

MIB = 2**20
GLM_5_2 = (64, 32, 2048, 576)


def describe_problem(problem: Problem, check_tokens: int, ranks: Ranks) -> dict[str, Any]:
    """The fields that all rows of a run share. A GPU's backend is the best one."""
    p = problem
    on_host = p.device.type == "cpu"
    backend = "cpu" if on_host else next(x.name for x in flashdsa.backends() if x.available)
    shape = (p.heads, p.index_heads, p.topk, p.head_dim)
    return {"op": "step", "backend": backend, "workload": "single",
            "shape": "glm5.2" if shape == GLM_5_2 else "custom", "heads": p.heads,
            "index_heads": p.index_heads, "t_q": p.tokens // p.ranks, "t_k": p.tokens,
            "topk": p.topk, "head_dim": p.head_dim, "layers": p.layers,
            "query_rank": p.query_rank, "plan": "built" if p.planned else "none",
            "check_tokens": check_tokens, "ranks": p.ranks, "simulated": ranks.simulated,
            "group": None if ranks.simulated else ranks.backend,
            "threads": p.threads if on_host else None, "seed": p.seed, "regime": "warm",
            "l2": "warm"}


def cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def driver_version() -> Optional[str]:
    path = pathlib.Path("/sys/module/nvidia/version")
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def overlap(topk_indices: Tensor, topk: int) -> Optional[float]:
    """Share of keys that a row with more than K visible ones has in common with the next: of 64
    rows of the one document, [T, 1, K]."""
    rows = torch.linspace(topk, len(topk_indices) - 2, 64).long().tolist()
    if rows[0] > rows[-1]:
        return None
    shared = [torch.isin(*topk_indices[row:row + 2]).float().mean() for row in rows]
    return float(sum(shared) / len(shared))


def describe_machine(device: torch.device) -> dict[str, Any]:
    where: dict[str, Any] = {"build": f"{flashdsa.__version__} ({flashdsa.build_description()})",
                             "torch": torch.__version__}
    if device.type == "cpu":
        return {"device": f"{cpu_name()}, {os.cpu_count()} threads", "driver": None, "cuda": None,
                "nccl": None, **where}
    return {"device": torch.cuda.get_device_name(device), "driver": driver_version(),
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            **where}


def balance(values: Sequence[float]) -> float:
    return max(values) / statistics.mean(values)


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolated."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    return values[low] + (place - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def describe_times(times: Sequence[RankTimes]) -> dict[str, Any]:
    """A step takes as long as its slowest rank."""
    steps = {way: [max(ms) for ms in zip(*(rank.ms[way] for rank in times))]
             for way in times[0].ms}
    rank_ms = [statistics.median(rank.ms[LOCAL]) for rank in times]
    whole = steps.get(AS_IT_IS, steps[LOCAL])
    median = statistics.median(whole)
    record = {"samples": len(whole), "median_ms": median, "p10_ms": quantile(whole, 0.1),
              "p90_ms": quantile(whole, 0.9),
              "tflops": sum(rank.flop for rank in times) / median / 1e9, "rank_ms": rank_ms,
              "balance": balance(rank_ms), "work_balance": balance([rank.flop for rank in times]),
              "awaited_ms": None, "local_ms": statistics.median(steps[LOCAL]), "exchange_ms": None,
              "exchange_share": None, "hidden_share": None,
              "exchange_bytes": max(rank.exchange_bytes for rank in times),
              "peak_memory_bytes": None}
    if times[0].peak_memory_bytes is not None:
        record["peak_memory_bytes"] = [rank.peak_memory_bytes for rank in times]
    if AWAITED in steps:
        awaited = statistics.median(steps[AWAITED])
        exchange = awaited - record["local_ms"]
        record.update(awaited_ms=awaited, exchange_ms=exchange, exchange_share=exchange / awaited)
        if len(times) > 1 and exchange > 0:
            record["hidden_share"] = (awaited - median) / exchange
    return record


TABLE = {  # a column by its fields
    "order": lambda row: row["order"],
    "ranks": lambda row: f"{row['ranks']}, simulated" if row["simulated"] else str(row["ranks"]),
    "T_q": lambda row: str(row["t_q"]),
    "T_k": lambda row: str(row["t_k"]),
    "H": lambda row: str(row["heads"]),
    "K": lambda row: str(row["topk"]),
    "n": lambda row: str(row["samples"]),
    "median": lambda row: milliseconds(row["median_ms"]),
    "p10": lambda row: milliseconds(row["p10_ms"]),
    "p90": lambda row: milliseconds(row["p90_ms"]),
    "ranks alone": lambda row: f"{min(row['rank_ms']):.1f}..{max(row['rank_ms']):.1f} ms",
    "balance": lambda row: f"{row['balance']:.3f}",
    "of work": lambda row: f"{row['work_balance']:.3f}",
    "received": lambda row: f"{row['exchange_bytes'] / MIB:.1f} MiB",
    "exchange": lambda row: milliseconds(row["exchange_ms"]),
    "share": lambda row: percent(row["exchange_share"]),
    "hidden": lambda row: percent(row["hidden_share"]),
    "memory": lambda row: mebibytes(row["peak_memory_bytes"]),
    "unequal": lambda row: str(row["unequal_rows"]),
    "error / bound": lambda row: row["error"],
}


def milliseconds(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def percent(value: Optional[float]) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def mebibytes(values: Optional[Sequence[int]]) -> str:
    """Of the rank that has most."""
    return "-" if values is None else f"{max(values) / MIB:.0f} MiB"


def to_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [list(TABLE), *([cell(row) for cell in TABLE.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip()
                     for line in lines)
