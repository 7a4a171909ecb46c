"""One row of a results file. docs/benchmarks.md defines every field."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Optional

import numpy as np

from .ceiling import Ceiling
from .context import Context
from .errors import CompareError
from .judge import Figure
from .operations import Work

Record = dict[str, Any]

_MEASURED = {"op", "workload", "heads", "t_q", "t_k", "median_ms"}
_COMPARED = {"peer_median_ms", "ratio"}  # where there is a peer

# Fields that pictures are made of: what one must be, and their names.
_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a text", lambda value: isinstance(value, str),
     ("op", "workload", "shape", "device", "backend", "regime", "l2", "peer")),
    ("none, reused or built", lambda value: value in ("none", "reused", "built"), ("plan",)),
    ("a whole number above 0", lambda value: type(value) is int and value > 0,
     ("heads", "t_q", "t_k", "threads")),
    ("a finite number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf,
     ("median_ms", "peer_median_ms", "ratio", "tflops", "bytes_per_s", "peak_tflops",
      "peak_bytes_per_s")),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one library's call of an operation took."""

    error: Figure
    milliseconds: np.ndarray
    """of every round, ascending"""
    peak_bytes: Optional[int]

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.milliseconds, share))


def make_record(fields: Record, work: Work, ceiling: Ceiling, ours: Measured,
                peer: Optional[str], theirs: Optional[Measured], context: Context) -> Record:
    """`fields` name the row; `peer` is name@version."""
    median = ours.quantile(0.5)
    tflops = work.flop / median / 1e9 if work.flop else None
    record = {
        **fields,
        "samples": len(ours.milliseconds),
        "median_ms": median,
        "p10_ms": ours.quantile(0.1),
        "p90_ms": ours.quantile(0.9),
        "tflops": tflops,
        "bytes_per_s": work.bytes / median * 1e3,
        "peak_tflops": ceiling.tflops,
        "peak_bytes_per_s": ceiling.bytes_per_s,
        "ceiling_share": tflops and tflops / ceiling.tflops,
        "scratch_bytes": None,
        "peak_bytes": ours.peak_bytes,
        "error": str(ours.error),
        "peer": peer,
        "peer_median_ms": None,
        "peer_p10_ms": None,
        "peer_p90_ms": None,
        "peer_peak_bytes": None,
        "peer_error": None,
        "ratio": None,
    }
    if theirs is not None:
        record.update(peer_median_ms=theirs.quantile(0.5), peer_p10_ms=theirs.quantile(0.1),
                      peer_p90_ms=theirs.quantile(0.9), peer_peak_bytes=theirs.peak_bytes,
                      peer_error=str(theirs.error), ratio=theirs.quantile(0.5) / median)
    return {**record, **dataclasses.asdict(context)}


def check_appendable(path: Path) -> None:
    with _appended(path):
        pass


def append_json_line(path: Path, record: Record) -> None:
    with _appended(path) as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def append_csv_line(path: Path, record: Record) -> None:
    """Behind a line of names where the file is empty."""
    with _appended(path) as file:
        writer = csv.DictWriter(file, record.keys(), lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow({name: str(value).lower() if isinstance(value, bool) else value
                         for name, value in record.items()})


def read_json_lines(path: Path) -> list[Record]:
    """Rows of a results file that are measurements of an operation on a workload."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(record, dict) for record in records):
            raise ValueError("another kind of value")
    except (OSError, ValueError) as error:
        raise CompareError(f"{path} must be a file of JSON objects, one a line, got: "
                           f"{error}") from None
    measured = []
    for number, record in enumerate(records, 1):
        if record.keys() >= _MEASURED:
            _check_fields(record, f"{path}, line {number},")
            measured.append(record)
    return measured


def _check_fields(record: Record, place: str) -> None:
    required = _MEASURED | (_COMPARED if record.get("peer") else set())
    for kind, fits, names in _KINDS:
        for name in names:
            value = record.get(name)
            if (value is not None or name in required) and not fits(value):
                raise CompareError(f"{place} must have {kind} as {name}, got {value!r}")


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[IO[str]]:
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            yield file
    except OSError as error:
        raise CompareError(f"{path} must be a file that can be appended to, "
                           f"got: {error.strerror}") from None
