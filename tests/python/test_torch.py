"""Functions and operators on tensors of PyTorch: values, autograd, compile, kinds of tensors."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashdsa  # noqa: E402
import flashdsa.torch as ft  # noqa: E402
import problems  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_problems import (assert_same, case_of, differentiable, gradients,  # noqa: E402
                            id_of, saved_bytes, saved_tensors, to_numpy, to_torch)


@contextlib.contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# --- the plain functions

def test_plain_functions_give_the_bits_of_numpy():
    arrays = problems.attention()
    want = flashdsa.attention_forward(**arrays)
    got = flashdsa.attention_forward(**case_of())
    assert problems.same_bits(to_numpy(got.out), want.out)
    assert problems.same_bits(to_numpy(got.lse), want.lse)
    extra = {"out": want.out, "lse": want.lse, "grad_out": want.out}
    want = flashdsa.attention_backward(**arrays, **extra)
    got = flashdsa.attention_backward(**case_of(), **{n: to_torch(v) for n, v in extra.items()})
    for a, b in zip(got, want):
        assert problems.same_bits(to_numpy(a), b)


def test_metadata_and_selection():
    rows = flashdsa.prepare_packed_metadata(torch.tensor([0, 3, 9], dtype=torch.int32), 9,
                                            torch.tensor(6))
    assert rows.starts.tolist() == [0] * 3 + [3] * 6 and rows.starts.dtype == torch.int32
    assert rows.query_valid.dtype == torch.bool and rows.max_seqlen_k == 6
    assert rows.valid_row_indices is None and rows.all_rows_nonempty is True
    selection = ft.indexer_topk(*(to_torch(a) for a in problems.indexer(9)), rows, 4)
    assert selection.topk_length.tolist() == [1, 2, 3, 1, 2, 3, 4, 4, 4]
    assert selection.topk_scores is None


def test_parameters_are_tensors():
    case = case_of()
    want = flashdsa.attention_forward(**case).out
    case["q"] = torch.nn.Parameter(case["q"])
    assert torch.equal(flashdsa.attention_forward(**case).out, want)


# --- autograd

def test_gradients_are_those_of_the_plain_function():
    case = case_of()
    grad_out = torch.randn(20, 4, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    forward = flashdsa.attention_forward(**case)
    want = flashdsa.attention_backward(**case, out=forward.out, lse=forward.lse, grad_out=grad_out)
    assert_same(gradients(case, grad_out=grad_out), [forward.out, *want])


@pytest.mark.parametrize("sizes", [{"dim": 512}, {"dim": 576, "heads": 1, "rows": 3, "keys": 3}])
def test_gradients_against_float32_pytorch(sizes):
    case = case_of(**sizes)

    def dense(q, kv, topk_indices, softmax_scale, topk_length, attn_sink):
        rows = []
        for t in range(q.shape[0]):
            keys = topk_indices[t, 0, :topk_length[t]].long()
            keys = kv.float()[keys[keys >= 0], 0]
            logits = softmax_scale * q[t].float() @ keys.T
            logits = torch.cat([logits, attn_sink[:, None]], dim=1)
            rows.append(torch.softmax(logits, dim=1)[:, :-1] @ keys[:, :512])
        return torch.stack(rows)

    got, want = gradients(case), gradients(case, dense)
    for name, bound, a, b in zip(("out", "q", "kv", "sink"), (4e-3, 1e-2, 1e-2, 1e-2), got, want):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error <= bound, f"{name}: {error}"


@pytest.mark.parametrize("dim", [512, 576])
@pytest.mark.parametrize("sink", [False, True])
def test_gradcheck(dim, sink):
    case = case_of(rows=3, keys=4, heads=2, dim=dim, width=3)
    inputs = [case["q"].double(), case["kv"].double()] + [case["attn_sink"].double()] * sink
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def run(q, kv, attn_sink=None):
        return ft.sparse_attention(q, kv, case["topk_indices"], 0.05, case["topk_length"],
                                   attn_sink, backend="reference")

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_only_what_the_backward_needs_is_saved():
    case = differentiable(case_of())
    with saved_tensors() as saved:
        out, lse = ft.sparse_attention(**case, return_lse=True)
    owners = {tensor.data_ptr() for tensor in
              (*(v for v in case.values() if isinstance(v, torch.Tensor)), out, lse)}
    assert {tensor.data_ptr() for tensor in saved} == owners and len(saved) == 7


def selection_bytes(rows, width):
    """topk_indices and topk_length, once for all layers that share the selection."""
    return 4 * rows * width + 4 * rows


def layer_bytes(rows, keys, heads, dim):
    """q, kv and out in BF16, lse in float32: the formula of docs/python.md."""
    return 2 * rows * heads * dim + 2 * keys * dim + 2 * rows * heads * 512 + 4 * rows * heads


def test_layers_with_one_selection_save_it_once():
    rows, keys, heads, dim, width = 20, 24, 4, 576, 8
    layers = [differentiable(case_of(seed=seed)) for seed in range(3)]
    shared = {name: layers[0][name] for name in ("topk_indices", "topk_length")}
    with saved_tensors() as saved:
        outs = [ft.sparse_attention(layer["q"], layer["kv"], softmax_scale=0.05, **shared)
                for layer in layers]
    storages = [id_of(tensor) for tensor in saved]
    for tensor in shared.values():
        assert storages.count(id_of(tensor)) == len(layers)
    del outs
    assert saved_bytes(saved) == (selection_bytes(rows, width)
                                  + len(layers) * layer_bytes(rows, keys, heads, dim))


@pytest.mark.parametrize("heads, layer_mib, four_mib", [(64, 4396, 17840), (8, 581, 2580)])
def test_memory_of_glm_that_the_page_names(heads, layer_mib, four_mib):
    """Fake tensors have GLM-5.2's sizes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = keys = 32768
    dim, width = 576, 2048
    with FakeTensorMode(), saved_tensors() as saved:
        q = torch.empty(rows, heads, dim, dtype=torch.bfloat16, requires_grad=True)
        kv = torch.empty(keys, 1, dim, dtype=torch.bfloat16, requires_grad=True)
        indices = torch.empty(rows, 1, width, dtype=torch.int32)
        length = torch.empty(rows, dtype=torch.int32)
        ft.sparse_attention(q, kv, indices, dim**-0.5, length)
    one, selection = layer_bytes(rows, keys, heads, dim), selection_bytes(rows, width)
    assert saved_bytes(saved) == one + selection
    assert round(one / 2**20) == layer_mib
    assert round((4 * one + selection) / 2**20) == four_mib


def test_expanded_and_strided_grad_out():
    case = case_of()
    want = gradients(case)
    summed = differentiable(case)
    ft.sparse_attention(**summed).sum().backward()  # expands one number over the whole shape
    assert_same([summed[name].grad for name in ("q", "kv", "attn_sink")], want[1:])
    ones = torch.ones(512, 4, 20, dtype=torch.bfloat16).permute(2, 1, 0)
    assert_same(gradients(case, grad_out=ones), want)


def test_partial_gradients():
    case = case_of()
    want = gradients(case)
    for index, name in enumerate(("q", "kv", "attn_sink"), 1):
        alone = {**case, name: case[name].clone().requires_grad_()}
        ft.sparse_attention(**alone).sum().backward()
        assert torch.equal(alone[name].grad, want[index]), name
    assert not ft.sparse_attention(**case).requires_grad
    with torch.no_grad():
        assert not ft.sparse_attention(**differentiable(case)).requires_grad


def test_lse_is_not_differentiable():
    out, lse = ft.sparse_attention(**differentiable(case_of()), return_lse=True)
    assert out.requires_grad and not lse.requires_grad and lse.dtype == torch.float32


def test_second_derivative_is_refused():
    case = differentiable(case_of())
    out = ft.sparse_attention(**case)
    grad, = torch.autograd.grad(out.float().square().sum(), case["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_two_calls_keep_their_own_selections():
    first, second = case_of(), case_of()
    second["topk_indices"] = second["topk_indices"].flip(0)
    want = gradients(first), gradients(second)
    a, b = differentiable(first), differentiable(second)
    outs = ft.sparse_attention(**a), ft.sparse_attention(**b)
    outs[0].sum().backward()
    outs[1].sum().backward()
    for inputs, grads in zip((a, b), want):
        assert_same([inputs[name].grad for name in ("q", "kv", "attn_sink")], grads[1:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def run(**case):
        names = list(case)
        return checkpoint(lambda *values: ft.sparse_attention(**dict(zip(names, values))),
                          *case.values(), use_reentrant=reentrant)

    assert_same(gradients(case_of(), run), gradients(case_of()))


def test_autocast_brings_float32_inputs_to_bfloat16():
    case = case_of()
    want = gradients(case)
    wide = {**case, "q": case["q"].float(), "kv": case["kv"].float(),
            "attn_sink": case["attn_sink"]}
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(wide)
    assert got[0].dtype == torch.bfloat16 and got[1].dtype == torch.float32
    for a, b in zip(got, want):
        assert torch.equal(a.float(), b.float())
    with pytest.raises(TypeError, match="q must be bfloat16"):
        ft.sparse_attention(**wide)


def test_deterministic_algorithms_are_followed(monkeypatch):
    modes = []
    plain = ft._attention.attention_forward
    monkeypatch.setattr(ft._attention, "attention_forward",
                        lambda *args, **options: modes.append(options["deterministic"])
                        or plain(*args, **options))
    case = case_of()
    ft.sparse_attention(**case)
    with deterministic_algorithms():
        ft.sparse_attention(**case)
        ft.sparse_attention(**case, deterministic=False)
    ft.sparse_attention(**case, deterministic=True)
    assert modes == [False, True, False, True]


# --- compile and the operators' registration

@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(backend, dynamic):
    torch._dynamo.reset()

    def layer(q, kv, topk_indices, softmax_scale, topk_length, attn_sink):
        out = ft.sparse_attention(q * 2, kv, topk_indices, softmax_scale, topk_length, attn_sink)
        return out.transpose(0, 1) + 1

    run = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (20, 33):
        case = case_of(rows=rows)
        assert_same(gradients(case, lambda **c: run(**c)), gradients(case, lambda **c: layer(**c)))


def test_compiled_selection():
    torch._dynamo.reset()
    arrays = [to_torch(a) for a in problems.indexer(40)]
    rows = flashdsa.prepare_packed_metadata(torch.tensor([0, 40], dtype=torch.int32), 40)

    def select(index_q, index_k, head_weights):
        indices, length, scores = ft.indexer_topk(index_q, index_k, head_weights, rows, 8,
                                                  return_scores=True)
        return indices + 0, length, scores * 2

    got = torch.compile(select, fullgraph=True, backend="aot_eager")(*arrays)
    assert_same(got, select(*arrays))


def test_operators_are_well_registered():
    case = differentiable(case_of())
    options = ("auto", 1, False, False, None)
    torch.library.opcheck(torch.ops.flashdsa.sparse_attention.default,
                          (*case.values(), None, None, *options))
    plain = case_of()
    forward = flashdsa.attention_forward(**plain)
    torch.library.opcheck(torch.ops.flashdsa.sparse_attention_backward.default,
                          (forward.out, *plain.values(), None, None, forward.out, forward.lse,
                           *options))
    rows = flashdsa.prepare_packed_metadata(torch.tensor([0, 40], dtype=torch.int32), 40)
    for scores in (False, True):
        torch.library.opcheck(torch.ops.flashdsa.indexer_topk.default,
                              (*(to_torch(a) for a in problems.indexer(40)), rows.starts,
                               rows.causal_lengths, 40, 8, scores, "auto", 1, None))
    inputs, metadata = indexer_case()
    # Its fourth test adds up all outputs in place, integers first, which PyTorch refuses.
    torch.library.opcheck(torch.ops.flashdsa.indexer_topk.default,
                          (*inputs, metadata.starts, metadata.causal_lengths, 40, 8, True, "auto",
                           1, None),
                          test_utils=("test_schema", "test_autograd_registration",
                                      "test_faketensor"))
    keys = scored(inputs, metadata)
    torch.library.opcheck(torch.ops.flashdsa.indexer_backward.default,
                          (torch.ones(40, 8), *(x.detach() for x in inputs), keys.topk_indices,
                           "auto", 1, None))


def test_fake_tensors_pass_through_the_operators():
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = case_of()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                 for name, value in case.items()}
        out, lse = ft.sparse_attention(**fakes, return_lse=True)
    assert out.shape == (20, 4, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (20, 4) and lse.dtype == torch.float32


def test_selective_checkpointing_sees_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Recorder():
        gradients(case_of())
    assert "flashdsa.sparse_attention.default" in seen
    assert "flashdsa.sparse_attention_backward.default" in seen


# --- refusals

def fake(tensor):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


class Subclass(torch.Tensor):
    pass


def change(**changes):
    case = case_of()
    return {**case, **{name: make(case[name]) for name, make in changes.items()}}


REFUSALS = {
    "numpy beside torch": (dict(kv=lambda x: np.zeros(3)), TypeError, "kv must be a torch.Tensor"),
    "list": (dict(q=lambda x: [1.0]), TypeError, "q must be a"),
    "number": (dict(topk_length=lambda x: 3), TypeError, "topk_length must be a torch.Tensor"),
    "subclass": (dict(q=lambda x: x.as_subclass(Subclass)), TypeError,
                 "q must be a plain torch.Tensor"),
    "subclass second": (dict(kv=lambda x: x.as_subclass(Subclass)), TypeError,
                        "kv must be a torch.Tensor as q is, got test_torch.Subclass"),
    "float32": (dict(q=lambda x: x.float()), TypeError, "got float32 [20, 4, 576]"),
    "float16": (dict(kv=lambda x: x.half()), TypeError, "kv must be bfloat16"),
    "float8": (dict(q=lambda x: x.to(torch.float8_e4m3fn)), TypeError, "got float8_e4m3fn"),
    "complex": (dict(q=lambda x: x.float() + 0j), TypeError, "got complex64"),
    "quantised": (dict(q=lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8)),
                  TypeError, "q must not be quantised"),
    "int64": (dict(topk_indices=lambda x: x.long()), TypeError, "topk_indices must be int32"),
    "sparse": (dict(q=lambda x: x.to_sparse()), ValueError, "q must be a strided tensor"),
    "last axis": (dict(q=lambda x: x.repeat(1, 1, 2)[:, :, ::2]), ValueError,
                  "q must be contiguous in its last axis"),
    "expanded last axis": (dict(q=lambda x: x[:, :, :1].expand(20, 4, 576)), ValueError,
                           "q must be contiguous in its last axis"),
    "scale": (dict(softmax_scale=lambda x: torch.tensor(x)), TypeError,
              "softmax_scale must be a float or an int, got torch.Tensor"),
    "scale nan": (dict(softmax_scale=lambda x: float("nan")), TypeError, "got nan"),
    "scale negative": (dict(softmax_scale=lambda x: -1.0), ValueError, "got -1"),
}


@pytest.mark.parametrize("function", [flashdsa.attention_forward, ft.sparse_attention])
@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_refusal(name, function):
    changes, kind, words = REFUSALS[name]
    if function is ft.sparse_attention and name in ("sparse", "quantised"):
        kind, words = (kind, NotImplementedError, RuntimeError), ""  # PyTorch's dispatcher
    with pytest.raises(kind) as caught:
        function(**change(**changes))
    assert words in str(caught.value)


def test_negated_view_is_refused():
    case = {name: value.double() if name in ("q", "kv", "attn_sink") else value
            for name, value in case_of().items()}
    case["q"] = torch._neg_view(case["q"])
    with pytest.raises(ValueError, match="q must not be a lazily negated view"):
        flashdsa.attention_forward(**case)


def test_meta_tensor_has_no_memory():
    with pytest.raises(ValueError, match="q must be in host memory or on a CUDA device, got meta"):
        flashdsa.attention_forward(**change(q=lambda x: x.to("meta")))


@pytest.mark.parametrize("name", ["q", "kv", "topk_indices"])
def test_plain_function_refuses_fake_tensors(name):
    with pytest.raises(TypeError, match=f"{name} must be a .*FakeTensor"):
        flashdsa.attention_forward(**change(**{name: fake}))


def test_plain_function_refuses_to_work_in_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = case_of()
    with FakeTensorMode(), pytest.raises(TypeError, match="a result must be a torch.Tensor"):
        flashdsa.attention_forward(**case)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("moved", ["kv", "topk_indices", "topk_length", "attn_sink"])
def test_operator_refuses_two_devices(moved, grad):
    case = change(**{moved: lambda x: x.to("meta")})
    case["q"].requires_grad_(grad)
    with pytest.raises(ValueError, match=f"{moved} must be on cpu as q is, got meta"):
        ft.sparse_attention(**case)


def test_indexer_refuses_two_devices():
    index_q, index_k, head_weights = (to_torch(a) for a in problems.indexer(40))
    rows = flashdsa.prepare_packed_metadata(torch.tensor([0, 40], dtype=torch.int32), 40)
    with pytest.raises(ValueError, match="index_k must be on cpu as index_q is, got meta"):
        ft.indexer_topk(index_q, index_k.to("meta"), head_weights, rows, 8)


def test_operator_takes_meta_tensors():
    case = {name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in case_of().items()}
    out = ft.sparse_attention(**case)
    assert out.is_meta and out.shape == (20, 4, 512) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("name, other", [("q", "kv"), ("kv", "q"), ("topk_length", "q")])
def test_operator_refuses_fake_tensors_among_others(name, other):
    with pytest.raises(TypeError, match=f"{other} must be a fake tensor as others are"):
        ft.sparse_attention(**change(**{name: fake}))


@pytest.mark.parametrize("function", [flashdsa.attention_forward, ft.sparse_attention])
@pytest.mark.parametrize("name", ["q", "kv", "topk_indices"])
def test_storage_that_was_freed_is_refused(name, function):
    """As FSDP frees that of parameters between uses."""
    case = change(**{name: torch.clone})
    case[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name} must point to .* elements, got a null pointer"):
        function(**case)


@pytest.mark.parametrize("name", ["q", "kv", "topk_indices", "topk_length", "attn_sink"])
def test_tensors_may_begin_anywhere(name):
    case = case_of()
    want = gradients(case)
    moved = torch.zeros(case[name].numel() + 1, dtype=case[name].dtype)[1:]
    case[name] = moved.view(case[name].shape).copy_(case[name])
    assert_same(gradients(case), want)


def test_plain_function_refuses_tensors_of_a_transform():
    case = case_of()
    q = case.pop("q")
    with pytest.raises(TypeError, match="q must be a plain torch.Tensor, got one of a transform"):
        torch.vmap(lambda q: flashdsa.attention_forward(q, **case).out)(torch.stack([q, q]))


def test_forward_mode_is_refused():
    from torch.autograd import forward_ad

    case = case_of()
    with forward_ad.dual_level():
        case["q"] = forward_ad.make_dual(case["q"], case["q"])
        with pytest.raises(NotImplementedError, match="jvp"):
            ft.sparse_attention(**case)


def backward_case():
    """Arguments of the plain attention_backward."""
    case = case_of()
    forward = flashdsa.attention_forward(**case)
    return {**case, "out": forward.out, "lse": forward.lse,
            "grad_out": torch.ones_like(forward.out)}


BACKWARD_REFUSALS = {
    "grad_out dtype": (dict(grad_out=lambda x: x.float()), TypeError, "grad_out must be bfloat16"),
    "grad_out shape": (dict(grad_out=lambda x: x[:-1]), ValueError, "grad_out must be bfloat16 "),
    "grad_out expanded": (dict(grad_out=lambda x: x[0, 0, 0].expand(20, 4, 512)), ValueError,
                          "grad_out must be contiguous in its last axis"),
    "grad_out device": (dict(grad_out=lambda x: x.to("meta")), ValueError, "grad_out must be in"),
    "grad_out none": (dict(grad_out=lambda x: None), TypeError, "grad_out must be a tensor"),
    "grad_out array": (dict(grad_out=to_numpy), TypeError, "grad_out must be a torch.Tensor"),
    "out shape": (dict(out=lambda x: x[:, :, :511]), ValueError, "out must be bfloat16"),
    "lse dtype": (dict(lse=lambda x: x.bfloat16()), TypeError, "lse must be float32"),
    "lse shape": (dict(lse=lambda x: x[:, :-1]), ValueError, "lse must be float32"),
    "float32 flag": (dict(grad_kv_float32=lambda x: 1), TypeError,
                     "grad_kv_float32 must be a bool, got int"),
}


@pytest.mark.parametrize("name", BACKWARD_REFUSALS)
def test_backward_refusal(name):
    changes, kind, words = BACKWARD_REFUSALS[name]
    case = backward_case()
    case.update({key: make(case.get(key)) for key, make in changes.items()})
    with pytest.raises(kind) as caught:
        flashdsa.attention_backward(**case)
    assert type(caught.value) is kind and f"attention_backward: {words}" in str(caught.value)


def test_gradient_expanded_over_rows_is_read_in_place():
    case = backward_case()
    case["grad_out"] = torch.randn(1, 1, 512).bfloat16().expand(20, 4, 512)
    got = flashdsa.attention_backward(**case)
    case["grad_out"] = case["grad_out"].contiguous()
    assert_same(got, flashdsa.attention_backward(**case))


def test_options_of_the_operator():
    case = case_of()
    with pytest.raises(ValueError, match="backend must be one of"):
        ft.sparse_attention(**case, backend="tpu")
    with pytest.raises(RuntimeError, match="no backend takes this call with backend sm80"):
        ft.sparse_attention(**case, backend="sm80")
    with pytest.raises(ValueError, match="topk_indices"):
        case["topk_indices"][0, 0, 0] = 10**6
        case["topk_length"][0] = 1
        ft.sparse_attention(**case, check=True)


# --- the scores of the indexer

INDEXER = ("index_q", "index_k", "head_weights")


def indexer_case(rows=40, dtype=None):
    """index_q, index_k and head_weights as leaves, and the metadata of one document."""
    arrays = [to_torch(a) for a in problems.indexer(rows)]
    if dtype is not None:
        arrays = [a.to(dtype) for a in arrays]
    metadata = flashdsa.prepare_packed_metadata(torch.tensor([0, rows], dtype=torch.int32), rows)
    return [a.requires_grad_() for a in arrays], metadata


def scored(inputs, metadata, width=8, **options):
    return ft.indexer_topk(*inputs, metadata, width, return_scores=True, **options)


def test_gradients_of_scores_are_those_of_the_plain_function():
    inputs, metadata = indexer_case()
    keys = scored(inputs, metadata)
    assert not keys.topk_indices.requires_grad and not keys.topk_length.requires_grad
    grad_scores = torch.randn(keys.topk_scores.shape,
                              generator=torch.Generator().manual_seed(4))
    keys.topk_scores.backward(grad_scores)
    want = flashdsa.indexer_backward(*(x.detach() for x in inputs), keys.topk_indices, grad_scores)
    assert_same([x.grad for x in inputs], want)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_gradients_of_scores_against_float32_pytorch(weights):
    (index_q, index_k, head_weights), metadata = indexer_case()
    inputs = [index_q, index_k, head_weights.detach().to(weights).requires_grad_()]
    keys = scored(inputs, metadata)
    indices = keys.topk_indices[:, 0].long()
    grad_scores = torch.randn(indices.shape, generator=torch.Generator().manual_seed(5))
    got = torch.autograd.grad(keys.topk_scores, inputs, grad_scores)

    q, k, w = (x.detach().float().requires_grad_() for x in inputs)
    dots = torch.relu(torch.einsum("thc,tjc->thj", q, k[indices.clamp(min=0)]))
    scores = torch.einsum("th,thj->tj", w, dots)
    want = torch.autograd.grad(scores, [q, k, w], grad_scores * (indices >= 0))
    for name, tensor, a, b in zip(INDEXER, inputs, got, want):
        assert a.dtype == tensor.dtype
        error = (a.float() - b).norm() / b.norm()
        assert error <= 1e-2, f"{name}: {error}"


def test_gradcheck_of_scores():
    inputs, metadata = indexer_case(5, torch.float64)

    def run(*inputs):
        return scored(inputs, metadata, 3, backend="reference").topk_scores.clamp(min=-1e9)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_expanded_gradient_of_scores():
    inputs, metadata = indexer_case()
    got = torch.autograd.grad(scored(inputs, metadata).topk_scores.sum(), inputs)
    scores = scored(inputs, metadata).topk_scores
    assert_same(got, torch.autograd.grad(scores, inputs, torch.ones_like(scores)))


def test_selection_alone_has_no_gradient():
    inputs, metadata = indexer_case()
    assert not ft.indexer_topk(*inputs, metadata, 8).topk_indices.requires_grad
    with torch.no_grad():
        assert not scored(inputs, metadata).topk_scores.requires_grad


def test_second_derivative_of_scores_is_refused():
    inputs, metadata = indexer_case()
    scores = scored(inputs, metadata).topk_scores[8:]
    grad, = torch.autograd.grad(scores.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_only_what_the_gradient_of_scores_needs_is_saved():
    inputs, metadata = indexer_case()
    with saved_tensors() as saved:
        keys = scored(inputs, metadata)
    assert {id_of(x) for x in saved} == {id_of(x) for x in (*inputs, keys.topk_indices)}


def test_compiled_scores_have_the_same_gradients():
    torch._dynamo.reset()
    inputs, metadata = indexer_case()

    def loss(*inputs):
        return (scored(inputs, metadata).topk_scores.clamp(min=-1e9) * 0.5).sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs),
                              inputs)
    assert_same(got, torch.autograd.grad(loss(*inputs), inputs))


def test_functional_transforms_are_refused():
    case = case_of()
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q: ft.sparse_attention(**{**case, "q": q}).float().sum())(case["q"])
