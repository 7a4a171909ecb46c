"""The rows of bench/results as tables: of every key the newest row. docs/results.md shows them."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any, Callable, NamedTuple

Row = dict[str, Any]

# What was measured: rows that agree in all of it are one figure, measured again.
KEY = ("op", "backend", "simd", "device", "workload", "t_q", "t_k", "topk", "heads", "index_heads",
       "head_dim", "threads", "plan", "regime", "l2", "check", "simulated", "ranks", "order",
       "through")
ABSENT = {"plan": "none", "check": False, "simulated": False}  # in rows older than the field

WORKLOADS = ("single8k", "single32k", "random", "random32k", "drift90", "drift90-128k", "long32k",
             "long128k", "sft4k", "text", "custom", "file")
REGIMES = ("cold", "warm", "sustained")


def key_of(row: Row) -> tuple[Any, ...]:
    peer = str(row.get("peer") or "").partition("@")[0]
    return (*(ABSENT.get(field) if row.get(field) is None else row[field] for field in KEY), peer)


def read(folder: pathlib.Path) -> list[Row]:
    """All rows, oldest first: by the date in a file's name, then by line."""
    def age(path: pathlib.Path) -> tuple[str, str]:
        date = re.search(r"\d{4}-\d\d-\d\d", path.name)
        if date is None:
            raise ValueError(f"{path.name}: expected DEVICE-YYYY-MM-DD-TOPIC.jsonl")
        return date[0], path.name
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl"), key=age)
            for line in path.read_text(encoding="utf-8").splitlines()]


def newest(rows: list[Row]) -> list[Row]:
    return list({key_of(row): row for row in rows}.values())


class Column(NamedTuple):
    title: str
    text: Callable[[Row], str]


def _field(title: str, name: str, form: str = "{}") -> Column:
    def text(row: Row) -> str:
        value: Any = row
        for part in name.split("."):
            value = (value or {}).get(part)
        return "" if value is None else form.format(value)
    return Column(title, text)


def _rate(row: Row) -> str:
    rate = row.get("tflops")
    return "" if not rate else f"{rate:.0f}" if rate >= 10 else f"{rate:.3f}"


def _share(title: str, name: str) -> Column:
    def text(row: Row) -> str:
        share = row.get(name)
        return "" if share is None else f"{100 * share:.1f} %"
    return Column(title, text)


def _error(part: str) -> Callable[[Row], str]:
    """Of "grad_kv rmse 2.4e-03 / 1.0e-02": its name, figure and bound."""
    form = re.compile(r"(?P<name>.*) (?P<figure>\S+) / (?P<bound>\S+)")

    def text(row: Row) -> str:
        match = form.fullmatch(row.get("error") or "")
        return match[part] if match else ""
    return text


def _gigabytes(row: Row) -> str:
    rate = row.get("bytes_per_s")
    return f"{rate / 1e9:.1f}" if rate else ""


COLUMNS = {
    "op": _field("operation", "op", "`{}`"),
    "backend": _field("backend", "backend"),
    "device": _field("device", "device"),
    "driver": _field("driver", "driver"),
    "cuda": _field("CUDA", "cuda"),
    "workload": _field("workload", "workload", "`{}`"),
    "t_q": _field("T_q", "t_q"),
    "t_k": _field("T_k", "t_k"),
    "heads": _field("H", "heads"),
    "index_heads": _field("H_index", "index_heads"),
    "topk": _field("K", "topk"),
    "head_dim": _field("D", "head_dim"),
    "threads": _field("threads", "threads"),
    "simd": _field("instructions", "simd"),
    "check": Column("checking mode", lambda row: "on" if row.get("check") else ""),
    "plan": Column("plan", lambda row: row.get("plan") or "none"),
    "regime": _field("regime", "regime"),
    "l2": _field("L2", "l2"),
    "median": _field("median, ms", "median_ms", "{:.3f}"),
    "p10": _field("p10", "p10_ms", "{:.3f}"),
    "p90": _field("p90", "p90_ms", "{:.3f}"),
    "rate": Column("TFLOP/s", _rate),
    "share": _share("share of the peak", "ceiling_share"),
    "gigabytes": Column("GB/s", _gigabytes),
    "scratch": _field("scratch, bytes", "scratch_bytes"),
    "plan_ms": _field("building the plan, ms", "plan_ms", "{:.3f}"),
    "error_of": Column("error of", _error("name")),
    "error": Column("error", _error("figure")),
    "error_bound": Column("bound", _error("bound")),
    "peer": _field("peer", "peer"),
    "peer_ms": _field("peer, ms", "peer_median_ms", "{:.3f}"),
    "ratio": _field("ratio", "ratio", "{:.2f}"),
    "simulated": Column("ranks one after another", lambda row: "yes" if row["simulated"] else "no"),
    "ranks": _field("ranks", "ranks"),
    "order": _field("order", "order"),
    "balance": _field("slowest rank over the mean", "balance", "{:.3f}"),
    "exchange": _share("exchange", "exchange_share"),
    "hidden": _share("of it hidden", "hidden_share"),
    "received": _field("received, bytes", "exchange_bytes"),
    "through": _field("through", "through"),
    "cpp": _field("from C++, µs", "cpp_us.median", "{:.1f}"),
    "python": _field("from Python, µs", "python_us.median", "{:.1f}"),
    "overhead": _field("overhead, µs", "overhead_us", "{:.1f}"),
    "excess": _field("over the files, MiB", "excess_mib", "{:.0f}"),
    "bound": _field("bound, MiB", "bound_mib", "{:.0f}"),
    "commit": _field("commit", "commit"),
}

HEAD = "device driver cuda op workload t_q t_k"
TIMES = "check regime l2 median p10 p90 peer peer_ms ratio"
CHECK = "scratch error_of error error_bound commit"

# A table shows these columns where they tell its rows apart; else a line above it says them.
SHARED = ("device", "driver", "cuda", "op", "workload", "t_q", "t_k", "topk", "head_dim", "simd",
          "plan", "check", "regime", "l2", "error_of", "error_bound", "peer", "through", "commit")


class Section(NamedTuple):
    """One table: which rows it takes and what it shows of them."""

    takes: Callable[[Row], bool]
    columns: str


def _on(gpu: bool, *ops: str) -> Callable[[Row], bool]:
    return lambda row: ("median_ms" in row and "ranks" not in row and row["op"] in ops
                        and gpu == (row.get("driver") is not None))


SECTIONS = {
    "forward": Section(_on(True, "forward"),
                       f"{HEAD} topk head_dim heads plan {TIMES} rate share plan_ms {CHECK}"),
    "backward": Section(_on(True, "backward", "backward_deterministic"),
                        f"{HEAD} topk head_dim heads plan {TIMES} rate share plan_ms {CHECK}"),
    "indexer": Section(_on(True, "topk", "indexer", "indexer_backward"),
                       f"{HEAD} topk index_heads {TIMES} rate share {CHECK}"),
    "selection": Section(_on(True, "compact", "plan"),
                         f"{HEAD} topk heads {TIMES} gigabytes {CHECK}"),
    "metadata": Section(_on(True, "metadata"), f"{HEAD} {TIMES} gigabytes {CHECK}"),
    "step": Section(_on(True, "step"),
                    f"{HEAD} topk head_dim heads index_heads plan {TIMES} rate share {CHECK}"),
    "context parallel": Section(
        lambda row: "ranks" in row,
        f"{HEAD} topk heads index_heads plan ranks order simulated {TIMES} balance exchange hidden "
        f"received {CHECK}"),
    "cpu": Section(_on(False, "forward", "backward", "topk", "indexer_backward", "metadata",
                       "compact", "plan", "step"),
                   f"{HEAD} topk head_dim backend simd heads threads plan {TIMES} rate share "
                   f"{CHECK}"),
    "memory": Section(lambda row: "excess_mib" in row,
                      "device op backend t_q t_k heads topk excess bound commit"),
    "python": Section(lambda row: "overhead_us" in row,
                      "device op through cpp python overhead commit"),
}


def _order(row: Row) -> tuple[Any, ...]:
    workload, regime = row.get("workload"), row.get("regime")
    return (row["op"], WORKLOADS.index(workload) if workload in WORKLOADS else len(WORKLOADS),
            str(workload), row.get("heads") or 0, row.get("plan") or "none",
            REGIMES.index(regime) if regime in REGIMES else len(REGIMES),
            str(row.get("backend")), row.get("threads") or 0, str(row.get("through")))


def table(lines: list[list[str]]) -> str:
    """Lines of cells, the first with the titles, in Markdown."""
    rule = ["---"] * len(lines[0])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (lines[0], rule, *lines[1:]))


def tables(rows: list[Row]) -> dict[str, str]:
    """The text of every section, by name. Every row has exactly one."""
    members: dict[str, list[Row]] = {name: [] for name in SECTIONS}
    for row in newest(rows):
        names = [name for name, section in SECTIONS.items() if section.takes(row)]
        if len(names) != 1:
            raise ValueError(f"expected one table for a row, got {names} for {json.dumps(row)}")
        members[names[0]].append(row)
    return {name: _section(section, sorted(members[name], key=_order))
            for name, section in SECTIONS.items()}


def _section(section: Section, rows: list[Row]) -> str:
    if not rows:
        return "No row yet.\n"
    cells = {name: [COLUMNS[name].text(row) for row in rows] for name in section.columns.split()}
    cells = {name: column for name, column in cells.items() if any(column)}
    shared = [name for name, column in cells.items() if name in SHARED and len(set(column)) == 1]
    said = "; ".join(f"{COLUMNS[name].title} {cells.pop(name)[0]}" for name in shared)
    lines = table([[COLUMNS[name].title for name in cells], *map(list, zip(*cells.values()))])
    return f"In every row: {said}.\n\n{lines}" if said else lines
