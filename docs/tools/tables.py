"""Holds the generated tables of README.md and docs/ against what they are made from.

    python3 docs/tools/tables.py ROOT FLASHDSA            names what is not current, and exits 1
    python3 docs/tools/tables.py ROOT FLASHDSA --write    brings it up to date

FLASHDSA is the command, which says what runs where; the other tables are made from bench/results.
A table stands between <!-- table: NAME --> and <!-- end of table -->.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import results
import support

MARKER = re.compile(r"^<!-- (?:table: .*|end of table) -->$", re.MULTILINE)
TABLE = re.compile(r"^(<!-- table: (.*) -->\n)((?:(?!<!-- ).*\n)*)(<!-- end of table -->\n)",
                   re.MULTILINE)


def fill(text: str, tables: dict[str, str]) -> str:
    """The page with its tables as they should be."""
    markers, found = len(MARKER.findall(text)), len(TABLE.findall(text))
    if markers != 2 * found:
        raise ValueError(f"expected every table between two markers, got {found} with {markers}")

    def filled(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise ValueError(f"no table is called {match[2]}, expected one of {', '.join(tables)}")
        return f"{match[1]}\n{tables[match[2]]}\n{match[4]}"
    return TABLE.sub(filled, text)


def update(root: pathlib.Path, tables: dict[str, str], write: bool) -> list[str]:
    """Pages that were not current, and tables that no page shows."""
    pages = {page: page.read_text(encoding="utf-8")
             for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))}
    unused = set(tables) - {match[2] for text in pages.values() for match in TABLE.finditer(text)}
    changed = {page: current for page, text in pages.items()
               if (current := fill(text, tables)) != text}
    if write:
        for page, current in changed.items():
            page.write_text(current, encoding="utf-8")
    return ([f"{page.relative_to(root)}: its tables are not current" for page in changed]
            + [f"no page shows the table {name}" for name in sorted(unused)])


def main() -> int:
    root, command, *options = sys.argv[1:]
    info = json.loads(subprocess.run([command, "info", "--json"], check=True,
                                     capture_output=True, text=True).stdout)
    rows = results.read(pathlib.Path(root, "bench/results"))
    tables = support.tables(info) | results.tables(rows)
    found = update(pathlib.Path(root), tables, options == ["--write"])
    print("\n".join(found) if found else f"{len(tables)} tables are current")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
