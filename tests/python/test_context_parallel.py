"""Context parallelism: the ranks of a group together compute what one rank does alone."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import check  # noqa: E402
import context_parallel_program as program  # noqa: E402
import flashdsa  # noqa: E402
import flashdsa.torch as ft  # noqa: E402
import problems  # noqa: E402
import safetensors_io as st  # noqa: E402
import torch.distributed as dist  # noqa: E402
from flashdsa.torch import context_parallel  # noqa: E402
from flashdsa.torch.context_parallel import ContextParallel  # noqa: E402
from package_program import DTYPE_NAMES  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_problems import assert_both_get_the_plan  # noqa: E402

TOKENS, HEADS, WIDTH = 96, 4, 12


def to_torch(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def make_problem():
    """Three documents, padding behind each and a masked row; the storage ends with padding."""
    rng = np.random.default_rng(7)
    mask = np.zeros(TOKENS, bool)
    mask[50] = True
    case = {
        "index_q": problems.bf16(rng, TOKENS, HEADS, 128),
        "index_k": problems.bf16(rng, TOKENS, 128),
        "head_weights": rng.standard_normal((TOKENS, HEADS)).astype(np.float32),
        "q": problems.bf16(rng, TOKENS, HEADS, 576),
        "kv": problems.bf16(rng, TOKENS, 1, 576),
        "attn_sink": rng.standard_normal(HEADS).astype(np.float32),
        "grad_out": problems.bf16(rng, TOKENS, HEADS, 512),
        "grad_scores": rng.standard_normal((TOKENS, WIDTH)).astype(np.float32),
        "cu_seqlens": np.array([0, 30, 37, 80], np.int32),
        "cu_seqlens_padded": np.array([0, 32, 40, TOKENS], np.int32),
        "padding_mask": mask,
    }
    return {**{name: to_torch(array) for name, array in case.items()}, "index_topk": WIDTH,
            "softmax_scale": 0.04}


@pytest.fixture(scope="module")
def problem():
    return make_problem()


def alone(problem):
    """All rows at once, by the plain functions; grad_kv in float32."""
    rows = flashdsa.prepare_packed_metadata(problem["cu_seqlens"], TOKENS,
                                            cu_seqlens_padded=problem["cu_seqlens_padded"],
                                            padding_mask=problem["padding_mask"])
    keys = flashdsa.indexer_topk(problem["index_q"], problem["index_k"], problem["head_weights"],
                                 rows, WIDTH)
    arguments = (problem["q"], problem["kv"], keys.topk_indices, problem["softmax_scale"])
    sink, length = problem["attn_sink"], keys.topk_length
    forward = flashdsa.attention_forward(*arguments, length, sink, invariant=True)
    grads = flashdsa.attention_backward(*arguments, forward.out, forward.lse, problem["grad_out"],
                                        length, sink, grad_kv_float32=True, invariant=True)
    return {"starts": rows.starts, "causal_lengths": rows.causal_lengths,
            "query_valid": rows.query_valid, "topk_indices": keys.topk_indices,
            "topk_length": length, "out": forward.out, "lse": forward.lse, **grads._asdict()}


@pytest.fixture(scope="module")
def one_rank(problem):
    return alone(problem)


def results_of_ranks(backend, ranks, problem, folder):
    """What every rank found, ranks being processes."""
    torch.save(problem, folder / "problem.pt")
    done = subprocess.run([sys.executable, program.__file__, backend, str(ranks), str(folder)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank-{rank}.pt", map_location="cpu") for rank in range(ranks)]


@pytest.fixture(scope="module", params=[2, 4])
def found(request, problem, tmp_path_factory):
    return results_of_ranks("gloo", request.param, problem, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(params=context_parallel.ORDERS)
def order(request):
    return request.param


def storage_order(found, order, part, name):
    """The rows of all ranks by their own query_indices, which must be all positions once."""
    positions = torch.cat([rank[order]["query_indices"] for rank in found])
    assert sorted(positions.tolist()) == list(range(TOKENS))
    rows = torch.cat([rank[order][part][name] for rank in found])
    return torch.empty_like(rows).index_copy_(0, positions, rows)


def test_zigzag_gives_a_rank_an_early_and_a_late_chunk(found):
    size = TOKENS // (2 * len(found))
    for number, rank in enumerate(found):
        late = 2 * len(found) - 1 - number
        assert rank["zigzag"]["query_indices"].tolist() == [
            *range(number * size, (number + 1) * size), *range(late * size, (late + 1) * size)]


SELECTED = ("starts", "causal_lengths", "query_valid", "topk_indices", "topk_length")


def assert_bits(found, order, part, names, one_rank):
    for name in names:
        got = storage_order(found, order, part, name)
        assert got.dtype == one_rank[name].dtype and torch.equal(got, one_rank[name]), name


@pytest.mark.parametrize("part", ["in one call", "in steps"])
def test_selections_are_those_of_one_rank(found, one_rank, order, part):
    assert_bits(found, order, part, SELECTED, one_rank)


def test_rows_have_the_bits_of_one_rank(found, one_rank, order):
    """In invariant mode, which promises it."""
    assert_bits(found, order, "in steps", ("out", "lse", "grad_q"), one_rank)


def assert_rounded_once(got, want):
    """`want` is float32. One rounding to BF16 is 2^-8 of the result; partial sums in another order
    differ by few roundings of float32, of terms that may cancel. Partial sums rounded to BF16
    before they are added miss this by far."""
    assert got.dtype == torch.bfloat16
    bound = 2.0**-8 * want.abs() + 2.0**-18 * want.abs().max()
    excess = ((got.float() - want).abs() - bound).max()
    assert excess <= 0


def test_gradients_of_keys_are_summed_in_float32(found, one_rank, order):
    assert_rounded_once(storage_order(found, order, "in steps", "grad_kv"), one_rank["grad_kv"])


def test_scores_have_gradients(found, problem, order):
    index = [problem[name] for name in ("index_q", "index_k", "head_weights")]
    rows = flashdsa.prepare_packed_metadata(problem["cu_seqlens"], TOKENS,
                                            cu_seqlens_padded=problem["cu_seqlens_padded"],
                                            padding_mask=problem["padding_mask"])
    keys = flashdsa.indexer_topk(*index, rows, WIDTH, return_scores=True)
    grads = flashdsa.indexer_backward(*index, keys.topk_indices, problem["grad_scores"],
                                      grad_index_k_float32=True)
    want = {"topk_scores": keys.topk_scores, **grads._asdict()}
    assert_bits(found, order, "scored", ("topk_scores", "grad_index_q", "grad_head_weights"), want)
    assert_rounded_once(storage_order(found, order, "scored", "grad_index_k"),
                        want["grad_index_k"])


def test_a_gather_may_be_used_twice(found, problem, one_rank, order):
    """Each use has a reduction of its own."""
    arguments = (problem["q"], problem["kv"], one_rank["topk_indices"], problem["softmax_scale"])
    length = one_rank["topk_length"]
    forward = flashdsa.attention_forward(*arguments, length)
    once = flashdsa.attention_backward(*arguments, forward.out, forward.lse, problem["grad_out"],
                                       length, grad_kv_float32=True).grad_kv
    positions = torch.cat([rank[order]["query_indices"] for rank in found])
    got = torch.cat([rank[order]["twice"] for rank in found])
    got = torch.empty_like(got).index_copy_(0, positions, got)
    assert_rounded_once(got / 2, once)  # halving is exact


def to_file(tensors):
    file = st.File(metadata={name: str(value) for name, value in tensors.items()
                             if not isinstance(value, torch.Tensor)})
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            dtype = DTYPE_NAMES[str(value.dtype).rpartition(".")[2]]
            array = value.view(torch.int16).numpy().view(np.uint16) if dtype == "BF16" else value
            file.put(name, dtype, array)
    return file


def assert_within_the_specification(found, problem, order, part, backend):
    """Judged by the NumPy oracle."""
    results = {name: storage_order(found, order, part, name)
               for name in found[0][order][part] if name != "grad_attn_sink"}
    results["grad_attn_sink"] = sum(rank[order][part]["grad_attn_sink"] for rank in found)
    results.setdefault("lse", storage_order(found, order, "in steps", "lse"))
    report = check.check_file(check.Problem(to_file(problem)), to_file(results), "run", backend)
    assert report.ok, str(report)


@pytest.mark.parametrize("part", ["in one call", "in steps", "with a plan"])
def test_results_are_within_the_specification(found, problem, order, part):
    assert_within_the_specification(found, problem, order, part, "cpu")


def test_gather_undoes_shard(found, problem, order):
    for rank in found:
        for name, value in rank[order]["gathered"].items():
            assert value.dtype == problem[name].dtype and torch.equal(value, problem[name]), name


def test_gradients_of_a_gather_are_summed_in_float32(found, order):
    """(1 + 2^-8) - 1: the first term is no BF16 number, the sum is one."""
    for rank in found:
        assert torch.all(rank[order]["sum in float32"] == 2.0**-8)
        assert torch.all(rank[order]["sum in bfloat16"] == 0)
        assert rank[order]["sum in float32"].dtype == torch.bfloat16


def test_group_of_one_rank_among_others(found, one_rank):
    for name in ("topk_indices", "out", "lse", "grad_q"):
        got = found[0]["alone"][name]
        assert torch.equal(got, one_rank[name]), name
    assert torch.equal(found[0]["alone"]["grad_kv"], one_rank["grad_kv"].bfloat16())


def test_documented_example(found):
    rows = 320 // len(found)
    for rank in found:
        assert rank["example"] == f"torch.Size([{rows}, 8, 512]) torch.Size([{rows}, 1, 576])\n"


def test_construction_refusals_on_several_ranks(found):
    ranks = len(found)
    for number, rank in enumerate(found):
        assert rank["refusals"]["no group"] == (
            "RuntimeError: ContextParallel: expected torch.distributed.init_process_group to have "
            "been called, got no process group")
        assert rank["refusals"]["contiguous"] == (
            f"ValueError: ContextParallel: total_tokens must be a multiple of {ranks} for "
            f"contiguous shards of {ranks} ranks, got {ranks + 1}")
        assert rank["refusals"]["zigzag"] == (
            f"ValueError: ContextParallel: total_tokens must be a multiple of {2 * ranks} for "
            f"zigzag shards of {ranks} ranks, got {ranks}")
        assert rank["refusals"]["group"] == (
            "nothing was raised" if number == 0 else
            f"ValueError: ContextParallel: group must have this rank, {number}, among its members, "
            "got one without it")


# --- one rank

@pytest.fixture(scope="module")
def group(tmp_path_factory):
    program.join("gloo", 0, 1, tmp_path_factory.mktemp("group"))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def cp(group, order):
    return ContextParallel(TOKENS, order=order)


def attend(cp, problem, one_rank, **changes):
    """out of one rank's shard with the selection of `one_rank`."""
    case = {"q": problem["q"], "kv": problem["kv"], "topk_indices": one_rank["topk_indices"],
            "softmax_scale": problem["softmax_scale"], "topk_length": one_rank["topk_length"],
            "attn_sink": problem["attn_sink"], **changes}
    return cp.sparse_attention(**case)


def leaf(tensor):
    return tensor.clone().requires_grad_()


def plain_gradients(problem, one_rank):
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    out = ft.sparse_attention(q, kv, one_rank["topk_indices"], problem["softmax_scale"],
                              one_rank["topk_length"], problem["attn_sink"])
    out.sum().backward()
    return out.detach(), q.grad, kv.grad


def assert_plain(got, problem, one_rank):
    for a, b in zip(got, plain_gradients(problem, one_rank)):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_one_rank_gives_the_bits_of_the_operator(cp, problem, one_rank):
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    out = attend(cp, problem, one_rank, q=q, kv=kv)
    out.sum().backward()  # an expanded gradient
    assert_plain((out.detach(), q.grad, kv.grad), problem, one_rank)


def test_forward_and_backward_get_the_plan(cp, problem, one_rank, monkeypatch):
    plan = ft.build_selection_plan(one_rank["topk_indices"], TOKENS, HEADS,
                                   one_rank["topk_length"])
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    assert_both_get_the_plan(
        monkeypatch, context_parallel, plan,
        lambda: attend(cp, problem, one_rank, q=q, kv=kv, plan=plan).sum().backward())


def test_latent_may_be_a_part_of_wider_rows(cp, problem, one_rank):
    """As split() leaves it."""
    wide = torch.cat((problem["kv"], problem["kv"]), -1).requires_grad_()
    q = leaf(problem["q"])
    out = attend(cp, problem, one_rank, q=q, kv=wide[..., :576])
    out.sum().backward()
    assert torch.all(wide.grad[..., 576:] == 0)
    assert_plain((out.detach(), q.grad, wide.grad[..., :576]), problem, one_rank)


def test_forward_without_gradients(cp, problem, one_rank):
    out = attend(cp, problem, one_rank, kv=leaf(problem["kv"]).detach())
    assert not out.requires_grad
    with torch.no_grad():
        assert torch.equal(attend(cp, problem, one_rank, kv=leaf(problem["kv"])), out)


def test_gradient_of_one_input_alone(cp, problem, one_rank):
    _, grad_q, grad_kv = plain_gradients(problem, one_rank)
    for name, want in (("q", grad_q), ("kv", grad_kv)):
        x = leaf(problem[name])
        attend(cp, problem, one_rank, **{name: x}).sum().backward()
        assert torch.equal(x.grad, want), name


def test_backward_of_a_kept_graph(cp, problem, one_rank):
    """A pass that asks for grad_q alone leaves nothing behind for the next."""
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    out = attend(cp, problem, one_rank, q=q, kv=kv).sum()
    torch.autograd.grad(out, q, retain_graph=True)
    first, = torch.autograd.grad(out, kv, retain_graph=True)
    second, = torch.autograd.grad(out, kv)
    want = plain_gradients(problem, one_rank)[2]
    assert torch.equal(first, want) and torch.equal(second, want)


def test_second_derivative_is_refused(cp, problem, one_rank):
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    out = attend(cp, problem, one_rank, q=q, kv=kv)
    grad, = torch.autograd.grad(out.float().square().sum(), kv, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradcheck(group, order, problem):
    cp = ContextParallel(8, order=order)
    q, kv = leaf(problem["q"][:8, :1].double()), leaf(problem["kv"][:8].double())
    indices = torch.randint(-1, 8, (8, 1, 4), dtype=torch.int32,
                            generator=torch.Generator().manual_seed(0))

    def run(q, kv):
        return cp.sparse_attention(q, kv, indices, 0.04, backend="reference")

    assert torch.autograd.gradcheck(run, (q, kv), fast_mode=True)
    x = torch.rand(8, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cp.gather(x)**2, (x,), fast_mode=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(cp, problem, one_rank, reentrant):
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    out = checkpoint(lambda q, kv: attend(cp, problem, one_rank, q=q, kv=kv), q, kv,
                     use_reentrant=reentrant)
    out.sum().backward()
    assert_plain((out.detach(), q.grad, kv.grad), problem, one_rank)


def test_compiled_around_it(cp, problem, one_rank):
    torch._dynamo.reset()

    def layer(q, kv):
        return attend(cp, problem, one_rank, q=q, kv=kv) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(layer, backend="eager", fullgraph=True)(problem["q"], problem["kv"])
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    out = torch.compile(layer, backend="eager")(q, kv)
    out.sum().backward()
    want, grad_q, grad_kv = plain_gradients(problem, one_rank)
    assert torch.equal(out, want + 1)
    assert torch.equal(q.grad, grad_q) and torch.equal(kv.grad, grad_kv)


def test_anomaly_detection_sees_finished_gradients(cp, problem, one_rank, monkeypatch):
    """A gradient still on its way holds anything, a NaN for instance."""
    start = context_parallel._reduce_scatter

    def late(output, *args, **options):
        output.fill_(float("nan"))
        return start(output, *args, **options)

    monkeypatch.setattr(context_parallel, "_reduce_scatter", late)
    q, kv = leaf(problem["q"]), leaf(problem["kv"])
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        out = attend(cp, problem, one_rank, q=q, kv=kv)
        out.sum().backward()
    assert_plain((out.detach(), q.grad, kv.grad), problem, one_rank)


def test_autocast_brings_float32_inputs_to_bfloat16(cp, problem, one_rank):
    q, kv = leaf(problem["q"].float()), leaf(problem["kv"].float())
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(cp, problem, one_rank, q=q, kv=kv)
    out.sum().backward()
    assert q.grad.dtype == kv.grad.dtype == torch.float32
    assert_plain((out.detach(), q.grad.bfloat16(), kv.grad.bfloat16()), problem, one_rank)


def test_deterministic_algorithms_are_followed(cp, problem, one_rank, monkeypatch):
    modes = []
    plain = context_parallel.attention_forward
    monkeypatch.setattr(context_parallel, "attention_forward",
                        lambda *args, **options: modes.append(options["deterministic"])
                        or plain(*args, **options))
    attend(cp, problem, one_rank)
    torch.use_deterministic_algorithms(True)
    try:
        attend(cp, problem, one_rank)
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes == [False, True]


def test_one_call_starts_both_gathers_before_it_selects(cp, problem, one_rank, monkeypatch):
    events = []
    gather, select = context_parallel._all_gather, context_parallel.indexer_topk

    def noted_gather(output, x, **options):
        assert options["async_op"]
        events.append(f"gather {x.shape[-1]}")
        return gather(output, x, **options)

    monkeypatch.setattr(context_parallel, "_all_gather", noted_gather)
    monkeypatch.setattr(context_parallel, "indexer_topk", lambda *args, **options:
                        events.append("select") or select(*args, **options))
    rows = program.metadata_of(cp, problem)
    out, selection = cp.indexer_sparse_attention(
        problem["index_q"], problem["index_k"], problem["head_weights"], problem["q"],
        problem["kv"], rows, WIDTH, problem["softmax_scale"], problem["attn_sink"], invariant=True)
    assert events == ["gather 128", "gather 576", "select"]
    assert torch.equal(selection.topk_indices, one_rank["topk_indices"])
    assert torch.equal(out, one_rank["out"])


def test_what_lies_between_gather_and_attention_runs_beside_the_reduction(cp, problem, one_rank,
                                                                          monkeypatch):
    events = []
    start, wait = context_parallel._Reduction.start, context_parallel._Reduction.wait
    monkeypatch.setattr(context_parallel._Reduction, "start",
                        lambda *args: events.append("start") or start(*args))
    monkeypatch.setattr(context_parallel._Reduction, "wait",
                        lambda *args: events.append("wait") or wait(*args))
    x, kv = leaf(problem["q"]), leaf(problem["kv"])
    keys = cp.start_gather(kv)
    q = x * 1
    q.register_hook(lambda _: events.append("gradient of q"))
    attend(cp, problem, one_rank, q=q, kv=keys).sum().backward()
    assert events == ["start", "gradient of q", "wait"]
    assert torch.equal(kv.grad, plain_gradients(problem, one_rank)[2])


# --- refusals

CONSTRUCTIONS = {
    "order": (dict(order="striped"), ValueError, "order must be contiguous or zigzag, "
                                                 "got 'striped'"),
    "order type": (dict(order=None), ValueError, "order must be contiguous or zigzag, got None"),
    "total type": (dict(total_tokens=8.0), TypeError, "total_tokens must be an int, got float"),
    "total": (dict(total_tokens=0), ValueError, "total_tokens must be in 1..2147483646, got 0"),
    "odd": (dict(total_tokens=7, order="zigzag"), ValueError,
            "total_tokens must be a multiple of 2 for zigzag shards of 1 ranks, got 7"),
    "group": (dict(group="cp"), TypeError, "group must be a torch.distributed.ProcessGroup, "
                                           "got str"),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_construction_refusal(group, name):
    changes, kind, words = CONSTRUCTIONS[name]
    with pytest.raises(kind) as caught:
        ContextParallel(**{"total_tokens": 8, **changes})
    assert str(caught.value) == f"ContextParallel: {words}"


GATHERS = {
    "rows": (lambda x: x[:-1], ValueError, "must have T/R = 96 rows, got shape [95, 1, 576]"),
    "scalar": (lambda x: x[0, 0, 0], ValueError, "must have T/R = 96 rows, got shape []"),
    "array": (lambda x: x.float().numpy(), TypeError, "must be a torch.Tensor, got numpy.ndarray"),
    "none": (lambda x: None, TypeError, "must be a torch.Tensor, got NoneType"),
    "subclass": (lambda x: x.as_subclass(Subclass), TypeError,
                 "must be a plain torch.Tensor, got test_context_parallel.Subclass"),
    "device": (lambda x: x.to("meta"), ValueError,
               "must be on a device that the group's backend, gloo, serves, got meta"),
}


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("name", GATHERS)
def test_gather_refusal(cp, problem, one_rank, name):
    change, kind, words = GATHERS[name]
    kv = change(problem["kv"])
    calls = {"start_gather: x": lambda: cp.start_gather(kv), "gather: x": lambda: cp.gather(kv),
             "attention_forward: kv": lambda: attend(cp, problem, one_rank, kv=kv)}
    for subject, call in calls.items():
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value) == f"{subject} {words}"


def test_shard_refusal(cp):
    with pytest.raises(TypeError, match="shard: x must be a torch.Tensor, got list"):
        cp.shard([1, 2])
    with pytest.raises(ValueError, match=r"shard: x must have T = 96 rows, got shape \[5, 2\]"):
        cp.shard(torch.ones(5, 2))


def test_gather_of_another_cut_is_refused(cp, problem, one_rank):
    other = ContextParallel(TOKENS).start_gather(problem["kv"])
    with pytest.raises(ValueError, match="kv must be gathered by the same ContextParallel, got "):
        attend(cp, problem, one_rank, kv=other)


def test_arguments_of_the_library_are_refused_by_it(cp, problem, one_rank):
    plan = ft.build_selection_plan(one_rank["topk_indices"], TOKENS - 1, HEADS)
    refusals = (({"q": problem["q"].float()}, TypeError, "q must be bfloat16"),
                ({"q": problem["q"][:-1]}, ValueError, "topk_indices must be int32"),
                ({"q": problem["q"].to("meta")}, ValueError, "q must be in host memory"),
                ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
                ({"kv": problem["kv"].float()}, TypeError, "kv must be bfloat16"),
                ({"kv": problem["kv"][:, 0]}, ValueError, "kv must be bfloat16"),
                ({"topk_indices": one_rank["topk_indices"].long()}, TypeError, "topk_indices must"),
                ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a float"),
                ({"plan": plan}, ValueError, "plan must be built for T_q = 96, .*T_k = 95"),
                ({"plan": plan._replace(storage=plan.storage.numpy())}, TypeError,
                 "plan.storage must be a torch.Tensor, got numpy.ndarray"),
                ({"plan": plan.storage}, TypeError, "plan must be a SelectionPlan, got torch"),
                ({"backend": "tpu"}, ValueError, "backend must be one of"))
    for changes, kind, words in refusals:
        with pytest.raises(kind, match=f"attention_forward: {words}"):
            attend(cp, problem, one_rank, **changes)


def test_metadata_of_another_shard_is_refused(cp, problem):
    rows = flashdsa.prepare_packed_metadata(torch.tensor([0, 48], dtype=torch.int32), 48)
    with pytest.raises(ValueError, match="indexer_topk: "):
        cp.indexer_topk(problem["index_q"], problem["index_k"], problem["head_weights"], rows, 8)
    with pytest.raises(TypeError, match="cu_seqlens must be a torch.Tensor, got list"):
        cp.prepare_packed_metadata([0, TOKENS])
    with pytest.raises(ValueError, match="prepare_packed_metadata: cu_seqlens"):
        cp.prepare_packed_metadata(torch.tensor([0, 48], dtype=torch.int32))


# --- a GPU

@pytest.mark.cuda
@pytest.mark.parametrize("ranks", [1, 2])
def test_nccl(problem, order, tmp_path, ranks):
    """Compared with one call on the GPU, by the same laws as on the host."""
    if ranks > torch.cuda.device_count():
        pytest.skip(f"needs {ranks} CUDA devices")
    on_gpu = {name: value.cuda() if isinstance(value, torch.Tensor) else value
              for name, value in problem.items()}
    want = {name: value.cpu() for name, value in alone(on_gpu).items()}
    found = results_of_ranks("nccl", ranks, problem, tmp_path)
    assert_bits(found, order, "in one call", SELECTED, want)
    assert_bits(found, order, "in steps", (*SELECTED, "out", "lse", "grad_q"), want)
    assert_rounded_once(storage_order(found, order, "in steps", "grad_kv"), want["grad_kv"])
    assert_within_the_specification(found, problem, order, "with a plan", "auto")
