"""Putting `flashdsa.nemo` in the reference module's place."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Optional

TARGET = "nemo_automodel.components.models.glm_moe_dsa.kernels.cudnn_dsa"
_PACKAGE = TARGET.partition(".")[0]


def install() -> None:
    """Makes `flashdsa.nemo` what an import of the reference module gives.

    Best called before the model is imported; modules of NeMo AutoModel that have imported names
    from the reference module already are given those of `flashdsa.nemo` instead. Where NeMo
    AutoModel is not installed, its packages down to the module are made up, so that an import by
    the full name works; other modules of it are still found when it appears on the path later.
    """
    module = importlib.import_module(__package__)
    replaced = sys.modules.get(TARGET)
    parent = _import_parent()
    sys.modules[TARGET] = module
    if parent is not None:
        setattr(parent, TARGET.rpartition(".")[2], module)
    if replaced is not None and replaced is not module:
        _rebind(replaced, module)


def _import_parent() -> Optional[ModuleType]:
    """The package of the reference module, made up where NeMo AutoModel is absent; None where it is
    present but cannot be imported, which is not ours to report."""
    name = TARGET.rpartition(".")[0]
    if _PACKAGE not in sys.modules and importlib.util.find_spec(_PACKAGE) is None:
        _make_up(name)
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _make_up(name: str) -> None:
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        module = ModuleType(full, f"Stands in for the package of NeMo AutoModel: see {__package__}")
        module.__path__ = _SearchPath(*parts[:depth])  # type: ignore[assignment]
        module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        sys.modules[full] = module
        if depth > 1:
            setattr(sys.modules[".".join(parts[:depth - 1])], parts[depth - 1], module)


class _SearchPath:
    """The folders of a package on today's sys.path, as those of a namespace package are found."""

    def __init__(self, *parts: str):
        self.folder = os.path.join(*parts)

    def __iter__(self) -> Iterator[str]:
        folders = (os.path.join(entry or os.curdir, self.folder) for entry in sys.path)
        return filter(os.path.isdir, folders)


def _rebind(replaced: ModuleType, module: ModuleType) -> None:
    """Gives NeMo's loaded modules our functions where they hold those of the reference module."""
    ours = {}
    for name in module.__all__:
        if hasattr(replaced, name):
            ours[id(getattr(replaced, name))] = getattr(module, name)
    for name, holder in list(sys.modules.items()):
        if holder is replaced or name.partition(".")[0] != _PACKAGE:
            continue
        for attribute, value in list(vars(holder).items()):
            if id(value) in ours:
                setattr(holder, attribute, ours[id(value)])
