"""What the tests of the Python package share. They run against the installed package."""

import os
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests/conformance/oracle"))
sys.path.insert(0, str(HERE))

os.environ.pop("FLASHDSA_CHECK", None)


def pytest_collection_modifyitems(items):
    """A test marked `cuda` is skipped, and counted, where there is no CUDA device."""
    if all(item.get_closest_marker("cuda") is None for item in items):
        return
    try:
        import torch

        reason = "" if torch.cuda.is_available() else "no CUDA device"
    except ImportError:
        reason = "no PyTorch"
    for item in items:
        if reason and item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
