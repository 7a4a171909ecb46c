"""The records as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

from .record import Record

Cells = list[str]


def format_table(rows: Sequence[Cells]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() + "\n"
                   for row in rows)


def format_milliseconds(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.3g} ms" if value >= 1 else f"{value * 1000:.3g} us"


def format_bytes(value: Optional[float]) -> str:
    return "-" if value is None else f"{value / 2**20:.1f} MiB"


def format_rate(tflops: Optional[float]) -> str:
    if tflops is None:
        return "-"
    return f"{tflops:.1f} TFLOP/s" if tflops >= 10 else f"{1000 * tflops:.1f} GFLOP/s"


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "op": lambda r: r["op"] if r["plan"] == "none" else f"{r['op']}, plan {r['plan']}",
    "workload": lambda r: r["workload"],
    "shape": lambda r: r["shape"],
    "T_q": lambda r: str(r["t_q"]),
    "T_k": lambda r: str(r["t_k"]),
    "H": lambda r: str(r["heads"]),
    "regime": lambda r: r["regime"] + ("" if r["l2"] == "warm" else f", L2 {r['l2']}"),
    "n": lambda r: str(r["samples"]),
    "median": lambda r: format_milliseconds(r["median_ms"]),
    "p10": lambda r: format_milliseconds(r["p10_ms"]),
    "p90": lambda r: format_milliseconds(r["p90_ms"]),
    "rate": lambda r: format_rate(r["tflops"]),
    "ceiling": lambda r: "-" if r["ceiling_share"] is None else f"{100 * r['ceiling_share']:.1f} %",
    "memory": lambda r: format_bytes(r["peak_bytes"]),
    "error / bound": lambda r: r["error"],
}

_PEER_COLUMNS: dict[str, Callable[[Record], str]] = {
    "peer": lambda r: r["peer"],
    "peer's median": lambda r: format_milliseconds(r["peer_median_ms"]),
    "ratio": lambda r: f"{r['ratio']:.2f}",
    "peer's memory": lambda r: format_bytes(r["peer_peak_bytes"]),
    "peer's error": lambda r: r["peer_error"],
}


def records_table(records: Sequence[Record]) -> str:
    rows = [[*_COLUMNS, *_PEER_COLUMNS]]
    for record in records:
        cells = [cell(record) for cell in _COLUMNS.values()]
        cells += [cell(record) if record["peer"] else "-" for cell in _PEER_COLUMNS.values()]
        rows.append(cells)
    return format_table(rows)
