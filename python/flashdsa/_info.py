"""What this build is and can do."""

from __future__ import annotations

from typing import NamedTuple

from ._library import library


class BackendStatus(NamedTuple):
    """One line of `backends()`."""

    name: str
    """sm90, sm80, cpu or reference."""
    available: bool
    """Whether this machine can run it."""
    detail: str
    """What it runs on, or why it is not available."""


def backends() -> list[BackendStatus]:
    """Every backend, best first, and whether this machine can run it."""
    return [BackendStatus(str(name), bool(available), str(detail))
            for name, available, detail in library.backends()]


def version() -> str:
    """The library's version, "0.1.0"."""
    return str(library.version())


def build_description() -> str:
    """Compiler and build type, "GNU 12.2.0, Release"."""
    return str(library.build())
