"""What a docstring leaves out: everything, or an argument of a function."""

from __future__ import annotations

import inspect
import re
from typing import Any


def faults(obj: Any, docstring: str) -> list[str]:
    """One line for each thing that the docstring of a function, class or field does not say."""
    if not docstring.strip() or docstring.startswith("Alias for field number"):
        return ["has no docstring"]
    if not inspect.isroutine(obj):
        return []
    said = set(re.findall(r"\w+", docstring)) | {"self", "cls"}
    return [f"its docstring does not name the argument {name}"
            for name in inspect.signature(obj).parameters if name not in said]
