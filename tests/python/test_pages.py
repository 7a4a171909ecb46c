"""The programs of the pages run, and print what the pages say."""

import contextlib
import importlib.util
import io
import re

import pytest

from conftest import ROOT

PAGES = ("getting_started.md",)
PROGRAM = re.compile(r"```python\n(.*?)```\n+```text\n(.*?)```", re.DOTALL)
PROGRAMS = [(page, *program) for page in PAGES
            for program in PROGRAM.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))]


def test_every_program_of_a_page_is_run():
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        found = [program for program in PROGRAMS if program[0] == page]
        assert len(found) == text.count("```python\n") > 0, page


@pytest.mark.parametrize("page, source, printed", PROGRAMS,
                         ids=[page for page, _, _ in PROGRAMS])
def test_program_prints_what_the_page_says(page, source, printed):
    if "import torch" in source and importlib.util.find_spec("torch") is None:
        pytest.skip("no PyTorch")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, f"docs/{page}", "exec"), {"__name__": "example"})
    assert output.getvalue() == printed
