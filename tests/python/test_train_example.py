"""The training example: what it learns, dense against sparse, one rank against two, its options."""

import json
import math
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/train"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import model  # noqa: E402
import plot  # noqa: E402
import shards  # noqa: E402
import train  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
# 99 made-up words, few of them common. No page of the project: an edit would change the losses.
TEXT = pathlib.Path(__file__).with_name("made_up_words.txt")
STEPS, LENGTH, TOKENS = 12, 64, 128
OPTIONS = ["--steps", str(STEPS), "--tokens", str(TOKENS), "--length", str(LENGTH),
           "--warmup", "3", "--topk", "16", "--text", str(TEXT)]


def run(*arguments, ranks=1):
    """The example as a user starts it: exit code and what it printed."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*launcher, EXAMPLE / "train.py", *OPTIONS, *map(str, arguments)],
                          capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout + done.stderr


def short_run(attention, *arguments, kind="loss"):
    """The losses of a run in this process."""
    options = train.parse([*OPTIONS, *map(str, arguments)])
    done = train.train(attention, [path.read_bytes() for path in options.text], options,
                       torch.device("cpu"))
    return done[kind]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The files of a dense and a sparse run, results.json and curves.svg."""
    folder = tmp_path_factory.mktemp("train")
    code, printed = run("--out", folder / "results.json", "--svg", folder / "curves.svg")
    assert code == 0, printed
    return folder


def losses(path, name="sparse", kind="loss"):
    return json.loads(path.read_text())["runs"][name][kind]


def largest_difference(got, want):
    assert len(got) == len(want) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(got, want))


def mean(values):
    return sum(values) / len(values)


# What is learnt.


def test_sparse_attention_learns_as_dense_does(one_rank):
    dense, sparse = (losses(one_rank / "results.json", name) for name in ("dense", "sparse"))
    assert abs(dense[0] - math.log(256)) < 1  # of 256 bytes, one is as likely as another
    learnt = dense[0] - mean(dense[-4:])
    assert learnt > 1
    assert sparse[0] - mean(sparse[-4:]) > 0.9 * learnt


def test_the_indexer_comes_closer_to_attention():
    """Over every key at every step, so that the steps compare."""
    divergence = short_run("sparse", "--warmup", STEPS, kind="indexer_loss")
    assert len(divergence) == STEPS and min(divergence) >= 0
    assert mean(divergence[-4:]) < 0.8 * divergence[0]


def test_the_same_seed_gives_the_same_losses():
    again = [short_run("sparse", "--steps", 3, "--warmup", 1) for _ in range(2)]
    assert again[0] == again[1]
    assert short_run("sparse", "--steps", 3, "--warmup", 1, "--seed", 1) != again[0]


# Dense against sparse.


def plain_bf16(self, q, q_rope, kv, rows):
    """Attention.dense as PyTorch computes it in BF16, over latent rows as the kernels do."""
    q = torch.cat((torch.einsum("thd,hdc->thc", q, self.up_key), q_rope), -1)
    q, kv = q.bfloat16().transpose(0, 1), kv.bfloat16().expand(self.heads, -1, -1)
    first = rows.metadata.starts[:, None]
    keys = torch.arange(kv.shape[1])
    visible = (keys >= first) & (keys < first + rows.metadata.causal_lengths[:, None])
    logits = (q @ kv.transpose(1, 2)).float() * self.scale
    p = logits.masked_fill(~visible, -torch.inf).softmax(-1).bfloat16()
    out = (p @ kv[..., :model.LATENT]).transpose(0, 1)
    return torch.einsum("thc,hcd->thd", out.to(self.up_value.dtype), self.up_value)


def logits_and_gradients(topk):
    """Of one step, as two vectors; the indexers take no part."""
    torch.manual_seed(0)
    network = model.Model(model.Config()).double()
    batch = next(data.batches([TEXT.read_bytes()], TOKENS, LENGTH, seed=0))
    ranks = shards.OneRank(TOKENS, 2)
    rows = model.Rows(ranks.prepare_packed_metadata(batch.cu_seqlens), ranks)
    logits, _ = network(batch.tokens, rows, topk)
    torch.nn.functional.cross_entropy(logits, batch.targets).backward()
    return logits.detach().flatten(), torch.cat([p.grad.flatten() for p in network.parameters()
                                                 if p.grad is not None])


def test_every_key_selected_is_dense_attention(monkeypatch):
    dense = logits_and_gradients(None)
    sparse = logits_and_gradients(LENGTH)
    monkeypatch.setattr(model.Attention, "dense", plain_bf16)
    plain = logits_and_gradients(None)
    for want, got, same_precision in zip(dense, sparse, plain):
        bound = 2 * (same_precision - want).norm()
        assert 0 < (got - want).norm() <= bound < 0.05 * want.norm()


def test_a_run_with_every_key_is_the_dense_run():
    """Within BF16's unit roundoff, 2^-9, at every step."""
    arguments = ["--topk", LENGTH, "--warmup", 0]
    assert largest_difference(short_run("sparse", *arguments),
                              short_run("dense", *arguments)) < 2**-9


# One rank against two.


def test_two_ranks_give_the_losses_of_one(one_rank, tmp_path):
    code, printed = run("--expect", one_rank / "results.json", "--out", tmp_path / "two.json",
                        ranks=2)
    assert code == 0, printed
    assert "largest relative difference of a loss: " in printed
    assert json.loads((tmp_path / "two.json").read_text())["ranks"] == 2
    for name in ("dense", "sparse"):
        assert largest_difference(losses(tmp_path / "two.json", name),
                                  losses(one_rank / "results.json", name)) < 1e-4
    assert largest_difference(losses(tmp_path / "two.json", kind="indexer_loss"),
                              losses(one_rank / "results.json", kind="indexer_loss")) < 1e-4


@pytest.mark.parametrize("factor, code", [(1 + 0.9e-4, None), (1 + 1.1e-4, 1)])
def test_expect_finds_a_difference(one_rank, factor, code, capsys):
    results, changed = (json.loads((one_rank / "results.json").read_text()) for _ in range(2))
    changed["runs"]["sparse"]["loss"][5] *= factor
    assert exit_code(train.check_same_losses, results, changed) == code
    assert ("at most 0.0001" in capsys.readouterr().err) == (code == 1)


@pytest.mark.parametrize("name, words", [("options", "of the same options"),
                                         ("text", "of the same text"),
                                         ("runs", "with a dense run, got none")])
def test_expect_refuses_another_run(one_rank, name, words, capsys):
    results = json.loads((one_rank / "results.json").read_text())
    assert exit_code(train.check_same_task, results, results) is None
    assert exit_code(train.check_same_task, results, {**results, name: {"none": 0}}) == 2
    assert f"--expect needs a file {words}" in capsys.readouterr().err


def exit_code(check, *arguments):
    """None if `check` returns."""
    try:
        return check(*arguments)
    except SystemExit as stop:
        return stop.code


# Text, picture, options.


def test_batches_hold_every_byte_of_the_text_once():
    documents = [bytes(range(10)), bytes(range(100, 131)), b"z"]  # nothing follows the z
    (batch,) = (batch for batch, _ in zip(data.batches(documents, 39, 8, seed=1), range(1)))
    assert sorted(batch.tokens.tolist()) == [*range(9), *range(100, 130)]
    assert torch.equal(batch.targets, batch.tokens + 1)
    lengths = batch.cu_seqlens.diff()
    assert batch.cu_seqlens.dtype == torch.int32 and lengths.sum() == 39
    assert lengths.min() >= 1 and lengths.max() == 8
    again = next(data.batches(documents, 39, 8, seed=1))
    assert torch.equal(again.tokens, batch.tokens)
    assert not torch.equal(next(data.batches(documents, 39, 8, seed=2)).tokens, batch.tokens)


def test_unigram_entropy_of_known_texts():
    assert data.unigram_entropy([b"aaaa"]) == 0
    assert data.unigram_entropy([b"ab", b"ba"]) == pytest.approx(math.log(2))
    assert data.unigram_entropy([bytes(range(256))]) == pytest.approx(math.log(256))


def test_the_picture_holds_every_step_of_both_runs(one_rank):
    picture = xml.etree.ElementTree.parse(one_rank / "curves.svg").getroot()
    assert picture.tag == SVG + "svg"
    curves = [line.get("points").split() for line in picture.iter(SVG + "polyline")]
    assert [len(points) for points in curves] == 6 * [STEPS]  # dense, sparse, indexers; and means


def test_running_means_of_known_values():
    assert plot.running_mean([1, 2, 3, 7, 9, 9], 4) == [1.5, 2, 3.25, 5.25, 7, 25 / 3]


def test_the_page_shows_the_committed_results(tmp_path):
    plot.draw(json.loads((EXAMPLE / "results.json").read_text()), tmp_path / "training.svg")
    assert (tmp_path / "training.svg").read_text() == (
        ROOT / "docs/images/training.svg").read_text()


BAD_OPTIONS = {
    "steps": (["--steps", "0"], "--steps must be at least 1, got 0"),
    "warmup": (["--warmup", "-1"], "--warmup must be at least 0, got -1"),
    "topk": (["--topk", "2049"], "--topk must be in 1..2048, got 2049"),
    "length": (["--length", "4096"], "--length must be in 1..2048, got 4096"),
    "tokens": (["--tokens", "130"], "--tokens must be a multiple of 4, twice the shards, got 130"),
    "shards": (["--shards", "0"], "--shards must be at least 1, got 0"),
    "threads": (["--threads", "0"], "--threads must be at least 1, got 0"),
    "lr": (["--lr", "nan"], "--lr must be positive and finite, got nan"),
    "word": (["--topk", "many"], "argument --topk: invalid int value: 'many'"),
    "choice": (["--attention", "both-of-them"], "argument --attention: invalid choice"),
    "unknown": (["--top", "8"], "unrecognized arguments: --top 8"),
    "text": (["--text", "/no/such/file"], "cannot read /no/such/file: No such file"),
    "empty text": (["--text", os.devnull], "--text must hold at least 2 bytes"),
    "expect": (["--expect", "/no/such/file"], "cannot read /no/such/file: No such file"),
    "expect no json": (["--expect", str(ROOT / "README.md")], "--expect must be a file of --out"),
    "out": (["--out", "/no/such/folder/results.json"],
            "cannot write /no/such/folder/results.json: no such folder"),
    "svg": (["--svg", "/no/such/folder/curves.svg"],
            "cannot write /no/such/folder/curves.svg: no such folder"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_refusal(name, capsys):
    arguments, words = BAD_OPTIONS[name]
    with pytest.raises(SystemExit) as stop:
        train.main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"train.py: {words}") and printed.err.count("\n") == 1
    assert printed.out == ""


def test_ranks_and_shards_must_agree(monkeypatch, capsys):
    monkeypatch.setattr(train, "RANKS", 3)
    with pytest.raises(SystemExit):
        train.main([])
    assert "--shards must be the number of ranks, 3, got 2" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_missing_gpu_is_named(capsys):
    with pytest.raises(SystemExit):
        train.main(["--device", "cuda"])
    assert "--device cuda needs a GPU, got none" in capsys.readouterr().err


@pytest.mark.cuda
def test_a_gpu_begins_with_the_losses_of_the_host(one_rank, tmp_path):
    """Within BF16's unit roundoff; later steps go their own ways, as the kernels sum otherwise."""
    code, printed = run("--device", "cuda", "--out", tmp_path / "gpu.json")
    assert code == 0, printed
    for name in ("dense", "sparse"):
        got, want = (losses(path, name)[:2]
                     for path in (tmp_path / "gpu.json", one_rank / "results.json"))
        assert got == pytest.approx(want, rel=2**-9)
