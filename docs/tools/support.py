"""What runs where, from `flashdsa info --json`, as a table of README.md and docs/support.md."""

from __future__ import annotations

from typing import Any

from results import table


def _runs(word: str) -> str:
    """In some build on some machine, where `word` speaks of one."""
    return "no" if word == "no" else "yes"


def tables(info: dict[str, Any]) -> dict[str, str]:
    operations = info["operations"]
    titles = ["operation", *(f"`{backend}`" for backend in operations[0]["backends"]), "sizes",
              "element types"]
    lines = [[f"`{operation['name']}`", *map(_runs, operation["backends"].values()),
              operation["sizes"], operation["dtypes"]] for operation in operations]
    return {"support": table([titles, *lines])}
