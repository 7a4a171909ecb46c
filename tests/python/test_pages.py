"""The programs of the pages run, and print what the pages say."""

import contextlib
import importlib.util
import io
import re

import pytest

from conftest import ROOT

PAGES = ("getting_started.md", "migration.md")
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


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_drawn_shards_are_those_of_context_parallel(order):
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from flashdsa.torch.context_parallel import ContextParallel

    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs/images/draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    ranks = draw.SHARDS[order]
    for rank, positions in enumerate(ranks):
        torch.distributed.init_process_group("fake", rank=rank, world_size=len(ranks),
                                             store=FakeStore())
        try:
            parallel = ContextParallel(draw.CUT["cu_seqlens_padded"][-1], order=order)
            assert parallel.query_indices().tolist() == list(positions)
        finally:
            torch.distributed.destroy_process_group()
