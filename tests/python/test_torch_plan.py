"""Selection plans on tensors of PyTorch: the operators, autograd, checkpointing, compile."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashdsa  # noqa: E402
import flashdsa.torch as ft  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_problems import (assert_both_get_the_plan, assert_same, case_of,  # noqa: E402
                            differentiable, gradients, id_of, saved_bytes, saved_tensors)

BUILDERS = [flashdsa.build_selection_plan, ft.build_selection_plan]
ATTENTIONS = [flashdsa.attention_forward, ft.sparse_attention]


def plan_of(case, build=ft.build_selection_plan):
    """The plan of the arguments of sparse_attention."""
    return build(case["topk_indices"], case["kv"].shape[0], case["q"].shape[1],
                 case["topk_length"])


def with_plan(plan):
    def run(**case):
        return ft.sparse_attention(**case, plan=plan)
    return run


# --- what is built

@pytest.mark.parametrize("build", BUILDERS)
def test_plan_is_that_of_numpy(build):
    indices = torch.tensor([0, 1, 2, 3], dtype=torch.int32).repeat(10, 1, 1)
    length = torch.tensor([2] * 8 + [3] * 2, dtype=torch.int32)
    plan = build(indices, 7, 8, length)
    want = flashdsa.build_selection_plan(indices.numpy(), 7, 8, length.numpy())
    assert isinstance(plan, flashdsa.SelectionPlan) and type(plan.storage) is torch.Tensor
    assert plan.storage.dtype == torch.uint8 and plan[1:] == want[1:] and plan.nbytes == want.nbytes
    used = 64 + 32 * 2  # the count and the two items
    assert plan.storage[0] == 2
    assert np.array_equal(plan.storage[64:used].numpy(), want.storage[64:used])


@pytest.mark.parametrize("rows", [0, 1, 20, 33])
@pytest.mark.parametrize("width", [1, 32, 33])
def test_fake_and_meta_plans_have_the_sizes_of_real_ones(rows, width):
    indices = torch.zeros(rows, 1, width, dtype=torch.int32)
    kinds = FakeTensorMode().from_tensor(indices), indices.to("meta")
    for heads in (*range(1, 41), 128):
        real = ft.build_selection_plan(indices, 50, heads)
        assert real[1:] == flashdsa.build_selection_plan(indices, 50, heads)[1:]
        for kind in kinds:
            plan = ft.build_selection_plan(kind, 50, heads)
            assert plan.storage.shape == real.storage.shape and plan[1:] == real[1:]
            assert plan.storage.dtype == torch.uint8 and plan.storage.device == kind.device


@pytest.mark.parametrize("heads, mib, digits", [(8, 321, 0), (64, 1.3, 1)])
def test_memory_of_glm_that_the_page_names(heads, mib, digits):
    plan = ft.build_selection_plan(torch.empty(32768, 1, 2048, dtype=torch.int32, device="meta"),
                                   32768, heads)
    assert round(plan.nbytes / 2**20, digits) == mib


def test_fake_tensors_pass_through_with_a_plan():
    case = case_of()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                 for name, value in case.items()}
        out, *grads = gradients(fakes, with_plan(plan_of(fakes)))
    assert out.shape == (20, 4, 512) and [grad.shape for grad in grads] == [
        case[name].shape for name in ("q", "kv", "attn_sink")]


def test_operators_are_well_registered():
    case = case_of()
    plan = plan_of(case)
    # Its other tests compare all bits of two plans, and what is unspecified differs.
    torch.library.opcheck(torch.ops.flashdsa.build_selection_plan.default,
                          (case["topk_indices"], case["topk_length"], 24, 4, "auto", None),
                          test_utils=("test_schema", "test_autograd_registration",
                                      "test_faketensor"))
    rest = (plan.storage, plan[1:])
    options = ("auto", 1, False, False, None)
    torch.library.opcheck(torch.ops.flashdsa.sparse_attention.default,
                          (*differentiable(case).values(), *rest, *options))
    forward = flashdsa.attention_forward(**case)
    torch.library.opcheck(torch.ops.flashdsa.sparse_attention_backward.default,
                          (forward.out, *case.values(), *rest, forward.out, forward.lse, *options))


# --- autograd

def test_gradients_are_those_without_a_plan():
    case = case_of()
    grad_out = torch.randn(20, 4, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert_same(gradients(case, with_plan(plan_of(case)), grad_out),
                gradients(case, grad_out=grad_out))


def test_forward_and_backward_get_the_plan(monkeypatch):
    case = case_of()
    plan = plan_of(case)
    assert_both_get_the_plan(monkeypatch, ft._attention, plan,
                             lambda: gradients(case, with_plan(plan)))


def test_gradcheck():
    case = case_of(rows=3, keys=4, heads=2, dim=512, width=3)
    plan = plan_of(case)
    inputs = [case[name].double().requires_grad_() for name in ("q", "kv", "attn_sink")]

    def run(q, kv, attn_sink):
        return ft.sparse_attention(q, kv, case["topk_indices"], 0.05, case["topk_length"],
                                   attn_sink, plan=plan, backend="reference")

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_layers_with_one_plan_save_it_once():
    layers = [differentiable(case_of(seed=seed)) for seed in range(3)]
    shared = {name: layers[0][name] for name in ("topk_indices", "topk_length")}
    plan = plan_of(layers[0])
    counts = []
    for options in ({}, {"plan": plan}):
        with saved_tensors() as saved:
            outs = [ft.sparse_attention(layer["q"], layer["kv"], softmax_scale=0.05, **shared,
                                        **options) for layer in layers]
        counts.append(saved_bytes(saved))
        del outs
    assert [id_of(tensor) for tensor in saved].count(id_of(plan.storage)) == len(layers)
    assert counts[1] - counts[0] == plan.nbytes == 2240


def test_plan_that_was_written_over_is_refused_by_autograd():
    case = differentiable(case_of())
    plan = plan_of(case)
    out = ft.sparse_attention(**case, plan=plan)
    plan.storage.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    case = case_of()
    plan = plan_of(case)

    def run(**case):
        names = list(case)
        return checkpoint(lambda plan, *values: with_plan(plan)(**dict(zip(names, values))),
                          plan, *case.values(), use_reentrant=reentrant)

    assert_same(gradients(case, run), gradients(case))


def test_plan_built_in_a_checkpoint():
    def run(**case):
        return checkpoint(lambda: ft.sparse_attention(**case, plan=plan_of(case)),
                          use_reentrant=False)

    assert_same(gradients(case_of(), run), gradients(case_of()))


# --- compile

def layer_of(q, kv, topk_indices, softmax_scale, topk_length, attn_sink, plan):
    out = ft.sparse_attention(q * 2, kv, topk_indices, softmax_scale, topk_length, attn_sink,
                              plan=plan)
    return out.transpose(0, 1) + plan.nbytes


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(backend, dynamic):
    torch._dynamo.reset()

    def built_inside(**case):
        return layer_of(**case, plan=plan_of(case))

    options = {"fullgraph": True, "backend": backend, "dynamic": dynamic}
    inside = torch.compile(built_inside, **options)
    build = torch.compile(plan_of, **options)
    use = torch.compile(layer_of, **options)
    for rows in (20, 33):
        case = case_of(rows=rows)
        want = gradients(case, lambda **c: built_inside(**c))
        assert_same(gradients(case, lambda **c: inside(**c)), want)
        plan = build(case)
        assert isinstance(plan, flashdsa.SelectionPlan) and plan[1:] == plan_of(case)[1:]
        assert_same(gradients(case, lambda **c: use(**c, plan=plan)), want)


def test_other_rows_are_not_compiled_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda **case: layer_of(**case, plan=plan_of(case)), fullgraph=True,
                        backend=counter, dynamic=True)
    compiled = []
    with torch.no_grad():
        for rows in (20, 33, 70):
            case = case_of(rows=rows)
            assert torch.equal(run(**case), layer_of(**case, plan=plan_of(case)))
            compiled.append(counter.frame_count)
    assert compiled[0] > 0 and compiled == compiled[:1] * 3


def test_exported_program():
    class Layer(torch.nn.Module):
        def forward(self, q, kv, topk_indices):
            plan = ft.build_selection_plan(topk_indices, kv.shape[0], q.shape[1])
            return ft.sparse_attention(q, kv, topk_indices, 0.05, plan=plan)

    names = ("q", "kv", "topk_indices")
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(Layer(), tuple(case_of()[name] for name in names),
                                  dynamic_shapes=({0: rows}, None, {0: rows}))
    arguments = [case_of(rows=33)[name] for name in names]
    assert torch.equal(program.module()(*arguments), Layer()(*arguments))


# --- refusals

BUILDS = {
    "indices": (dict(topk_indices=np.zeros((20, 1, 8), np.int32)), TypeError,
                "topk_indices must be a torch.Tensor, got numpy.ndarray"),
    "length": (dict(topk_length=3), TypeError, "topk_length must be a torch.Tensor, got int"),
    "dtype": (dict(topk_indices=torch.zeros(20, 1, 8)), TypeError, "topk_indices must be int32"),
    "keys": (dict(total_key_tokens=24.0), TypeError,
             "total_key_tokens must be an int, got float"),
    "heads": (dict(heads=True), TypeError, "heads must be an int, got bool"),
    "heads large": (dict(heads=129), ValueError, "heads must be in 1..128, got 129"),
    "device": (dict(topk_length=torch.zeros(20, dtype=torch.int32, device="meta")), ValueError,
               "topk_length must be on cpu as topk_indices is, got meta"),
    "contents": (dict(total_key_tokens=3, check=True), ValueError, "topk_indices"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_build_refusal(name):
    changes, kind, words = BUILDS[name]
    case = case_of()
    arguments = {"topk_indices": case["topk_indices"], "total_key_tokens": 24, "heads": 4}
    with pytest.raises(kind) as caught:
        ft.build_selection_plan(**{**arguments, **changes})
    assert type(caught.value) is kind and "build_selection_plan: " in str(caught.value)
    assert words in str(caught.value)


PLANS = {
    "tensor": (lambda plan: plan.storage, TypeError,
               "plan must be a SelectionPlan, got torch.Tensor"),
    "sizes": (lambda plan: plan_of(case_of(rows=21)), ValueError,
              "plan must be built for T_q = 20, K = 8, T_k = 24 and groups of 8 rows, got one for "
              "T_q = 21"),
    "heads": (lambda plan: plan_of(case_of(heads=9)), ValueError, "and groups of 4 rows"),
    "framework": (lambda plan: plan._replace(storage=plan.storage.numpy()), TypeError,
                  "plan.storage must be a torch.Tensor"),
    "dtype": (lambda plan: plan._replace(storage=plan.storage.view(torch.int8)), TypeError,
              "plan.storage must be uint8 [2240], got int8 [2240]"),
    "none": (lambda plan: plan._replace(storage=None), TypeError,
             "plan.storage must be a tensor, got None"),
}


@pytest.mark.parametrize("function", ATTENTIONS)
@pytest.mark.parametrize("name", PLANS)
def test_plan_refusal(name, function):
    change, kind, words = PLANS[name]
    case = case_of()
    with pytest.raises(kind) as caught:
        function(**case, plan=change(plan_of(case)))
    assert type(caught.value) is kind
    assert "attention_forward: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("grad", [False, True])
def test_plan_on_another_device_is_refused(grad):
    case = case_of()
    plan = plan_of(case)
    plan = plan._replace(storage=plan.storage.to("meta"))
    case["q"].requires_grad_(grad)
    with pytest.raises(ValueError, match="plan.storage must be on cpu as q is, got meta"):
        ft.sparse_attention(**case, plan=plan)


def test_fake_plan_among_tensors_with_memory_is_refused():
    case = case_of()
    plan = plan_of(case)
    plan = plan._replace(storage=FakeTensorMode().from_tensor(plan.storage))
    with pytest.raises(TypeError, match="q must be a fake tensor as others are"):
        ft.sparse_attention(**case, plan=plan)
    with pytest.raises(TypeError, match="plan.storage must be a torch.Tensor as q is, got .*Fake"):
        flashdsa.attention_forward(**case, plan=plan)


def test_size_that_is_no_number_is_refused():
    case = case_of()
    plan = plan_of(case)._replace(group="8")
    with pytest.raises(TypeError, match="attention_forward: plan.group must be an int, got str"):
        flashdsa.attention_forward(**case, plan=plan)
    with pytest.raises(RuntimeError, match="plan_sizes"):  # by PyTorch's dispatcher
        ft.sparse_attention(**case, plan=plan)
