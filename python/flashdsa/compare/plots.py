"""Pictures of records: time against length, ratio to the peers, roofline. As SVG and PNG, light and
dark."""

from __future__ import annotations

import math
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


def write_plots(folder: Path, records: Sequence[Record]) -> list[Path]:
    """Draws the newest row of every key, of the device and power regime that has most rows."""
    if not records:
        raise CompareError("--plots must have rows to draw, got none")
    matplotlib = _load_matplotlib()
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
                        figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)
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
                                                  "threads", "plan"))
        by_key[(*key, peer)] = record
    return list(by_key.values())


def _load_matplotlib() -> Any:
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


def _figure(records: Sequence[Record], title: str, width: float, height: float,
            columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    device, backend, regime, l2 = _group(records[0])
    figure.suptitle(f"{title}\n{device}, {backend}, regime {regime}, L2 {l2}", fontsize=10)
    return figure, axes


def _peer_name(record: Record) -> str:
    return record["peer"].split("@")[0]


def _peer_colors(records: Sequence[Record], colors: dict[str, Any]) -> dict[str, str]:
    names = sorted({_peer_name(record) for record in records if record.get("peer")})
    return {name: colors["peers"][i % len(colors["peers"])] for i, name in enumerate(names)}


def _operation(record: Record) -> str:
    plan = record.get("plan") or "none"
    return record["op"] if plan == "none" else f"{record['op']}, plan {plan}"


def _family(workload: str) -> str:
    """Workloads that differ in length alone have one line."""
    return re.sub(r"-?\d+k$", "", workload)


def _draw_times(records: Sequence[Record], colors: dict[str, Any]) -> Any:
    operations = list(dict.fromkeys(record["op"] for record in records))
    figure, axes = _figure(records, "Time of a query row against the number of keys",
                           3.6 * len(operations) + 1, 4.2, len(operations))
    peers = _peer_colors(records, colors)
    for panel, operation in zip(axes, operations):
        here = [record for record in records if record["op"] == operation]
        _draw_lines(panel, _series(here), peers, colors)
        panel.set(title=operation, xlabel="T_k", xscale="log", yscale="log")
        ticks = sorted({record["t_k"] for record in here})
        panel.set_xticks(ticks, [f"{t_k / 1024:g}k" for t_k in ticks])
        panel.minorticks_off()
        panel.legend(fontsize=7)
    axes[0].set_ylabel("microseconds per row, H in the legend")
    return figure


def _series(records: Sequence[Record]) -> dict[tuple[str, str], dict[int, float]]:
    """Microseconds per row by T_k, of (library, what is run)."""
    series: dict[tuple[str, str], dict[int, float]] = {}
    for record in records:
        plan = record.get("plan") or "none"
        work = f"{_family(record['workload'])}, H {record['heads']}"
        suffix = "" if plan == "none" else f", plan {plan}"
        libraries = [(_OURS, work + suffix, record["median_ms"])]
        if record.get("peer"):
            libraries.append((_peer_name(record), work, record["peer_median_ms"]))
        for library, label, milliseconds in libraries:
            line = series.setdefault((library, label), {})
            line[record["t_k"]] = 1e3 * milliseconds / record["t_q"]
    return series


def _draw_lines(panel: Any, series: dict[tuple[str, str], dict[int, float]],
                peers: dict[str, str], colors: dict[str, Any]) -> None:
    works = list(dict.fromkeys(label for _, label in series))
    for (library, label), points in series.items():
        lengths, times = zip(*sorted(points.items()))
        panel.plot(lengths, times, label=f"{library}: {label}",
                   color=colors["ours"] if library == _OURS else peers[library],
                   linestyle="-" if library == _OURS else "--",
                   marker=_MARKERS[works.index(label) % len(_MARKERS)], markersize=5)


def _draw_ratios(records: Sequence[Record], colors: dict[str, Any]) -> Any:
    pairs = [record for record in records if record.get("ratio")]
    figure, (panel,) = _figure(records, "Peer's time over FlashDSA's: right of 1 FlashDSA is faster",
                               8, 1.6 + 0.28 * max(1, len(pairs)))
    peers = _peer_colors(records, colors)
    for place, record in enumerate(pairs):
        ratio = record["ratio"]
        panel.barh(place, ratio - 1, left=1, color=peers[_peer_name(record)], height=0.7)
        panel.annotate(f"{ratio:.2f}", (ratio, place), (4 if ratio >= 1 else -4, 0),
                       textcoords="offset points", va="center",
                       ha="left" if ratio >= 1 else "right")
    panel.set_yticks(range(len(pairs)), [
        f"{_operation(record)} · {record['workload']} · H {record['heads']} · {_peer_name(record)}"
        for record in pairs])
    panel.axvline(1, color=colors["ink"], linewidth=1)
    panel.invert_yaxis()
    panel.grid(axis="y", visible=False)
    highest = max((record["ratio"] for record in pairs), default=1)
    if highest > 10:
        panel.set_xscale("log")
    panel.margins(x=0.15)
    panel.set_xlabel("ratio" if pairs else "no row has a peer")
    return figure


def _draw_roofline(records: Sequence[Record], colors: dict[str, Any]) -> Any:
    counted = [record for record in records if record.get("tflops")]
    figure, (panel,) = _figure(records, "Rate against FLOP per byte, by the benchmark's formulae",
                               7.5, 4.8)
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
    panel.set_xlim(left, max(high, ridge * 2, math.nextafter(left, math.inf)))


_DRAWINGS: dict[str, Callable[[Sequence[Record], dict[str, Any]], Any]] = {
    "time": _draw_times,
    "ratio": _draw_ratios,
    "roofline": _draw_roofline,
}
