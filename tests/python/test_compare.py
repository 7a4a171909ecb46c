"""flashdsa-compare: its workloads, its judge, what it refuses, what it writes."""

import csv
import dataclasses
import functools
import json
import math
import subprocess
import sys
import types
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from conftest import ROOT

torch = pytest.importorskip("torch")

import tilelang_stand_in  # noqa: E402
from flashdsa import compat  # noqa: E402
from flashdsa.compare import judge, operations, plots, run, workloads  # noqa: E402
from flashdsa.compare.__main__ import main  # noqa: E402
from flashdsa.compare.documents import draw_lengths  # noqa: E402
from flashdsa.compare.library import Forward, Gradients  # noqa: E402
from flashdsa.compare.ours import FlashDsa  # noqa: E402
from flashdsa.compare.peers import PEERS, _tilelang  # noqa: E402
from flashdsa.compare.record import read_json_lines  # noqa: E402
from flashdsa.compare.selections import neighbour_overlap, select_rows  # noqa: E402
from flashdsa.compare.shapes import SHAPES, Shape  # noqa: E402
from flashdsa.compare.workloads import WORKLOADS, Selection  # noqa: E402

HOST = torch.device("cpu")
RESULTS = ROOT / "bench/results/nvidia-h200-2026-12-02-sm90.jsonl"
SMALL = dataclasses.replace(SHAPES["glm5.2-tp8"], index_heads=4, topk=128)
ROW = {"op": "forward", "workload": "random", "heads": 8, "t_q": 4, "t_k": 8192, "median_ms": 2.0,
       "peer": "torch@2", "peer_median_ms": 3.0, "ratio": 1.5}
RUN = ["--shape", "glm5.2-tp8", "--rows", "4", "--repeats", "2", "--min-seconds", "0", "--threads",
       "1"]


def make(name, shape=SMALL, rows=8):
    return workloads.make_problem(WORKLOADS[name], shape, HOST, rows=rows)


@pytest.fixture(scope="module")
def problem():
    return make("single8k", rows=24).sharpened()


@pytest.fixture(scope="module")
def ours():
    return FlashDsa("cpu", 0, "built")


@pytest.fixture(scope="module")
def forward(problem, ours):
    return ours.forward(problem, problem.selection)


@pytest.fixture(scope="module")
def gradients(problem, ours, forward):
    return ours.backward(problem, problem.selection, forward)


# ------------------------------------------------------------------------------------- workloads


@pytest.mark.parametrize("name, rows, keys, causal", [
    ("random", 8192, 8192, False), ("random32k", 32768, 32768, False),
    ("drift90", 8192, 8192, False), ("drift90-128k", 4096, 131072, False),
    ("long32k", 32768, 32768, True), ("long128k", 4096, 131072, True),
    ("sft4k", 32768, 32768, True), ("single8k", 8192, 8192, True),
    ("single32k", 32768, 32768, True)])
def test_workload_has_the_sizes_of_its_definition(name, rows, keys, causal):
    workload = WORKLOADS[name]
    assert (workload.rows, workload.causal, sum(workload.lengths())) == (rows, causal, keys)


def test_documents_are_those_of_the_command():
    lengths = draw_lengths(32768, 100, 4000, seed=7)
    assert len(lengths) == 29 and lengths[:6] == [427, 3951, 862, 461, 2730, 1429]
    # (row, visible key) pairs of the rows that need scores: what `flashdsa bench --op topk --rows 0
    # --workload sft4k` counts.
    assert sum(sum(range(2049, length + 1)) for length in lengths) == 18780190


@pytest.mark.parametrize("name", sorted(set(WORKLOADS) - {"text"}))
def test_rows_are_ascending_visible_keys_and_then_holes(name):
    made = make(name)
    indices, lengths = made.selection.topk_indices.numpy()[:, 0], made.selection.topk_length.numpy()
    assert made.t_q == 8 and made.kv.shape == (made.t_k, 1, 576)
    position = np.arange(made.t_k - 8, made.t_k)
    boundaries = np.cumsum([0, *WORKLOADS[name].lengths()])
    document = np.searchsorted(boundaries, position, side="right") - 1
    start = boundaries[document] if WORKLOADS[name].causal else np.zeros(8, int)
    visible = position + 1 - start if WORKLOADS[name].causal else np.full(8, made.t_k)
    assert (lengths == np.minimum(visible, 128)).all()
    for row in range(8):
        keys = indices[row, :lengths[row]]
        assert (np.diff(keys) > 0).all() and (indices[row, lengths[row]:] == -1).all()
        assert keys[0] >= start[row] and keys[-1] < start[row] + visible[row]


@pytest.mark.parametrize("name, expected", [("random", 2048 / 8192), ("drift90", None),
                                            ("long128k", None)])
def test_rows_share_the_keys_that_the_definition_says(name, expected):
    made = make(name, SHAPES["glm5.2-tp8"], rows=16)
    # 1843 stay, and of the 205 drawn from the other keys some had just been dropped.
    drifting = (1843 + 205 * 205 / (made.t_k - 1843)) / 2048
    assert made.overlap == pytest.approx(expected or drifting, abs=0.01)


def test_rows_that_see_few_keys_select_all_and_the_first_beyond_them_starts_afresh():
    starts, visible = np.array([0, 0, 0, 10], np.int32), np.array([3, 4, 5, 1], np.int32)
    indices, lengths = select_rows(starts, visible, 11, 4, True, np.random.default_rng(1))
    assert lengths.tolist() == [3, 4, 4, 1]
    assert indices[:2, 0].tolist() == [[0, 1, 2, -1], [0, 1, 2, 3]]
    assert indices[3, 0].tolist() == [10, -1, -1, -1]
    assert len(set(indices[2, 0].tolist()) & {0, 1, 2, 3}) >= 3  # a drift from row 1
    assert neighbour_overlap(indices, starts, visible) is None


def test_indexer_selects_drifting_rows(problem, ours):
    chosen = ours.topk(problem, problem.metadata)
    overlap = neighbour_overlap(chosen.topk_indices.numpy(), problem.starts, problem.visible)
    assert overlap == pytest.approx(0.9, abs=0.05)


def test_sharpened_logits_deviate_by_more_and_are_the_same_bits():
    made = make("random", SHAPES["glm5.2-tp8"], rows=4)
    sharp = made.sharpened()
    assert torch.equal(sharp.q / 8, made.q) and torch.equal(sharp.kv / 8, made.kv)
    logits = torch.einsum("thd,kd->thk", sharp.q.double(), sharp.kv[:, 0].double()) * 0.0625
    assert logits.std().item() == pytest.approx(576**0.5 * 0.5 * 0.5 * 0.0625, rel=0.05)


def test_work_counts_valid_slots_alone():
    made = make("single8k", Shape("s", 2, 3, 0.5, topk=8190), rows=8192)
    picks = 8190 * 8191 // 2 + 2 * 8190
    forward, backward, topk, step = (operations.OPERATIONS[name].work(made) for name in
                                     ("forward", "backward", "topk", "step"))
    assert forward.flop == 2 * 2 * picks * (576 + 512)
    assert forward.bytes == picks * 1156 + 8192 * 2 * (1152 + 1024 + 4)
    assert backward.flop == 2 * 2 * picks * (3 * 576 + 2 * 512)
    assert backward.bytes == picks * 1156 + 8192 * (2 * (2 * 1152 + 2 * 1024 + 4) + 1152)
    assert topk.flop == 2 * 3 * 128 * (8191 + 8192)
    assert topk.bytes == 2 * 3 * (256 + 2) + 8192 * (256 + 8 + 4 + 4 * 8190)
    assert step.flop == topk.flop + 4 * (forward.flop + backward.flop)


# ----------------------------------------------------------------------------------------- judge


@pytest.mark.parametrize("name", ["flashdsa", "torch"])
def test_judge_accepts_right_results(name, problem, ours, forward):
    library = {"flashdsa": ours, "torch": PEERS["torch"]()}[name]
    figures = [judge.check_topk(problem, library.topk(problem, problem.metadata)),
               judge.check_forward(problem, problem.selection,
                                   library.forward(problem, problem.selection)),
               judge.check_backward(problem, problem.selection,
                                    library.backward(problem, problem.selection, forward))]
    assert all(figure.ok for figure in figures), [str(figure) for figure in figures]


@pytest.mark.parametrize("place, value", [("last", 1.0), ("last", math.nan), ("first", math.nan),
                                          ("first", math.inf)])
@pytest.mark.parametrize("field", ["out", "lse"])
def test_judge_rejects_a_wrong_element_of_the_forward(field, place, value, problem, forward):
    tensor = getattr(forward, field).clone()
    tensor.flatten()[-1 if place == "last" else 0] += value
    figure = judge.check_forward(problem, problem.selection, forward._replace(**{field: tensor}))
    assert not figure.ok and field in figure.name and str(figure).endswith(" FAIL")


@pytest.mark.parametrize("field", ["grad_q", "grad_kv"])
@pytest.mark.parametrize("value", [0.1, math.nan, -math.inf])
def test_judge_rejects_a_wrong_element_of_the_backward(field, value, problem, gradients):
    tensor = getattr(gradients, field).clone()
    sampled = int(judge._sampled_rows(problem.selection)[0])
    key = int(problem.selection.topk_indices[sampled, 0, -1])
    tensor[-1 if field == "grad_q" else key, ..., 5] += value
    figure = judge.check_backward(problem, problem.selection, gradients._replace(**{field: tensor}))
    assert not figure.ok and field in figure.name


def test_judge_rejects_a_backward_that_leaves_out_a_term(problem, gradients):
    half = gradients._replace(grad_kv=gradients.grad_kv * 0.97)
    assert judge.check_backward(problem, problem.selection, half).name.startswith("grad_kv")


@pytest.mark.parametrize("fault", ["shape", "dtype"])
def test_judge_rejects_another_form(fault, problem, forward, gradients):
    def spoil(tensor):
        return tensor[:-1] if fault == "shape" else tensor.double()

    figures = [judge.check_forward(problem, problem.selection, Forward(spoil(forward.out),
                                                                       forward.lse)),
               judge.check_forward(problem, problem.selection, Forward(forward.out,
                                                                       spoil(forward.lse))),
               judge.check_backward(problem, problem.selection, Gradients(spoil(gradients.grad_q),
                                                                          gradients.grad_kv)),
               judge.check_topk(problem, problem.selection._replace(
                   topk_length=spoil(problem.selection.topk_length)))]
    assert not any(figure.ok for figure in figures)


@pytest.mark.parametrize("fault", ["order", "length", "invisible", "suffix", "choice"])
def test_judge_rejects_a_wrong_selection(fault, problem, ours):
    chosen = ours.topk(problem, problem.metadata)
    indices, lengths = chosen.topk_indices.clone(), chosen.topk_length.clone()
    row = indices[-1, 0]
    if fault == "order":
        row[:2] = row[:2].flip(0)
    elif fault == "length":
        lengths[0] -= 1
    elif fault == "invisible":
        indices[0, 0, -1] = problem.t_k - 1
    elif fault == "suffix":
        row[-1] = -1
    else:  # the best key, in exchange for one that was left
        scores = ours_scores(problem, problem.t_q - 1)
        left = sorted(set(range(problem.t_k)) - set(row.tolist()))[0]
        kept = row[row != int(scores.argmax())]
        indices[-1, 0] = torch.cat((kept, torch.tensor([left], dtype=torch.int32))).sort().values
    figure = judge.check_topk(problem, Selection(indices, lengths))
    assert not figure.ok
    assert figure.name == ("selection" if fault == "choice" else "malformed rows")


def ours_scores(problem, row):
    dots = problem.index_k.double() @ problem.index_q[row].double().T
    return dots.relu() @ problem.head_weights[row].double()


def test_oracle_is_what_autograd_says(problem):
    """The FP64 of the judge against PyTorch's own softmax and its derivative."""
    rows = torch.tensor([0, 7])
    q, kv = problem.q[rows].double().requires_grad_(), problem.kv.double().requires_grad_()
    keys = kv[problem.selection.topk_indices[rows, 0].long(), 0]
    logits = torch.einsum("rhd,rkd->rhk", q, keys) * problem.shape.softmax_scale
    out = torch.einsum("rhk,rkv->rhv", logits.softmax(2), keys[..., :512])
    out.backward(problem.grad_out[rows].double())
    want = judge.exact_forward(problem, problem.selection, rows)
    torch.testing.assert_close(want.out, out.detach())
    torch.testing.assert_close(want.lse, logits.logsumexp(2).detach())
    torch.testing.assert_close(judge.exact_grad_q(problem, problem.selection, rows), q.grad)
    alone = dataclasses.replace(
        problem, q=problem.q[rows], grad_out=problem.grad_out[rows],
        selection=Selection(problem.selection.topk_indices[rows],
                            problem.selection.topk_length[rows]))
    keys = problem.selection.topk_indices[0, 0, [0, 64]].long()
    torch.testing.assert_close(judge.exact_grad_kv(alone, alone.selection, keys), kv.grad[keys, 0])


# ----------------------------------------------------------------------------------------- peers


class CudnnCalls:
    """cuDNN Frontend's calls by their stand-ins, which work on the host."""

    indexer_top_k_wrapper = staticmethod(compat.indexer_top_k_wrapper)
    indexer_forward_wrapper = staticmethod(compat.indexer_forward_wrapper)

    @staticmethod
    def sparse_attention_backward_wrapper(q, *tensors, **options):
        assert q.shape[1] % 64 == 0 and all(tensor.is_contiguous() for tensor in (q, *tensors))
        return compat.sparse_attention_backward_wrapper(q, *tensors, **options)


def flash_mla_call(q, kv, indices, scale, **options):
    assert q.shape[1] % 64 == 0 and q.is_contiguous()
    return compat.flash_mla_sparse_fwd(q, kv, indices, scale, **options)


@pytest.fixture
def pair(monkeypatch):
    """The peers' calls with the stand-ins behind them: their conventions without their kernels."""
    peer = PEERS["flash_mla+cudnn"]()
    peer._flash_mla._forward, peer._cudnn._dsa = flash_mla_call, CudnnCalls
    return peer


@pytest.mark.parametrize("workload", ["single8k", "sft4k", "long32k"])
def test_peers_calls_keep_their_conventions(workload, pair):
    made = make(workload, rows=24)
    inputs = operations.Inputs(made, made.selection, None)
    result = operations.OPERATIONS["step"].run(pair, inputs)
    figure = operations.OPERATIONS["step"].check(inputs, result, False)
    assert figure.ok, str(figure)
    assert result.forward.lse.shape == (24, 8) and result.gradients.grad_q.shape == made.q.shape


def test_cudnn_selects_in_pieces_of_bounded_scratch(problem, pair, monkeypatch):
    whole = pair.topk(problem, problem.metadata)
    monkeypatch.setattr("flashdsa.compare.peers._cudnn._SCRATCH_BYTES", 8 * 8192 * 5)
    pieces = pair.topk(problem, problem.metadata)
    assert torch.equal(whole.topk_indices, pieces.topk_indices)
    assert judge.check_topk(problem, pieces).ok


@pytest.fixture
def tilelang(monkeypatch):
    """The peer, with its programs run by NumPy."""
    package = types.ModuleType("tilelang")
    package.language, package.compile = tilelang_stand_in, tilelang_stand_in.compile
    monkeypatch.setitem(sys.modules, "tilelang", package)
    monkeypatch.setitem(sys.modules, "tilelang.language", tilelang_stand_in)
    yield PEERS["tilelang"]()
    for part in ("forward", "backward"):
        sys.modules.pop(f"flashdsa.compare.peers._tilelang_{part}", None)
        getattr(_tilelang, f"_compiled_{part}").cache_clear()


@pytest.mark.parametrize("heads", [8, 72])
def test_tilelang_programs_are_right(heads, tilelang):
    made = make("single8k", dataclasses.replace(SMALL, heads=heads), rows=4).sharpened()
    lengths = torch.tensor([65, 64, 100, 128], dtype=torch.int32)
    indices = made.selection.topk_indices.clone()
    indices[torch.arange(128) >= lengths[:, None, None]] = -1
    selection = Selection(indices, lengths)
    forward = tilelang.forward(made, selection)
    gradients = tilelang.backward(made, selection, forward)
    for figure in (judge.check_forward(made, selection, forward),
                   judge.check_backward(made, selection, gradients)):
        assert figure.ok, str(figure)
    want = judge.exact_grad_kv(made, selection, torch.arange(made.t_k))
    got = gradients.grad_kv[:, 0].double()
    assert (got - want).norm() <= judge.GRAD_RMSE * want.norm()
    assert (got[want.norm(dim=1) == 0] == 0).all()


def test_peers_say_what_they_do_not_take(problem):
    full = make("random")
    on_gpu = types.SimpleNamespace(device=torch.device("cuda"), causal=False, workload="random",
                                   shape=problem.shape)
    cudnn = PEERS["cudnn"]()
    assert cudnn.refusal("topk", on_gpu) == (
        "its indexer is causal, and in random every row sees all keys")
    on_gpu.causal = True
    assert cudnn.refusal("topk", on_gpu) == "its indexer has 32 or 64 heads"
    assert cudnn.refusal("backward", on_gpu) == "" == PEERS["torch"]().refusal("topk", full)
    for name in ("flash_mla", "cudnn", "flash_mla+cudnn", "tilelang"):
        peer = PEERS[name]()
        assert {peer.refusal(operation, full) for operation in peer.operations} == {"needs a GPU"}


# --------------------------------------------------------------------------------------- command


def run_main(capsys, *arguments):
    code = main(arguments)
    return code, capsys.readouterr()


@pytest.mark.parametrize("arguments, sentence", [
    (("--op", "forward,upward"),
     "--op must be among topk, forward, backward, step, got 'upward'"),
    (("--workload", "rand"), "--workload must be among random, random32k, "),
    (("--shape", "glm9"), "--shape must be among glm5.2, glm5.2-tp8, glm5.2-cp8-32k, dsv3.2, got"),
    (("--peer", "numpy"),
     "--peer must be among flash_mla, cudnn, flash_mla+cudnn, tilelang, torch, got 'numpy'"),
    (("--plan", "old"), "--plan must be among none, reused, built, got 'old'"),
    (("--backend", "cuda"), "--backend must be among auto, cpu, sm90, got 'cuda'"),
    (("--backend", "cpu", "--regime", "cold"), "--regime must be among warm, got 'cold'"),
    (("--backend", "cpu", "--l2", "flushed"), "--l2 must be among warm, got 'flushed'"),
    (("--rows", "-1"), "argument --rows: must be a whole number in 0..2147483647, got '-1'"),
    (("--seed", "2147483648"), "argument --seed: must be a whole number in 0..2147483647, got "),
    (("--threads", "1025"), "argument --threads: must be a whole number in 0..1024, got '1025'"),
    (("--min-seconds", "inf"), "argument --min-seconds: must be a finite number from 0 on, got "),
    (("--min-seconds", "soon"), "argument --min-seconds: must be a finite number from 0 on, got "),
    (("--op", "a\nb"), "--op must be among topk, forward, backward, step, got 'a\\nb'"),
    (("--rest",), "unrecognized arguments: --rest"),
    (("--from", "rows.jsonl"), "--from must come with --plots, got none"),
    (("--from", "/nowhere/rows.jsonl", "--plots", "plots"),
     "/nowhere/rows.jsonl must be a file of JSON objects, one a line, got: "),
    (("--backend", "cpu", "--json", "/nowhere/rows.jsonl"),
     "/nowhere/rows.jsonl must be a file that can be appended to, got: No such file or directory"),
    (("--backend", "cpu", "--workload", "random", "--op", "topk", "--json", "/dev/full", *RUN),
     "/dev/full must be a file that can be appended to, got: No space left on device"),
    (("--backend", "cpu", "--workload", "text"),
     "workload text must come with --text-file, got none"),
    (("--backend", "cpu", "--workload", "text", "--text-file", "/nowhere/text"),
     "--text-file must be a safetensors file, got /nowhere/text: "),
    (("--backend", "cpu", "--workload", "random", "--op", "step", *RUN),
     "--op must name an operation that a workload has, got none: step needs documents, and in "
     "workload random every row sees all keys"),
])
def test_bad_usage_is_one_sentence(arguments, sentence, capsys):
    code, output = run_main(capsys, *arguments)
    assert code == 2
    assert output.err.startswith(f"flashdsa-compare: {sentence}") and output.err.count("\n") == 1


def test_a_backend_without_its_device_is_unavailable(capsys):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device")
    code, output = run_main(capsys, "--backend", "sm90")
    assert code == 3 and output.err.startswith("flashdsa-compare: --backend sm90 must be available")


def write_text(path, **changes):
    from safetensors.torch import save_file

    tensors = {"cu_seqlens": torch.tensor([0, 100, 300], dtype=torch.int32),
               "index_q": torch.randn(300, 32, 128).bfloat16(),
               "index_k": torch.randn(300, 128).bfloat16(),
               "head_weights": torch.rand(300, 32), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return str(path)


@pytest.mark.parametrize("changes, sentence", [
    ({"index_k": None}, "cu_seqlens, index_q, index_k, head_weights, got {} without index_k"),
    ({"cu_seqlens": torch.tensor([0, 200, 100, 300], dtype=torch.int32)},
     "cu_seqlens int32 [N+1] that ascends from 0, got {} with int32 [4] [0, 200, 100, 300]"),
    ({"cu_seqlens": torch.tensor([5, 300], dtype=torch.int32)},
     "cu_seqlens int32 [N+1] that ascends from 0, got {} with int32 [2] [5, 300]"),
    ({"cu_seqlens": torch.tensor([0, 300])},
     "cu_seqlens int32 [N+1] that ascends from 0, got {} with int64 [2] [0, 300]"),
    ({"cu_seqlens": torch.tensor(300, dtype=torch.int32)},
     "cu_seqlens int32 [N+1] that ascends from 0, got {} with int32 [] [300]"),
    ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)},
     "cu_seqlens int32 [N+1] that ascends from 0, got {} with int32 [0] []"),
    ({"index_q": torch.zeros(300, 8, 128).bfloat16()},
     "index_q bfloat16 [300, 32, 128] as its documents and shape glm5.2-tp8 have it, got {} with "
     "bfloat16 [300, 8, 128]"),
    ({"index_k": torch.zeros(512, 128).bfloat16()},
     "index_k bfloat16 [300, 128] as its documents and shape glm5.2-tp8 have it, got {} with "
     "bfloat16 [512, 128]"),
    ({"head_weights": torch.zeros(300, 32).double()},
     "head_weights float32 [300, 32] as its documents and shape glm5.2-tp8 have it, got {} with "
     "float64 [300, 32]"),
])
def test_a_text_file_of_another_form_is_refused(changes, sentence, tmp_path, capsys):
    path = write_text(tmp_path / "text.safetensors", **changes)
    code, output = run_main(capsys, "--backend", "cpu", "--workload", "text", "--text-file", path,
                            *RUN)
    assert (code, output.err) == (
        2, f"flashdsa-compare: --text-file must hold {sentence.format(path)}\n")


@pytest.mark.parametrize("given, sentence", [
    (False, "workload text must come with --text-file, got none"),
    (True, "--text-file must hold index_q bfloat16 [300, 64, 128] as its documents "
     "and shape dsv3.2 have it, got {} with bfloat16 [300, 32, 128]"),
])
def test_a_text_is_refused_before_another_workload_is_measured(given, sentence, tmp_path, capsys):
    path = write_text(tmp_path / "text.safetensors")
    code, output = run_main(capsys, "--backend", "cpu", "--workload", "random,text", *RUN,
                            "--shape", "glm5.2-tp8,dsv3.2",
                            *(("--text-file", path) if given else ()))
    assert (code, output.out) == (2, "")
    assert output.err == f"flashdsa-compare: {sentence.format(path)}\n"


def test_text_takes_the_indexers_own_selection(tmp_path, ours):
    path = write_text(tmp_path / "text.safetensors")
    shape = dataclasses.replace(SHAPES["glm5.2-tp8"], topk=64)
    made = workloads.make_problem(WORKLOADS["text"], shape, HOST, text_file=path)
    assert made.starts.tolist() == [0] * 100 + [100] * 200 and made.t_k == 300
    assert judge.check_topk(made, made.selection).ok
    assert made.selection.topk_length.tolist() == [
        min(64, n) for length in (100, 200) for n in range(1, length + 1)]


def test_a_drop_in_is_no_peer():
    """In a process of its own, where flashdsa.compat has registered the names."""
    program = ("import flashdsa.compat as c\n"
               "assert c.install(override=True)\n"
               "from flashdsa.compare.__main__ import main\n"
               "print([main(['--backend', 'cpu', '--peer', peer]) for peer in "
               "('flash_mla', 'cudnn')])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[2, 2]\n")
    assert done.stderr == "".join(
        f"flashdsa-compare: peer {peer} must be another library, got the stand-in that "
        "flashdsa.compat.install() registered\n" for peer in ("flash_mla", "cudnn"))


def test_a_peer_that_does_not_load_is_told(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    code, output = run_main(capsys, "--backend", "cpu", "--op", "forward", "--workload", "drift90",
                            "--peer", "flash_mla,tilelang", *RUN)
    assert code == 0
    assert "flash_mla.flash_mla_sparse_fwd does not load: module 'flash_mla' has no" in output.out
    assert "tilelang   not installed" in output.out


def test_a_peer_whose_import_raises_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "tilelang.py").write_text("raise RuntimeError('no driver\\nat all')\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, output = run_main(capsys, "--backend", "cpu", "--op", "topk", "--workload", "random",
                            "--peer", "tilelang", *RUN)
    assert code == 0
    assert "tilelang  tilelang.compile does not load: no driver  forward, backward" in output.out


def test_run_writes_records_and_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(plots.THEMES, "dark")  # drawn below, of committed results
    files = {kind: tmp_path / f"rows.{kind}" for kind in ("json", "csv")}
    arguments = ["--backend", "cpu", "--workload", "single8k", "--peer", "torch", "--commit", "abc",
                 "--json", str(files["json"]), "--csv", str(files["csv"]), *RUN]
    assert main([*arguments, "--plots", str(tmp_path / "plots")]) == 0
    table = capsys.readouterr().out
    records = read_json_lines(files["json"])
    assert [record["op"] for record in records] == ["topk", "forward", "backward", "step"]
    for record in records:
        assert record["peer"] == f"torch@{torch.__version__}" and record["commit"] == "abc"
        assert 0 < record["p10_ms"] <= record["median_ms"] <= record["p90_ms"]
        assert record["ratio"] == record["peer_median_ms"] / record["median_ms"] > 0
        assert 0 < record["tflops"] == pytest.approx(
            record["ceiling_share"] * record["peak_tflops"])
        assert record["t_q"] == 4 and record["shape"] == "glm5.2-tp8-8k" and record["heads"] == 8
        assert record["layers"] == (4 if record["op"] == "step" else 1)
        assert record["plan"] == ("none" if record["op"] == "topk" else "built")
        assert record["peak_bytes"] is None and (record["samples"], record["threads"]) == (2, 1)
        assert record["command"].startswith("flashdsa-compare --backend cpu --workload single8k")
        assert "FAIL" not in record["error"] + record["peer_error"]
        assert f"{record['ratio']:.2f}" in table
    forward = records[1]
    assert forward["tflops"] * forward["median_ms"] == pytest.approx(
        1e-9 * 2 * 8 * 4 * 2048 * (576 + 512))

    with files["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [list(record) for record in records]
    assert [float(row["median_ms"]) for row in rows] == [r["median_ms"] for r in records]
    assert rows[0]["simulated"] == "false" and rows[0]["peak_bytes"] == ""
    check_pictures(tmp_path / "plots", records)

    assert main([*arguments, "--op", "topk"]) == 0  # appended, below one line of names
    assert len(read_json_lines(files["json"])) == 5
    assert files["csv"].read_text().count("op,backend,") == 1


def check_pictures(folder, records):
    names = {f"{name}-{theme}.{kind}" for name in ("time", "ratio", "roofline")
             for theme in plots.THEMES for kind in ("svg", "png")}
    assert {path.name for path in folder.iterdir()} == names
    for path in folder.glob("*.png"):
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20], "big") > 600
    ratios = sorted(f"{record['ratio']:.2f}" for record in records if record["ratio"])
    for theme, colors in plots.THEMES.items():
        roots = {name: ElementTree.parse(folder / f"{name}-{theme}.svg").getroot()
                 for name in ("time", "ratio", "roofline")}
        texts = {name: [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
                 for name, root in roots.items()}
        assert sorted(text for text in texts["ratio"] if text in ratios) == ratios
        for root in roots.values():
            assert colors["paper"] in ElementTree.tostring(root, encoding="unicode")
        assert "flashdsa" in texts["time"] and "flashdsa: forward" in texts["roofline"]


def test_reused_plans_and_an_operation_without_plans(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    code, output = run_main(capsys, "--backend", "cpu", "--op", "topk,forward,step", "--workload",
                            "random,single8k", "--plan", "none,reused", "--peer", "tilelang",
                            "--json", str(path), *RUN)
    assert code == 0 and "left out: step needs documents, and in workload random" in output.out
    records = read_json_lines(path)
    assert [(r["workload"], r["op"], r["plan"]) for r in records] == [
        ("random", "topk", "none"), ("random", "forward", "none"), ("random", "forward", "reused"),
        ("single8k", "topk", "none"), ("single8k", "forward", "none"),
        ("single8k", "forward", "reused"), ("single8k", "step", "none"),
        ("single8k", "step", "built")]
    for record in records:
        reused = record["plan"] == "reused"
        assert (record["plan_bytes"] or 0) >= (40 * 4 + 4 if reused else 0)
        assert (record["plan_bytes"] is None) == (record["plan_ms"] is None) == (not reused)
        assert record["peer"] is record["ratio"] is None


def test_a_shape_of_a_rank_has_its_rows_and_keys(capsys):
    assert workloads.refusal(WORKLOADS["random"], SHAPES["glm5.2-cp8-32k"]) == (
        "workload random does not have the T_k = 32768 of shape glm5.2-cp8")
    made = make("random32k", dataclasses.replace(SHAPES["glm5.2-cp8-32k"], heads=1, topk=8), rows=0)
    assert (made.t_q, made.t_k, made.shape.full_name(made.t_k)) == (4096, 32768, "glm5.2-cp8-32k")


@pytest.mark.parametrize("module, arguments, sentence", [
    ("torch", (), "PyTorch must be installed, got none: pip install 'flashdsa[compare]'"),
    ("matplotlib", ("--backend", "cpu", "--plots", "plots"),
     "--plots needs matplotlib, got none: pip install 'flashdsa[compare]'"),
])
def test_a_missing_package_is_unavailable(module, arguments, sentence, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    code, output = run_main(capsys, *arguments)
    assert (code, output.out, output.err) == (3, "", f"flashdsa-compare: {sentence}\n")


def test_text_needs_safetensors(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    code, output = run_main(capsys, "--backend", "cpu", "--workload", "text", "--text-file", "f")
    assert code == 3 and output.err == ("flashdsa-compare: workload text needs safetensors, got "
                                        "none: pip install 'flashdsa[compare]'\n")


def test_a_peer_that_raises_is_left_out(monkeypatch, capsys):
    def fail(self, problem, selection):
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(PEERS["torch"], "forward", fail)
    code, output = run_main(capsys, "--backend", "cpu", "--op", "forward", "--workload", "random",
                            "--peer", "torch", *RUN)
    assert code == 0
    assert output.out.endswith("left out: forward of torch: RuntimeError: no such kernel\n")


@pytest.mark.parametrize("library", ["flashdsa", "torch"])
def test_a_wrong_result_fails_the_run(library, monkeypatch, capsys):
    owner = FlashDsa if library == "flashdsa" else PEERS["torch"]
    right = owner.forward

    def wrong(self, problem, selection):
        result = right(self, problem, selection)
        result.out[-1, 0, 0] += 1
        return result

    monkeypatch.setattr(owner, "forward", wrong)
    code, output = run_main(capsys, "--backend", "cpu", "--op", "forward", "--workload", "random",
                            "--peer", "torch", *RUN)
    assert code == 1 and output.out.count(" FAIL") == 1


def without_rope(problem):
    q = problem.q.clone()
    q[..., 512:] = 0
    return dataclasses.replace(problem, q=q)


def forward_without_rope_logits(right, problem, *rest):
    return right(without_rope(problem), *rest)


def backward_without_rope_logits(right, problem, *rest):
    """p and dS are wrong; rope grad_kv is not."""
    sharp = right(problem, *rest)
    blunt = right(without_rope(problem), *rest)
    blunt.grad_kv[..., 512:] = sharp.grad_kv[..., 512:]
    return blunt


def backward_with_rope_grad_kv_elsewhere(right, problem, *rest):
    result = right(problem, *rest)
    result.grad_kv[..., 512:] = result.grad_kv[..., 512:].roll(1, 0)
    return result


@pytest.mark.parametrize("fault", [forward_without_rope_logits, backward_without_rope_logits,
                                   backward_with_rope_grad_kv_elsewhere])
def test_a_fault_that_uniform_softmax_hides_fails_the_run(fault, monkeypatch, capsys):
    name = fault.__name__.split("_")[0]
    right = getattr(PEERS["torch"], name)
    monkeypatch.setattr(PEERS["torch"], name, lambda self, *inputs: fault(
        functools.partial(right, self), *inputs))
    made = make("random", SHAPES["glm5.2-tp8"], rows=4)
    inputs = operations.Inputs(made, made.selection, PEERS["torch"]().forward(made, made.selection))
    result = operations.OPERATIONS[name].run(PEERS["torch"](), inputs)
    assert operations.OPERATIONS[name].check(inputs, result, False).ok  # as it was timed
    code, output = run_main(capsys, "--backend", "cpu", "--op", name, "--workload", "random",
                            "--peer", "torch", *RUN)
    assert code == 1 and output.out.count(" FAIL") == 1


@pytest.mark.parametrize("owner", [FlashDsa, PEERS["torch"]])
def test_sharp_inputs_are_judged_and_those_of_the_workload_timed(owner, monkeypatch, capsys):
    right, calls = owner.backward, []

    def record(self, problem, selection, forward):
        calls.append((problem, forward))
        return right(self, problem, selection, forward)

    monkeypatch.setattr(owner, "backward", record)
    monkeypatch.setattr(run, "peak_bytes", lambda call, device: call() and None)
    code, _ = run_main(capsys, "--backend", "cpu", "--op", "backward", "--workload", "random",
                       "--peer", "torch", *RUN)
    assert code == 0 and len(calls) == 4  # judged, its memory taken, timed twice
    made = make("random", SHAPES["glm5.2-tp8"], rows=4)
    for (problem, forward), want in zip(calls, (made.sharpened(), made, made, made)):
        assert torch.equal(problem.q, want.q) and torch.equal(problem.kv, want.kv)
        assert torch.equal(problem.grad_out, made.grad_out)
        exact = judge.exact_forward(want, want.selection, torch.arange(4))
        torch.testing.assert_close(forward.lse.double(), exact.lse, atol=1e-5, rtol=1e-6)


# ----------------------------------------------------------------------------------------- plots


def test_pictures_of_committed_results(tmp_path, capsys):
    code, output = run_main(capsys, "--from", str(RESULTS), "--plots", str(tmp_path / "plots"))
    assert (code, output.out, output.err) == (0, "", "")
    rows = [row for row in read_json_lines(RESULTS) if row["regime"] == row["l2"] == "warm"]
    check_pictures(tmp_path / "plots", plots.newest(rows))


def test_the_newest_row_of_a_key_counts():
    old, new = ({"op": "forward", "workload": "random", "heads": 8, "peer": peer, "median_ms": ms}
                for peer, ms in (("a@1", 2.0), ("a@2", 1.0)))
    other = {**new, "peer": "b@1"}
    assert plots.newest([old, other, {**new, "plan": "none"}]) == [{**new, "plan": "none"}, other]


@pytest.mark.parametrize("text, sentence", [
    ('{"op": "forward", "median_ms": 1}', "--plots must have rows to draw, got none"),
    ("null", "{} must be a file of JSON objects, one a line, got: another kind of value"),
    ("{", "{} must be a file of JSON objects, one a line, got: Expecting property name "
     "enclosed in double quotes: line 1 column 2 (char 1)"),
])
def test_no_rows_make_no_pictures(text, sentence, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{text}\n")
    code, output = run_main(capsys, "--from", str(path), "--plots", str(tmp_path / "plots"))
    assert (code, output.err) == (2, f"flashdsa-compare: {sentence.replace('{}', str(path))}\n")
    assert not (tmp_path / "plots").exists()


@pytest.mark.parametrize("name, value, kind", [
    ("op", ["forward"], "a text"), ("peer", 1, "a text"), ("device", {}, "a text"),
    ("plan", "old", "none, reused or built"),
    ("heads", 8.0, "a whole number above 0"), ("t_q", 0, "a whole number above 0"),
    ("threads", True, "a whole number above 0"),
    ("median_ms", "fast", "a finite number above 0"),
    ("median_ms", None, "a finite number above 0"),
    ("bytes_per_s", math.inf, "a finite number above 0"),
    ("ratio", -1.5, "a finite number above 0"),
    ("peer_median_ms", None, "a finite number above 0"),
])
def test_a_row_with_another_kind_of_value_is_refused(name, value, kind, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"op": []}) + "\n" + json.dumps({**ROW, name: value}) + "\n")
    code, output = run_main(capsys, "--from", str(path), "--plots", str(tmp_path / "plots"))
    assert (code, output.err) == (
        2, f"flashdsa-compare: {path}, line 2, must have {kind} as {name}, got {value!r}\n")
    assert not (tmp_path / "plots").exists()


def test_a_row_without_bytes_has_no_place_on_the_roofline():
    figure = plots._draw_roofline([{**ROW, "tflops": 0.1}], plots.THEMES["light"])
    assert not figure.axes[0].collections


def test_a_folder_that_is_a_file_takes_no_pictures(tmp_path, capsys):
    (tmp_path / "plots").write_text("")
    code, output = run_main(capsys, "--from", str(RESULTS), "--plots", str(tmp_path / "plots"))
    assert code == 2 and output.err == ("flashdsa-compare: --plots must be a folder that can be "
                                        f"written, got {tmp_path}/plots: File exists\n")
