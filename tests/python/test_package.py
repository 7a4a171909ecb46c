"""The installed package: one module without CPython's symbols, types, documented examples."""

import contextlib
import importlib.util
import inspect
import io
import pathlib
import re
import shutil
import subprocess
import typing

import pytest

import flashdsa
from conftest import ROOT

PACKAGE = pathlib.Path(flashdsa.__file__).parent
EXAMPLES = re.findall(r"```python\n(.*?)```\n+(?:```text\n(.*?)```)?",
                      (ROOT / "docs/python.md").read_text(encoding="utf-8"), re.DOTALL)


def symbols(*options):
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    done = subprocess.run(["nm", "-D", *options, str(PACKAGE / "flashdsa.so")], check=True,
                          capture_output=True, text=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def test_module_needs_no_cpython_and_no_pytorch():
    undefined = symbols("--undefined-only")
    assert any(name.startswith("TVMFFI") for name in undefined)
    assert [name for name in undefined if name.startswith(("Py", "_Py"))
            or "c10" in name or "torch" in name] == []


def test_module_exports_only_its_functions():
    assert [name for name in symbols("--defined-only") if not name.startswith("__tvm_ffi_")] == []


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
    for name in flashdsa.__all__:
        thing = getattr(flashdsa, name)
        assert thing.__doc__, name
        if inspect.isfunction(thing):
            hints = typing.get_type_hints(thing)
            assert set(hints) == {*inspect.signature(thing).parameters, "return"}, name


def test_version_is_the_distribution_s():
    from importlib.metadata import version

    assert version("flashdsa") == flashdsa.__version__


def enumerators(header, name):
    """The enumerators of an enum of the library, in order: ["auto", "reference", ...]."""
    text = (ROOT / "include/flashdsa" / header).read_text(encoding="utf-8")
    body = re.search(rf"enum class {name}[^{{]*{{(.*?)}};", text, re.DOTALL).group(1)
    return [word.lower() for word in re.findall(r"^\s*k(\w+)", body, re.MULTILINE)]


def test_options_are_those_of_the_library():
    from flashdsa import _checks, _metadata

    assert list(_checks.BACKENDS.items()) == [
        (name, value) for value, name in enumerate(enumerators("runtime.h", "Backend"))]
    assert list(_metadata.QUERY_MODES.items()) == [
        (name, value) for value, name in enumerate(enumerators("metadata.h", "QueryMode"))]
    modes = enumerators("runtime.h", "Mode")
    cases = ((False, False, "default"), (True, False, "deterministic"),
             (False, True, "invariant"), (True, True, "invariant"))
    for deterministic, invariant, mode in cases:
        assert _checks.options("x", "cpu", 3, True, deterministic, invariant) == (
            2, modes.index(mode), 3, True)


@pytest.mark.parametrize("source, printed", EXAMPLES, ids=["numpy", "torch", "plan"])
def test_documented_example(source, printed):
    if "import torch" in source and importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "docs/python.md", "exec"), {"__name__": "example"})
    assert output.getvalue() == printed


def test_readme_shows_the_first_example():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    source, printed = EXAMPLES[0]
    assert f"```python\n{source}```" in readme and printed.strip() in readme
