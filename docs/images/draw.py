"""Draws packing.svg, context_parallel.svg and selection_plan.svg, the pictures of docs/concepts.md.

    python3 docs/images/draw.py FLASHDSA PLAN_TEXT FOLDER

The numbers in them are not written here: they come from the `flashdsa` command, and from the tests'
program plan_text, which prints the plan of a selection.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple, Sequence
from xml.sax.saxutils import escape

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/conformance/oracle"))
import safetensors_io as st  # noqa: E402

CELL = 20
COLOURS = ("#4269d0", "#e0822b", "#3ca951")
STYLE = """<style>
text { font: 12px sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: bold; }
.number { text-anchor: middle; }
.cell { fill: none; stroke: #8b949e; stroke-width: 0.5; }
.frame { fill: none; stroke: #1f2328; stroke-width: 1.5; }
.padding { fill: #8b949e; fill-opacity: 0.3; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .frame { stroke: #e6edf3; }
}
</style>"""

# The worked example of docs/spec.md, section 2, with all rows.
PACKED = {"cu_seqlens": [0, 3, 7, 9], "cu_seqlens_padded": [0, 4, 9, 12]}

# A short document and a long one, cut over two ranks.
CUT = {"cu_seqlens": [0, 3, 14], "cu_seqlens_padded": [0, 4, 16]}
SHARDS = {
    "contiguous": [range(0, 8), range(8, 16)],
    "zigzag": [[*range(0, 4), *range(12, 16)], range(4, 12)],  # of four chunks 0 and 3, 1 and 2
}

# Sixteen heads, so groups of four rows; -1 is a hole.
PLAN_HEADS, PLAN_KEYS = 16, 16
PLANNED = [
    [0], [0, 1], [0, 1, 2], [0, 1, 2, 3],
    [1, 4, 6, 9], [1, 4, 6, 10], [1, 4, 9, 10], [4, 6, 9, 10],
    [2, 7, 11, 13], [2, 7, 11, 14], [0, 3, 8, 12], [5, -1, 9, 15],
]


class Metadata(NamedTuple):
    starts: list[int]
    causal_lengths: list[int]
    segments: list[tuple[int, ...]]  # first row, rows, keys, q_causal_offset of each


class Item(NamedTuple):
    first_row: int
    last_row: int
    text: str  # "union of 5 keys", "range 0..3", "slots up to 4"
    masks: list[str]  # of a union's rows, a digit for each key of its list


def metadata(flashdsa: str, layout: dict[str, list[int]],
             query_indices: Sequence[int] | None = None) -> Metadata:
    file = st.File(metadata={"total_key_tokens": str(layout["cu_seqlens_padded"][-1]),
                             "query_mode": "general"})
    for name, values in layout.items():
        file.put(name, "I32", values)
    if query_indices is not None:
        file.put("query_indices", "I32", list(query_indices))
    with tempfile.TemporaryDirectory() as folder:
        source, result = pathlib.Path(folder, "in"), pathlib.Path(folder, "out")
        st.write(source, file)
        subprocess.run([flashdsa, "metadata", "--backend", "cpu", source, result], check=True,
                       capture_output=True)
        fields = st.read(result).tensors
    cu_q, cu_k = fields["segment_cu_q"], fields["segment_cu_k"]
    segments = zip(cu_q[:-1], np.diff(cu_q), np.diff(cu_k), fields["q_causal_offsets"])
    return Metadata(fields["starts"].tolist(), fields["causal_lengths"].tolist(),
                    [tuple(int(number) for number in segment) for segment in segments])


def plan_items(plan_text: str) -> list[Item]:
    """The items of the drawn selection, from lines as
    "rows 4..5 union of 3 keys: 4 {1 4} 5 {1 6}"."""
    topk = max(len(row) for row in PLANNED)
    rows = "\n".join(" ".join(map(str, row)) for row in PLANNED)
    done = subprocess.run([plan_text, str(PLAN_HEADS), str(topk), str(PLAN_KEYS)], check=True,
                          capture_output=True, text=True, input=rows + "\n")
    items = []
    for line in done.stdout.splitlines():
        first, last, text, rest = re.fullmatch(r"rows (\d+)\.\.(\d+) ([^:]*):?(.*)", line).groups()
        keys_of_rows = [keys.split() for keys in re.findall(r"{([^}]*)}", rest)]
        masks = []
        if text.startswith("union"):
            keys = sorted({int(key) for row in keys_of_rows for key in row})
            text += ": " + " ".join(map(str, keys))
            masks = ["".join("01"[str(key) in row] for key in keys) for row in keys_of_rows]
        items.append(Item(int(first), int(last), text, masks))
    return items


class Picture:
    """Parts of an SVG picture on a grid of cells."""

    def __init__(self, title: str, description: str):
        self.title, self.description = title, description
        self.parts: list[str] = []
        self.text(16, 26, title, "title")

    def text(self, x: float, y: float, content: object, kind: str = "") -> None:
        attribute = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{attribute}>{escape(str(content))}</text>')

    def number(self, x: float, y: float, value: object) -> None:
        """A number in the middle of the cell at x, y."""
        self.text(x + CELL / 2, y + 14, value, "number")

    def grid(self, x: float, y: float, columns: int, rows: int) -> None:
        lines = "".join(f"M{x:g} {y + row * CELL:g}h{columns * CELL}" for row in range(rows + 1))
        lines += "".join(f"M{x + column * CELL:g} {y:g}v{rows * CELL}"
                         for column in range(columns + 1))
        self.parts.append(f'<path d="{lines}" class="cell"/>')

    def cell(self, x: float, y: float, colour: str | None = None, cells: int = 1,
             kind: str = "cell", height: int = 1) -> None:
        fill = f' style="fill: {colour}; fill-opacity: 0.55"' if colour else ""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{cells * CELL}" '
                          f'height="{height * CELL}" class="{kind}"{fill}/>')

    def svg(self, width: int, height: int) -> str:
        body = "\n".join(self.parts)
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" height="{height}" role="img" aria-labelledby="title desc">\n'
                f'<title id="title">{escape(self.title)}</title>\n'
                f'<desc id="desc">{escape(self.description)}</desc>\n{STYLE}\n{body}\n</svg>\n')


def documents(layout: dict[str, list[int]]) -> list[int | None]:
    """The document of every storage row, None for padding."""
    real, padded = layout["cu_seqlens"], layout["cu_seqlens_padded"]
    result: list[int | None] = []
    for document in range(len(real) - 1):
        length = real[document + 1] - real[document]
        storage = padded[document + 1] - padded[document]
        result += [document] * length + [None] * (storage - length)
    return result


def draw_storage(picture: Picture, x: float, y: float, layout: dict[str, list[int]]) -> None:
    for row, document in enumerate(documents(layout)):
        if document is None:
            picture.cell(x + row * CELL, y, kind="padding")
        picture.cell(x + row * CELL, y, None if document is None else COLOURS[document])
        picture.number(x + row * CELL, y, row)


def draw_visible(picture: Picture, x: float, y: float, rows: Metadata,
                 layout: dict[str, list[int]], positions: Sequence[int]) -> None:
    """A line of cells for every row, with those of its keys filled."""
    of_storage = documents(layout)
    for t, position in enumerate(positions):
        if rows.causal_lengths[t] > 0:
            picture.cell(x + rows.starts[t] * CELL, y + t * CELL, COLOURS[of_storage[position]],
                         rows.causal_lengths[t])
    picture.grid(x, y, len(of_storage), len(positions))


def packing(flashdsa: str) -> str:
    rows = metadata(flashdsa, PACKED)
    keys = PACKED["cu_seqlens_padded"][-1]
    picture = Picture(
        "Three packed documents: which keys a row sees",
        "Storage of twelve rows: documents of 3, 4 and 2 tokens, each followed by padding. Below "
        "it a line for every query row with the keys that it sees, its starts and its "
        "causal_lengths: a triangle for each document, nothing for padding rows.")
    left, top = 124, 92
    picture.text(16, 64, "padded storage")
    draw_storage(picture, left, 50, PACKED)
    picture.text(16, top + 2, "query row")
    picture.text(left + keys * CELL + 16, top + 2, "starts")
    picture.text(left + keys * CELL + 70, top + 2, "causal_lengths")
    draw_visible(picture, left, top + 8, rows, PACKED, range(keys))
    for t in range(keys):
        y = top + 8 + t * CELL
        picture.number(left - 2 * CELL, y, t)
        picture.number(left + keys * CELL + 24, y, rows.starts[t])
        picture.number(left + keys * CELL + 100, y, rows.causal_lengths[t])
    bounds = ", ".join(f"{name} = {values}" for name, values in PACKED.items())
    picture.text(16, top + 8 + keys * CELL + 26, bounds)
    return picture.svg(554, top + keys * CELL + 48)


def context_parallel(flashdsa: str) -> str:
    keys = CUT["cu_seqlens_padded"][-1]
    picture = Picture(
        "One sequence cut over two ranks, in two orders",
        "Storage of sixteen rows: documents of 3 and 11 tokens with padding. On the left both "
        "ranks hold one chunk of eight rows, on the right chunks of four rows, rank 0 the first "
        "and the last, rank 1 those between. For every row the keys that it sees, and for every "
        "rank the segments of its rows.")
    for panel, (order, ranks) in enumerate(SHARDS.items()):
        left = 60 + panel * (keys * CELL + 90)
        picture.text(left, 58, order)
        draw_storage(picture, left, 66, CUT)
        y = 66 + CELL + 26
        for rank, positions in enumerate(ranks):
            rows = metadata(flashdsa, CUT, positions)
            total = sum(rows.causal_lengths)
            picture.text(left, y, f"rank {rank}: {len(positions)} rows, {total} visible keys")
            y += 8
            draw_visible(picture, left, y, rows, CUT, positions)
            for t, position in enumerate(positions):
                picture.number(left - CELL - 6, y + t * CELL, position)
            for first, count, _, _ in rows.segments:
                picture.cell(left, y + first * CELL, None, keys, "frame", count)
            y += len(positions) * CELL + 18
            for first, count, segment_keys, offset in rows.segments:
                picture.text(left, y, f"segment of rows {first}..{first + count - 1}: "
                                      f"q_causal_offset {offset}, prefix of {segment_keys} keys")
                y += 16
            y += 12
    return picture.svg(60 + 2 * (keys * CELL + 90) - 40, 560)


def selection_plan(plan_text: str) -> str:
    items = plan_items(plan_text)
    picture = Picture(
        f"The plan of a selection: {PLAN_HEADS} heads, groups of four rows",
        "A line for every query row with the keys that it selected, and a frame around the rows "
        "of each item of the plan: a range, a union of four rows, a union of two rows, and two "
        "single rows, of which one has a hole.")
    left, top = 60, 66
    picture.text(16, top - 16, "row")
    for key in range(PLAN_KEYS):
        picture.number(left + key * CELL, top - 30, key)
    right = left + PLAN_KEYS * CELL + 20
    for number, item in enumerate(items):
        colour = COLOURS[number % len(COLOURS)]
        for t in range(item.first_row, item.last_row + 1):
            y = top + t * CELL + t // 4 * 8
            picture.number(left - CELL - 6, y, t)
            for key in filter(lambda slot: slot >= 0, PLANNED[t]):
                picture.cell(left + key * CELL, y, colour)
            if item.masks:
                picture.text(right + 220, y + 14, f"mask {item.masks[t - item.first_row]}")
        y = top + item.first_row * CELL + item.first_row // 4 * 8
        height = item.last_row - item.first_row + 1
        picture.grid(left, y, PLAN_KEYS, height)
        picture.cell(left, y, None, PLAN_KEYS, "frame", height)
        picture.text(right, y + 14, item.text)
    return picture.svg(right + 320, top + len(PLANNED) * CELL + 40)


def main() -> None:
    flashdsa, plan_text, folder = sys.argv[1:]
    pictures = {"packing": packing(flashdsa), "context_parallel": context_parallel(flashdsa),
                "selection_plan": selection_plan(plan_text)}
    for name, picture in pictures.items():
        pathlib.Path(folder, f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
