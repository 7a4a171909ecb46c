"""Training curves as an SVG picture that is legible on light and on dark pages."""

from __future__ import annotations

import math
import pathlib
from typing import Any, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 380
TOP, BOTTOM = 64, 330
SMOOTHED = 20  # steps
COLOURS = {"dense": "#4269d0", "sparse": "#e0822b"}
STYLE = """<style>
text { font: 12px sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: bold; }
.axis { stroke: #8b949e; stroke-width: 1; }
.grid { stroke: #8b949e; stroke-width: 0.5; stroke-dasharray: 2 4; }
polyline { fill: none; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
</style>
"""


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of `width` values around each, fewer at the ends; width is even."""
    windows = (values[max(0, i - width // 2):i + width // 2] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


class Panel:
    """One pair of axes: steps to the right, a quantity upwards, in ticks of `unit`."""

    def __init__(self, left: float, width: float, title: str, steps: int, unit: float,
                 values: Sequence[float]):
        self.left, self.width, self.steps = left, width, steps
        first, last = math.floor(min(values) / unit), math.ceil(max(values) / unit)
        self.lowest, self.highest = first * unit, max(last, first + 1) * unit
        self.parts = [text(left, TOP - 14, title)]
        for tick in range(first, max(last, first + 1) + 1):
            y = self.y(tick * unit)
            kind = "axis" if tick == first else "grid"
            self.parts += [f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" '
                           f'class="{kind}"/>',
                           text(left - 8, y + 4, f"{tick * unit:g}", anchor="end")]
        self.parts += [text(self.x(at), BOTTOM + 18, f"{at}", anchor="middle")
                       for at in sorted({0, steps // 2, steps})]
        self.parts.append(text(left + width / 2, BOTTOM + 36, "step", anchor="middle"))

    def x(self, step: float) -> float:
        return self.left + self.width * step / self.steps

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - self.lowest) / (self.highest - self.lowest)

    def curve(self, values: Sequence[float], colour: str) -> None:
        """The values, pale, and their running mean."""
        for points, style in ((values, 'stroke-opacity="0.3"'),
                              (running_mean(values, SMOOTHED), 'stroke-width="2"')):
            line = " ".join(f"{self.x(i + 1):.1f},{self.y(v):.1f}" for i, v in enumerate(points))
            self.parts.append(f'<polyline points="{line}" stroke="{colour}" {style}/>')

    def mark(self, value: float, label: str) -> None:
        """A dashed line across."""
        y = self.y(value)
        self.parts += [f'<line x1="{self.left}" x2="{self.left + self.width}" y1="{y:.1f}" '
                       f'y2="{y:.1f}" class="axis" stroke-dasharray="6 4"/>',
                       text(self.left + self.width, y - 6, label, anchor="end")]


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">'
            f"{escape(words)}</text>")


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    """Losses of the runs, and the indexers' loss of the sparse one beside them."""
    runs, options = results["runs"], results["options"]
    guess = results["text"]["unigram_entropy"]
    losses = Panel(60, 430, "loss / nats per byte", options["steps"], 0.5,
                   [guess, *(value for run in runs.values() for value in run["loss"])])
    losses.mark(guess, "best guess that knows frequencies alone")
    for name, run in runs.items():
        losses.curve(run["loss"], COLOURS[name])
    panels = [losses]
    if "sparse" in runs:
        divergence = runs["sparse"]["indexer_loss"]
        panels.append(Panel(560, 280, "mean divergence of the indexers / nats",
                            options["steps"], 0.1, [0, *divergence]))
        panels[-1].curve(divergence, COLOURS["sparse"])
    parts = [text(16, 26, f"Training on {options['steps']} batches of {options['tokens']} bytes, "
                          f"running means of {SMOOTHED} steps", kind="title")]
    names = {"dense": "dense", "sparse": f"sparse, {options['topk']} keys"}
    for at, name in enumerate(runs):
        x = 620 + 90 * at
        parts += [f'<rect x="{x}" y="15" width="12" height="12" fill="{COLOURS[name]}"/>',
                  text(x + 18, 26, names[name])]
    for panel in panels:
        parts += panel.parts
    svg = "\n".join(parts)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
                    f'width="{WIDTH}" height="{HEIGHT}">\n{STYLE}{svg}\n</svg>\n')
