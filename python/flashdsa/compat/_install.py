"""Registering the import names."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Optional

from . import _cudnn_dsa
from ._flash_mla import flash_mla_sparse_fwd

_WRAPPERS = ("compactify_wrapper", "indexer_forward_wrapper", "indexer_top_k_wrapper",
             "local_to_global_wrapper", "sparse_attention_backward_wrapper")


def install(override: bool = False) -> tuple[str, ...]:
    """Makes `from flash_mla import flash_mla_sparse_fwd` and `from cudnn import DSA` give FlashDSA.

    An installed package is not touched where it has the name; it keeps everything else where it
    does not.

    Args:
        override: take the two names from installed packages too.

    Returns:
        Those of "flash_mla.flash_mla_sparse_fwd" and "cudnn.DSA" that now are FlashDSA's.
    """
    namespace = sys.modules.get("cudnn.DSA")
    if not _is_ours(namespace):
        namespace = _stand_in("cudnn.DSA")
        for name in _WRAPPERS:
            setattr(namespace, name, getattr(_cudnn_dsa, name))
    done = []
    if _register("flash_mla", "flash_mla_sparse_fwd", flash_mla_sparse_fwd, override):
        done.append("flash_mla.flash_mla_sparse_fwd")
    if _register("cudnn", "DSA", namespace, override):
        sys.modules["cudnn.DSA"] = namespace
        done.append("cudnn.DSA")
    return tuple(done)


def _register(package: str, name: str, value: Any, override: bool) -> bool:
    module = _installed(package)
    if module is None:
        if package in sys.modules or importlib.util.find_spec(package) is not None:
            if not override:  # installed, but it cannot be imported
                return False
        module = sys.modules[package] = _stand_in(package)
    elif not override and _has_other(module, name, value):
        return False
    setattr(module, name, value)
    return True


def _installed(package: str) -> Optional[ModuleType]:
    try:
        return importlib.import_module(package)
    except ImportError:
        return None


def _has_other(module: ModuleType, name: str, value: Any) -> bool:
    """Whether a package has the name, and not from us. It may import what it needs on this."""
    try:
        return getattr(module, name) is not value
    except (AttributeError, ImportError):
        return False


_ORIGIN = "flashdsa.compat"


def _stand_in(name: str) -> ModuleType:
    module = ModuleType(name, f"Stands in for {name}: see {_ORIGIN}")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=_ORIGIN)
    return module


def _is_ours(module: Optional[ModuleType]) -> bool:
    return getattr(getattr(module, "__spec__", None), "origin", None) == _ORIGIN
