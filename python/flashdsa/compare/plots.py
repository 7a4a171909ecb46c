"""Pictures of records: time against length, ratio to the peers, roofline. As SVG and PNG, light and
dark."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import CompareError, UnavailableError
from .record import Record

THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "faint": "#d0d7de", "ours": "#1a7f5a",
              "peers": ["#b35900", "#6639ba", "#0969da", "#a40e26", "#57606a"]},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "faint": "#30363d", "ours": "#3fb984",
             "peers": ["#f0883e", "#bc8cff", "#58a6ff", "#ff7b72", "#8b949e"]},
}

_OURS = "flashdsa"
_MARKERS = "osD^vP*X"
_TIMED = ("topk", "forward", "backward", "step")
_PLANS = ("reused", "none", "built")


def write_plots(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draws the newest row of every key, of the device and power regime that has most rows."""
    if not records:
        raise CompareError("--plots must have rows to draw, got none")
    matplotlib = load_matplotlib()
    chosen = newest(_largest_group(records))
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for theme, colors in THEMES.items():
            with matplotlib.rc_context(_style(colors)):
                for name, draw in _DRAWINGS.items():
                    figure = draw(chosen, colors)
                    for suffix in ("svg", "png"):
                        path = folder / f"{name}-{theme}.{suffix}"
                        metadata = {"Date": None} if suffix == "svg" else None
                        figure.savefig(path, dpi=150, metadata=metadata)
                        written.append(path)
    except OSError as error:
        raise CompareError(f"--plots must be a folder that can be written, got {folder}: "
                           f"{error.strerror}") from None
    return written


def newest(records: Sequence[Record]) -> list[Record]:
    """The last row of every key."""
    by_key = {}
    for record in records:
        peer = (record.get("peer") or "").split("@")[0]
        key = tuple(record.get(name) for name in ("op", "workload", "shape", "heads", "t_q",
                                                  "threads"))
        by_key[(*key, _plan(record), peer)] = record
    return list(by_key.values())


def load_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UnavailableError("--plots needs matplotlib, got none: pip install "
                               "'flashdsa[compare]'") from None
    return matplotlib


def _group(record: Record) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("device", "backend", "regime", "l2"))


def _largest_group(records: Sequence[Record]) -> list[Record]:
    (largest, _), = Counter(map(_group, records)).most_common(1)
    return [record for record in records if _group(record) == largest]


def _style(colors: dict[str, Any]) -> dict[str, Any]:
    ink, paper, faint = colors["ink"], colors["paper"], colors["faint"]
    return {"figure.facecolor": paper, "axes.facecolor": paper, "savefig.facecolor": paper,
            "text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": faint,
            "xtick.color": ink, "ytick.color": ink, "grid.color": faint, "axes.grid": True,
            "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
            "legend.frameon": False, "font.size": 9, "svg.fonttype": "none",
            "svg.hashsalt": "flashdsa"}


def _figure(records: Sequence[Record], title: str, width: float, height: float, rows: int = 1,
            columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row")
    device, backend, regime, l2 = _group(records[0])
    figure.suptitle(f"{title}\n{device}, {backend}, regime {regime}, L2 {l2}", fontsize=10)
    return figure, panels


def _plain_ticks(axis: Any, format_value: str = "{x:g}") -> None:
    """Numbers instead of powers on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    axis.set_major_formatter(format_value)
    axis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.set_minor_formatter(format_value)


def _peer_name(record: Record) -> str:
    return record["peer"].split("@")[0]


def _peer_colors(records: Sequence[Record], colors: dict[str, Any]) -> dict[str, str]:
    names = sorted({_peer_name(record) for record in records if record.get("peer")})
    return {name: colors["peers"][i % len(colors["peers"])] for i, name in enumerate(names)}


def _plan(record: Record) -> str:
    return record.get("plan") or "none"


def _family(workload: str) -> str:
    """Workloads that differ in length alone have one line."""
    return re.sub(r"-?\d+k$", "", workload)


def _draw_times(records: Sequence[Record], colors: dict[str, Any]) -> Any:
    shown = [record for record in records if record["op"] in _TIMED]
    operations = [name for name in _TIMED if any(record["op"] == name for record in shown)]
    heads = sorted({record["heads"] for record in shown})
    figure, panels = _figure(records, "Time of a query row against the number of keys",
                             2.5 * max(2, len(heads)) + 2, 2.2 * max(1, len(operations)) + 1,
                             max(1, len(operations)), max(1, len(heads)))
    peers = {_OURS: colors["ours"], **_peer_colors(shown, colors)}
    families = list(dict.fromkeys(_family(record["workload"]) for record in shown))
    for row, operation in zip(panels, operations):
        for panel, count in zip(row, heads):
            here = [r for r in shown if r["op"] == operation and r["heads"] == count]
            panel.set_title(f"{operation}, H {count}", fontsize=9)
            _draw_lines(panel, here, peers, families)
    figure.supxlabel("T_k", fontsize=9)
    figure.supylabel("microseconds per query row", fontsize=9)
    figure.legend(handles=_legend(peers, families, colors), loc="outside right upper", fontsize=8)
    return figure


def _series(records: Sequence[Record]) -> dict[tuple[str, str], dict[int, float]]:
    """Microseconds per row by T_k, of (library, family of workloads). Where rows differ in the
    plan, those count whose time holds its building."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for record in sorted(records, key=lambda record: _PLANS.index(_plan(record))):
        libraries = [(_OURS, record["median_ms"])]
        if record.get("peer"):
            libraries.append((_peer_name(record), record["peer_median_ms"]))
        for library, milliseconds in libraries:
            line = series.setdefault((library, _family(record["workload"])), {})
            line[record["t_k"]] = 1e3 * milliseconds / record["t_q"]
    return series


def _draw_lines(panel: Any, records: Sequence[Record], peers: dict[str, str],
                families: Sequence[str]) -> None:
    if not records:
        panel.set_visible(False)
        return
    for (library, family), points in _series(records).items():
        lengths, times = zip(*sorted(points.items()))
        panel.plot(lengths, times, color=peers[library],
                   linestyle="-" if library == _OURS else "--",
                   marker=_MARKERS[families.index(family) % len(_MARKERS)], markersize=5)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(lambda t_k, _: f"{t_k / 1024:g}k")
    _plain_ticks(panel.yaxis)
    panel.tick_params(labelsize=7, labelbottom=True, labelleft=True, which="both")


def _legend(peers: dict[str, str], families: Sequence[str], colors: dict[str, Any]) -> list[Any]:
    """Colours are libraries, markers are workloads."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color, label=name, linestyle="-" if name == _OURS else "--")
             for name, color in peers.items()]
    return lines + [Line2D([], [], color=colors["ink"], linestyle="", label=family,
                           marker=_MARKERS[i % len(_MARKERS)]) for i, family in enumerate(families)]


def _draw_ratios(records: Sequence[Record], colors: dict[str, Any]) -> Any:
    pairs = sorted((record for record in records if record.get("ratio")), key=_ratio_order)
    figure, ((panel,),) = _figure(
        records, "Peer's time over FlashDSA's: right of 1 FlashDSA is faster", 8,
        1.4 + 0.26 * max(1, len(pairs)))
    peers = _peer_colors(records, colors)
    for place, record in enumerate(pairs):
        ratio = record["ratio"]
        panel.barh(place, ratio - 1, left=1, color=peers[_peer_name(record)], height=0.7)
        panel.annotate(f"{ratio:.2f}", (ratio, place), (4 if ratio >= 1 else -4, 0),
                       textcoords="offset points", va="center",
                       ha="left" if ratio >= 1 else "right")
    panel.set_yticks(range(len(pairs)), [
        f"{record['op']}{'' if _plan(record) == 'none' else ', plan ' + _plan(record)} · "
        f"{record['workload']} · H {record['heads']} · {_peer_name(record)}" for record in pairs])
    panel.axvline(1, color=colors["ink"], linewidth=1)
    panel.set_ylim(max(1, len(pairs)) - 0.4, -0.6)
    panel.grid(axis="y", visible=False)
    highest = max((record["ratio"] for record in pairs), default=1)
    if highest > 10:
        panel.set_xscale("log")
        _plain_ticks(panel.xaxis)
    panel.margins(x=0.15)
    panel.set_xlabel("ratio" if pairs else "no row has a peer")
    return figure


def _ratio_order(record: Record) -> tuple[Any, ...]:
    return (record["op"], record["workload"], record["heads"], _plan(record), record["peer"])


def _draw_roofline(records: Sequence[Record], colors: dict[str, Any]) -> Any:
    counted = [record for record in records if record.get("tflops") and record.get("bytes_per_s")]
    figure, ((panel,),) = _figure(
        records, "Rate against FLOP per byte, by the benchmark's formulae", 7.5, 4.8)
    points: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    for record in counted:
        intensity = record["tflops"] * 1e12 / record["bytes_per_s"]
        _add_point(points, _OURS, record["op"], intensity, record["tflops"])
        if record.get("peer"):
            _add_point(points, _peer_name(record), record["op"], intensity,
                       record["tflops"] / record["ratio"])
    operations = list(dict.fromkeys(operation for _, operation in points))
    peers = _peer_colors(records, colors)
    for (library, operation), (intensities, rates) in points.items():
        panel.scatter(intensities, rates, label=f"{library}: {operation}",
                      marker=_MARKERS[operations.index(operation) % len(_MARKERS)],
                      color=colors["ours"] if library == _OURS else peers[library], s=28)
    _draw_roof(panel, counted, colors)
    panel.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    _plain_ticks(panel.xaxis)
    _plain_ticks(panel.yaxis)
    if counted:
        panel.legend(fontsize=8, loc="lower right")
    return figure


def _add_point(points: dict[tuple[str, str], tuple[list[float], list[float]]], library: str,
               operation: str, intensity: float, rate: float) -> None:
    of_library = points.setdefault((library, operation), ([], []))
    of_library[0].append(intensity)
    of_library[1].append(rate)


def _draw_roof(panel: Any, records: Sequence[Record], colors: dict[str, Any]) -> None:
    """The dense product's rate, and the copy's; caches may lift a point above the latter."""
    peaks = [record["peak_tflops"] for record in records if record.get("peak_tflops")]
    if not peaks:
        return
    panel.axhline(peaks[-1], color=colors["ink"], linewidth=1)
    panel.annotate(f"dense product {peaks[-1]:.3g} TFLOP/s", (0.01, peaks[-1]), (0, 3),
                   xycoords=panel.get_yaxis_transform(), textcoords="offset points", fontsize=8)
    copies = [record["peak_bytes_per_s"] for record in records if record.get("peak_bytes_per_s")]
    if not copies:
        return
    low, high = panel.get_xlim()
    ridge = peaks[-1] * 1e12 / copies[-1]
    left = min(low, ridge / 8)
    panel.plot([left, ridge], [left * copies[-1] / 1e12, peaks[-1]], color=colors["ink"],
               linewidth=1, linestyle=":", label=f"copy {copies[-1] / 1e12:.3g} TB/s")
    panel.set_xlim(left, max(high, ridge * 2))


_DRAWINGS: dict[str, Callable[[Sequence[Record], dict[str, Any]], Any]] = {
    "time": _draw_times,
    "ratio": _draw_ratios,
    "roofline": _draw_roofline,
}
