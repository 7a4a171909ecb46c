"""Checks that every line of a table of medians in README.md and docs/*.md has its row in
bench/results: one that agrees in all that the line says, to the last digit that it shows.

Prints one line per fault and exits 1 when there is one. Generated tables are not looked at.
"""

from __future__ import annotations

import pathlib
import re
import sys
from decimal import Decimal
from typing import Any, Callable, Optional

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "docs/tools"))

import results  # noqa: E402

Row = dict[str, Any]

OPERATIONS = {"top-k": "topk", "metadata, exact build": "metadata", "canonical rows": "compact"}


def _field(name: str, factor: float = 1) -> Callable[[Row], Optional[float]]:
    return lambda row: None if row.get(name) is None else factor * row[name]


def _figure(part: int) -> Callable[[Row], Optional[float]]:
    """Of an error "grad_kv rmse 2.4e-03 / 1.0e-02": 0 the figure, 1 its bound."""
    def value(row: Row) -> Optional[float]:
        error = row.get("error")
        return None if error is None else float(error.split(" / ")[part].split()[-1])
    return value


def _per_token(row: Row) -> Optional[float]:
    return 1e3 * row["median_ms"] / row["t_q"] if row.get("t_q") else None


# What a column's title says of a row: words that are equal to a field,
WORDS = {"operation": "op", "workload": "workload", "regime": "regime", "plan": "plan"}
# or a number,
NUMBERS = {
    "H": _field("heads"), "H_index": _field("index_heads"), "T_q": _field("t_q"),
    "K": _field("topk"), "T_k": _field("t_k"), "threads": _field("threads"),
    "median, ms": _field("median_ms"), "median": _field("median_ms"),
    "p10, ms": _field("p10_ms"), "p90, ms": _field("p90_ms"),
    "us a token": _per_token,
    "TFLOP/s": _field("tflops"), "GFLOP/s": _field("tflops", 1e3),
    "GB/s": _field("bytes_per_s", 1e-9), "share of the peak": _field("ceiling_share", 100),
    "scratch, bytes": _field("scratch_bytes"), "scratch": _field("scratch_bytes", 2**-20),
    "plan, ms": _field("plan_ms"), "peer, ms": _field("peer_median_ms"), "ratio": _field("ratio"),
    "error": _figure(0), "selection error": _figure(0), "rows that differ": _figure(0),
    "error of grad_kv, bound 1e-2": _figure(0), "bound": _figure(1),
}
# or nothing: it is worked out from several rows, or from sizes.
DERIVED = {"G", "plan, MiB", "of a forward at H = 64", "speed-up over that of the products",
           "NumPy FP32, both cores"}

TABLE = re.compile(r"^\|.*\|\n\|[ :|-]+\|\n(?:\|.*\|\n)+", re.MULTILINE)
GENERATED = re.compile(r"^<!-- table: .*?^<!-- end of table -->$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[\d.]+(?:e-?\d+)?")


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def agrees(row: Row, title: str, cell: str) -> bool:
    if title in DERIVED or not cell:
        return True
    if title in WORDS:
        word = cell.strip("`")
        return (row.get(WORDS[title]) or "none") == OPERATIONS.get(word, word)
    number, value = NUMBER.match(cell), NUMBERS[title](row)
    if number is None or value is None:
        return False
    shown = Decimal(number[0])
    last_digit = Decimal(10) ** shown.as_tuple().exponent
    return abs(Decimal(value) - shown) <= last_digit * Decimal("0.500001")


def faults_of(page: str, text: str, rows: list[Row]) -> list[str]:
    found = []
    for table in TABLE.findall(GENERATED.sub("", text)):
        titles, _, *lines = map(cells_of, table.splitlines())
        if not any(title.startswith("median") for title in titles):
            continue
        unknown = set(titles) - {*WORDS, *NUMBERS, *DERIVED}
        if unknown:
            found.append(f"{page}: no field of a row is known as {', '.join(sorted(unknown))}")
            continue
        for line in lines:
            if not any(all(map(agrees, [row] * len(titles), titles, line)) for row in rows):
                found.append(f"{page}: no row of bench/results agrees with {' | '.join(line)}")
    return found


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    rows = results.read(root / "bench/results")
    found = []
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        found += faults_of(page.name, page.read_text(encoding="utf-8"), rows)
    print("\n".join(found) if found else "every median has its row")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
