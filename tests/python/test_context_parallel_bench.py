"""bench/context_parallel.py: its rows, the faults that it must see, its options."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashdsa  # noqa: E402
from flashdsa.torch import context_parallel as library  # noqa: E402

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
SCRIPT = BENCH / "context_parallel.py"
sys.path.insert(0, str(BENCH))
spec = importlib.util.spec_from_file_location("context_parallel_bench", SCRIPT)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)

from context_parallel import equality, exchanges, record, timing  # noqa: E402
from context_parallel.problem import DRIFT, Problem  # noqa: E402

TOKENS, HEADS, INDEX_HEADS, TOPK, LAYERS, DIM = 192, 3, 2, 16, 2, 512
OPTIONS = ["--tokens", TOKENS, "--heads", HEADS, "--index-heads", INDEX_HEADS, "--topk", TOPK,
           "--layers", LAYERS, "--head-dim", DIM, "--device", "cpu"]
ORDERS = ["contiguous", "zigzag"]


@pytest.fixture(autouse=True)
def outside_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def rows_in(path):
    return {row["order"]: row for row in map(json.loads, path.read_text().splitlines())}


def torchrun(script, *arguments):
    """The script on two ranks: exit code and what they printed."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         script, *map(str, [*OPTIONS, *arguments])],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    return done.returncode, done.stdout + done.stderr


def simulate(*arguments):
    return bench.main(["--simulate", "4", *OPTIONS, "--samples", "2", "--warmup", "0", *arguments])


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """Rows of two processes, by order."""
    path = tmp_path_factory.mktemp("distributed") / "rows.jsonl"
    code, printed = torchrun(SCRIPT, "--samples", 3, "--json", path, "--commit", "abc")
    assert code == 0, printed
    return rows_in(path)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Rows of four played ranks, by order."""
    path = tmp_path_factory.mktemp("simulated") / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        assert simulate("--json", path) == 0
    return rows_in(path)


@pytest.fixture(params=["distributed", "simulated"])
def rows(request):
    return request.getfixturevalue(request.param)


# The rows.


def test_a_row_of_either_order(rows):
    assert list(rows) == ORDERS


def test_rows_say_what_was_measured(distributed, simulated):
    for row in (*distributed.values(), *simulated.values()):
        ranks = row["ranks"]
        assert {"op": "step", "backend": "cpu", "heads": HEADS, "index_heads": INDEX_HEADS,
                "t_q": TOKENS // ranks, "t_k": TOKENS, "topk": TOPK, "head_dim": DIM,
                "layers": LAYERS, "query_rank": 0, "plan": "built",
                "check_tokens": TOKENS}.items() <= row.items()
        assert row["peak_memory_bytes"] is None
    for row in distributed.values():
        assert (row["ranks"], row["simulated"], row["group"]) == (2, False, "gloo")
        assert row["commit"] == "abc"
        assert row["command"].startswith(
            "torchrun --nproc-per-node 2 bench/context_parallel.py --tokens 192 ")
    for row in simulated.values():
        assert (row["ranks"], row["simulated"], row["group"]) == (4, True, None)
        assert row["command"].startswith("python bench/context_parallel.py --simulate 4 ")


def test_exchange_is_that_of_the_documented_formulas(rows):
    for row in rows.values():
        share = (row["ranks"] - 1) / row["ranks"]
        assert row["exchange_bytes"] == (256 + LAYERS * (2 * DIM + 4 * DIM)) * TOKENS * share


def work_of(positions):
    """FLOP of a rank, row by row."""
    work = 0
    for visible in (position + 1 for position in positions):
        if visible > TOPK:
            work += 2 * INDEX_HEADS * 128 * visible
        forward, backward = DIM + 512, 3 * DIM + 2 * 512
        work += LAYERS * 2 * HEADS * min(visible, TOPK) * (forward + backward)
    return work


def test_work_is_less_even_in_contiguous_shards(rows):
    for row in rows.values():
        ranks, chunk = row["ranks"], TOKENS // (2 * row["ranks"])
        work = []
        for rank in range(ranks):
            chunks = {"contiguous": [2 * rank, 2 * rank + 1],
                      "zigzag": [rank, 2 * ranks - 1 - rank]}[row["order"]]
            work.append(work_of([chunk * number + i for number in chunks for i in range(chunk)]))
        assert row["work_balance"] == pytest.approx(max(work) * ranks / sum(work), rel=1e-12)
        assert row["tflops"] == pytest.approx(sum(work) / row["median_ms"] / 1e9)
    assert rows["contiguous"]["work_balance"] > rows["zigzag"]["work_balance"] > 1


def test_rows_are_equal_to_those_of_one_rank(rows):
    for row in rows.values():
        assert row["unequal_rows"] == 0
        value, bound = map(float, row["error"].split()[2::2])
        assert 0 < value < bound  # sums over ranks are rounded otherwise than those of one


def test_time_has_its_parts(distributed, simulated):
    for row in distributed.values():
        assert row["samples"] == 3
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert len(row["rank_ms"]) == 2 and min(row["rank_ms"]) > 0
        assert row["exchange_ms"] == row["awaited_ms"] - row["local_ms"]
    for row in simulated.values():
        assert len(row["rank_ms"]) == 4
        assert row["balance"] == pytest.approx(4 * max(row["rank_ms"]) / sum(row["rank_ms"]))
        assert row["median_ms"] == row["local_ms"] > 0
        for name in ("awaited_ms", "exchange_ms", "exchange_share", "hidden_share"):
            assert row[name] is None


def test_figures_of_given_times():
    def rank(as_it_is, awaited, local, flop):
        return timing.RankTimes({timing.LOCAL: local, timing.AWAITED: awaited,
                                 timing.AS_IT_IS: as_it_is}, 100, flop, None, 0)

    given = record.describe_times([rank([12, 13, 14], [19, 21, 20], [8, 10, 9], 3 * 10**9),
                                   rank([13, 12, 11], [20, 20, 20], [7, 7, 7], 10**9)])
    # Steps of the slower rank: 13, 13, 14; 20, 21, 20; 8, 10, 9.
    assert given == {
        "samples": 3, "median_ms": 13, "p10_ms": 13, "p90_ms": pytest.approx(13.8),
        "tflops": pytest.approx(4 / 13), "rank_ms": [9, 7], "balance": 9 / 8, "work_balance": 1.5,
        "local_ms": 9, "awaited_ms": 20, "exchange_ms": 11, "exchange_share": 11 / 20,
        "hidden_share": 7 / 11, "exchange_bytes": 100, "peak_memory_bytes": None}


def test_nothing_is_hidden_of_exchanges_that_took_no_time():
    ms = {timing.LOCAL: [5.0], timing.AWAITED: [5.0], timing.AS_IT_IS: [5.0]}
    given = record.describe_times([timing.RankTimes(ms, 0, 1, 7, 0)] * 2)
    assert given["exchange_ms"] == 0 and given["hidden_share"] is None
    assert given["peak_memory_bytes"] == [7, 7]


# What is computed.


def make_problem(**changes):
    sizes = {"tokens": 4096, "ranks": 2, "heads": 2, "index_heads": 2, "topk": 8, "head_dim": 512,
             "layers": 1, "query_rank": 0, "planned": False, "seed": 0, "threads": 1,
             "device": torch.device("cpu")}
    return Problem(**{**sizes, **changes})


def test_a_rank_makes_the_numbers_of_the_whole():
    problem = make_problem()
    whole = problem.normal("q", problem.all_blocks(), 2, 4)
    assert torch.equal(problem.normal("q", [1, 3], 2, 4), whole.view(4, 1024, 2, 4)[[1, 3]]
                       .view(2048, 2, 4))
    drifting = problem.drifting("index", problem.all_blocks(), 3)
    assert torch.equal(problem.drifting("index", [2], 3), drifting[2048:3072])
    assert not torch.equal(drifting[:1024], drifting[1024:2048])


def test_queries_of_the_indexer_drift():
    """A row and its successor have all terms but one in common."""
    x = make_problem(tokens=16384).drifting("index", [0], 256)
    assert x.var() == pytest.approx(1, abs=0.08)
    for distance, common in ((1, DRIFT - 1), (DRIFT // 2, DRIFT // 2), (DRIFT, 0)):
        correlation = (x[distance:] * x[:-distance]).mean()
        assert correlation == pytest.approx(common / DRIFT, abs=0.08)


def test_overlap_of_neighbours():
    """Row 2 i has keys 0..7, row 2 i + 1 keys 4..11: half of either."""
    topk_indices = (torch.arange(200) % 2 * 4)[:, None, None] + torch.arange(8)
    assert record.overlap(topk_indices, 8) == 0.5
    topk_indices[:100] = 0  # alike
    assert 0.5 < record.overlap(topk_indices, 8) < 1
    assert record.overlap(topk_indices[:8], 8) is None


def test_queries_may_be_projected(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert simulate("--query-rank", "4", "--plan", "none", "--json", path) == 0
    for row in rows_in(path).values():
        assert row["query_rank"] == 4 and row["plan"] == "none"
        work = row["tflops"] * row["median_ms"] * 1e9
        assert work == pytest.approx(work_of(range(TOKENS))
                                     + LAYERS * 6 * TOKENS * 4 * HEADS * DIM)


def test_awaited_exchanges_are_over_at_once(monkeypatch):
    class Work:
        waits = 0

        def wait(self):
            Work.waits += 1

    monkeypatch.setattr(library, "_all_gather", lambda *_, **__: Work())
    monkeypatch.setattr(library, "_reduce_scatter", lambda *_, **__: Work())
    small, large = torch.zeros(2), torch.zeros(6)
    for awaited in (False, True):
        Work.waits = 0
        with exchanges.installed(exchanges.Exchanges(awaited)) as counted:
            library._all_gather(large, small)
            library._reduce_scatter(small, large)
        assert Work.waits == (2 if awaited else 0)
        assert counted.bytes == 2 * 16


# The faults.


def test_bounds_are_those_of_the_specification():
    want = torch.eye(4).repeat(4, 1)
    got = want.clone()
    got[5] *= 1.03
    rmse, row = equality.figures_of("grad_q", got, want)
    assert (rmse.value, rmse.bound) == (pytest.approx(0.03 / 4), 1e-2) and rmse.good
    assert (row.value, row.bound) == (pytest.approx(0.03), 4e-2) and row.good
    got[5] = want[5] * 1.05
    rmse, row = equality.figures_of("grad_q", got, want)
    assert rmse.value == pytest.approx(0.05 / 4) and not rmse.good and not row.good
    want[5] = got[5] = 0
    got[5, 0] = 0.03  # of a row that is nothing, the size of the others counts
    assert equality.figures_of("grad_q", got, want)[1].good
    got[5, 0] = float("nan")
    figures = equality.figures_of("grad_q", got, want)
    assert not any(figure.good for figure in figures)
    assert max(rmse.share, *(figure.share for figure in figures)) == float("inf")


def plant(monkeypatch, name, change):
    """Makes a function of the library return something else to the ranks."""
    plain = getattr(library, name)
    monkeypatch.setattr(library, name, lambda *args, **options: change(plain(*args, **options)))


def test_another_selection_is_reported(monkeypatch, capsys):
    def change(selection):
        selection.topk_indices[-1, 0, :TOPK] = torch.arange(TOPK, dtype=torch.int32)
        return selection

    plant(monkeypatch, "indexer_topk", change)
    assert simulate() == 1
    printed = capsys.readouterr()
    for order in ORDERS:
        assert (f"context_parallel.py: {order}: rows with another selection than on one rank: 4\n"
                in printed.err)


@pytest.mark.parametrize("name", ["out", "grad_q", "grad_kv"])
@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_other_results_are_reported(monkeypatch, capsys, name, factor):
    function = "attention_forward" if name == "out" else "attention_backward"
    plant(monkeypatch, function,
          lambda result: result._replace(**{name: getattr(result, name) * factor}))
    assert simulate("--order", "zigzag") == 1
    assert f"context_parallel.py: zigzag: {name} r" in capsys.readouterr().err


def test_another_volume_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(Problem, "exchange_bytes", lambda self: 7)
    assert simulate("--order", "zigzag") == 1
    assert ("zigzag: rank 3 must receive 7 bytes in a step, received "
            f"{(256 + LAYERS * 6 * DIM) * TOKENS * 3 // 4}\n" in capsys.readouterr().err)


WRONG_EXCHANGE = """
import sys
sys.argv[0] = {script!r}
sys.path.insert(0, {folder!r})
import runpy
from flashdsa.torch import context_parallel as library
plain = library._all_gather

def reversed_ranks(received, own, **options):
    work = plain(received, own, **options)
    work.wait()
    received.copy_(received.flip(0))
    return work

library._all_gather = reversed_ranks
runpy.run_path({script!r}, run_name="__main__")
"""


def test_wrong_exchange_between_processes_is_reported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WRONG_EXCHANGE.format(script=str(SCRIPT), folder=str(BENCH)))
    code, printed = torchrun(program, "--order", "contiguous", "--samples", 1)
    assert code == 1
    assert "context_parallel.py: contiguous: rows with another selection than on one rank: " in (
        printed)
    assert "breaks its bound" in printed


# Options and files.


@pytest.mark.parametrize("arguments, sentence", [
    ([], "expected to be started by torchrun, or --simulate, got neither"),
    (["--simulate", 0], "--simulate must be in 1..64, got 0"),
    (["--simulate", 2, "--heads", 129], "--heads must be in 1..128, got 129"),
    (["--simulate", 2, "--index-heads", 0], "--index-heads must be in 1..64, got 0"),
    (["--simulate", 2, "--topk", 2049], "--topk must be in 1..2048, got 2049"),
    (["--simulate", 2, "--layers", 0], "--layers must be at least 1, got 0"),
    (["--simulate", 2, "--samples", 0], "--samples must be at least 1, got 0"),
    (["--simulate", 2, "--warmup", -1], "--warmup must be at least 0, got -1"),
    (["--simulate", 2, "--threads", 0], "--threads must be at least 1, got 0"),
    (["--simulate", 2, "--query-rank", -1], "--query-rank must be at least 0, got -1"),
    (["--simulate", 3, "--tokens", 8],
     "--tokens must be a positive multiple of 6, twice the ranks, got 8"),
    (["--simulate", 2, "--check-tokens", 2],
     "--check-tokens must be a positive multiple of 4, twice the ranks, got 2"),
    (["--simulate", 2, "--tokens", 8, "--check-tokens", 12],
     "--check-tokens must be at most --tokens, 8, got 12"),
    (["--simulate", 2, "--json", "nowhere/rows.jsonl"],
     "--json cannot write nowhere/rows.jsonl: no such folder"),
    (["--simulate", "two"], "argument --simulate: invalid int value: 'two'"),
    (["--simulate", 2, "--rank", 1], "unrecognized arguments: --rank 1"),
])
def test_bad_options_are_refused(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == f"context_parallel.py: {sentence}\n" and printed.out == ""


@pytest.mark.parametrize("tokens, check_tokens", [(60, 60), (12288, 8190)])
def test_every_rank_has_rows_of_the_checked_document(tokens, check_tokens):
    assert bench.parse(["--simulate", "3", "--tokens", str(tokens)]).check_tokens == check_tokens


@pytest.mark.parametrize("rank, sentence", [
    ("0", "context_parallel.py: --simulate plays all ranks in one process, "
          "got one of torchrun's\n"),
    ("1", ""),
])
def test_the_first_rank_speaks(monkeypatch, capsys, rank, sentence):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--simulate", "2", "--device", "cpu"])
    assert stopped.value.code == 2 and capsys.readouterr().err == sentence


def test_a_gpu_for_every_rank(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--device", "cuda"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "context_parallel.py: --device cuda needs 1000 GPUs here, one for every rank, "
        f"got {torch.cuda.device_count()}\n")


def test_rows_are_appended(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"order": "old"}\n')
    assert simulate("--order", "zigzag", "--json", path) == 0
    assert list(rows_in(path)) == ["old", "zigzag"]
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["order", "ranks"] and line.split()[:3] == [
        "zigzag", "4,", "simulated"]


def test_a_file_that_cannot_be_written(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        simulate("--order", "zigzag", "--json", tmp_path)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        f"context_parallel.py: --json cannot write {tmp_path}: Is a directory\n")


@pytest.mark.cuda
def test_played_ranks_on_a_gpu(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert bench.main(["--simulate", 2, "--device", "cuda", "--tokens", 4096, "--check-tokens",
                       1024, "--samples", 2, "--json", path]) == 0
    for row in rows_in(path).values():
        assert row["backend"] == flashdsa.backends()[0].name
        assert row["device"] == torch.cuda.get_device_name()
        assert all(memory > 0 for memory in row["peak_memory_bytes"])
