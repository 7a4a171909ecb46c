"""Selection plans on NumPy arrays and others with __dlpack__: contents, results, refusals."""

import numpy as np
import pytest
import tvm_ffi

import flashdsa
import problems
from problems import same_bits

CONSECUTIVE, SPREAD = [0, 1, 2, 3], [0, 2, 4, 6]  # keys of a row
UNION, RANGE = 1, 2  # kinds of items


def plan_of(case, **options):
    """The plan of the arguments of attention_forward."""
    return flashdsa.build_selection_plan(case["topk_indices"], case["kv"].shape[0],
                                         case["q"].shape[1], case["topk_length"], **options)


def items_of(plan):
    """(first row, rows, kind, keys, first key) of every item: docs/selection_plan.md."""
    count = plan.storage[:4].view(np.int32)[0]
    words = plan.storage[64:64 + 32 * count].view(np.int32).reshape(count, 8)
    assert not words[:, 5:].any()
    return words[:, :5].tolist()


def rows_of(keys, rows=10):
    return np.tile(np.array(keys, np.int32), (rows, 1, 1))


# --- what is built

def test_rows_with_the_same_keys_are_computed_together():
    plan = flashdsa.build_selection_plan(rows_of(CONSECUTIVE), 7, 8)
    assert items_of(plan) == [[0, 8, RANGE, 4, 0], [8, 2, RANGE, 4, 0]]
    plan = flashdsa.build_selection_plan(rows_of(SPREAD), 7, 16)
    assert items_of(plan) == [[0, 4, UNION, 4, 0], [4, 4, UNION, 4, 0], [8, 2, UNION, 4, 0]]


def test_length_and_number_of_keys_count():
    indices = rows_of(CONSECUTIVE)
    plan = flashdsa.build_selection_plan(indices, 7, 8, np.full(10, 2, np.int32))
    assert items_of(plan) == [[0, 8, RANGE, 2, 0], [8, 2, RANGE, 2, 0]]
    plan = flashdsa.build_selection_plan(indices, 3, 8)
    assert items_of(plan) == [[0, 8, RANGE, 3, 0], [8, 2, RANGE, 3, 0]]


# 64 of the count, 640 of the items, 128 each of the rows' two numbers; where G > 1 also 3200 of
# the lists and 160 G of the masks: every size is a multiple of 64 but the count's and the rows'.
@pytest.mark.parametrize("heads, group, nbytes", [
    (1, 8, 5440), (8, 8, 5440), (9, 4, 4800), (16, 4, 4800), (17, 2, 4480), (32, 2, 4480),
    (33, 1, 960), (128, 1, 960)])
def test_sizes(heads, group, nbytes):
    indices = np.zeros((20, 1, 40), np.int32)
    plan = flashdsa.build_selection_plan(indices, 50, heads)
    assert plan[1:] == (20, 40, 50, group)
    assert (plan.query_rows, plan.topk, plan.total_key_tokens, plan.group) == plan[1:]
    assert plan.nbytes == nbytes and plan.storage.shape == (nbytes,)
    assert plan.storage.dtype == np.uint8 and plan.storage.ctypes.data % 16 == 0


def test_plan_of_no_rows():
    case = problems.attention()
    for name in ("q", "topk_indices", "topk_length"):
        case[name] = case[name][:0]
    plan = plan_of(case)
    assert plan.nbytes == 64 and items_of(plan) == []
    assert flashdsa.attention_forward(**case, plan=plan).out.shape == (0, 4, 512)


def test_plan_is_immutable():
    plan = plan_of(problems.attention())
    for name in (*plan._fields, "nbytes"):
        with pytest.raises(AttributeError):
            setattr(plan, name, 1)


def test_strided_and_read_only_indices_are_taken():
    wide = np.full((20, 1, 80), -1, np.int32)
    wide[::2, :, :4] = CONSECUTIVE
    indices = wide[::2, :, :40]
    indices.flags.writeable = False
    assert items_of(flashdsa.build_selection_plan(indices, 7, 8)) == [
        [0, 8, RANGE, 4, 0], [8, 2, RANGE, 4, 0]]


# --- what is computed with it: on the host nothing else than without

@pytest.mark.parametrize("heads", [4, 12, 24, 40])
@pytest.mark.parametrize("options", [{}, {"backend": "reference"}, {"threads": 3},
                                     {"deterministic": True}, {"invariant": True}])
def test_host_computes_the_same_bits(heads, options):
    case = problems.attention(heads=heads)
    plan = plan_of(case)
    want = flashdsa.attention_forward(**case, **options)
    got = flashdsa.attention_forward(**case, plan=plan, **options)
    assert same_bits(got.out, want.out) and same_bits(got.lse, want.lse)
    case.update(out=want.out, lse=want.lse, grad_out=want.out)
    assert all(map(same_bits, flashdsa.attention_backward(**case, plan=plan, **options),
                   flashdsa.attention_backward(**case, **options)))


def test_backends_of_the_host_agree_with_a_plan():
    case = problems.attention()
    plan = plan_of(case)
    out, reference = (flashdsa.attention_forward(**case, plan=plan, backend=name).out.astype(float)
                      for name in ("cpu", "reference"))
    assert np.linalg.norm(out - reference) <= 4e-3 * np.linalg.norm(reference)


def test_plan_serves_every_number_of_heads_of_its_group():
    plan = plan_of(problems.attention(heads=1))
    flashdsa.attention_forward(**problems.attention(heads=8), plan=plan)


# --- refusals

INDICES = problems.attention()["topk_indices"]


def build(**changes):
    arguments = {"topk_indices": INDICES, "total_key_tokens": 24, "heads": 4}
    return flashdsa.build_selection_plan(**{**arguments, **changes})


BUILDS = {
    "indices list": (dict(topk_indices=[1]), TypeError, "topk_indices must be a numpy.ndarray"),
    "indices none": (dict(topk_indices=None), TypeError, "got NoneType"),
    "indices int64": (dict(topk_indices=INDICES.astype(np.int64)), TypeError,
                      "topk_indices must be int32 [T_q, 1, K] with T_q in 0..2147483646, K in "
                      "1..2048, got int64 [20, 1, 8]"),
    "indices rank": (dict(topk_indices=INDICES[:, 0]), ValueError, "got int32 [20, 8]"),
    "no slots": (dict(topk_indices=INDICES[:, :, :0]), ValueError, "K in 1..2048"),
    "last axis": (dict(topk_indices=INDICES[:, :, ::2]), ValueError,
                  "topk_indices must be contiguous in its last axis"),
    "length dtype": (dict(topk_length=np.zeros(20)), TypeError, "topk_length must be int32 [T_q]"),
    "length shape": (dict(topk_length=np.zeros(19, np.int32)), ValueError, "got int32 [19]"),
    "length framework": (dict(topk_length=tvm_ffi.from_dlpack(np.zeros(20, np.int32))), TypeError,
                         "topk_length must be a numpy.ndarray as topk_indices is, got tvm_ffi"),
    "keys float": (dict(total_key_tokens=24.0), TypeError,
                   "total_key_tokens must be an int, got float"),
    "keys negative": (dict(total_key_tokens=-1), ValueError,
                      "total_key_tokens must be in 0..2147483646, got -1"),
    "keys large": (dict(total_key_tokens=2**31 - 1), ValueError, "got 2147483647"),
    "heads bool": (dict(heads=True), TypeError, "heads must be an int, got bool"),
    "heads zero": (dict(heads=0), ValueError, "heads must be in 1..128, got 0"),
    "heads large": (dict(heads=129), ValueError, "heads must be in 1..128, got 129"),
    "backend": (dict(backend="tpu"), ValueError, "backend must be one of"),
    "no backend": (dict(backend="sm80"), RuntimeError,
                   "no backend takes this call with backend sm80"),
    "check": (dict(check=1), TypeError, "check must be a bool, got int"),
    "contents": (dict(total_key_tokens=3, check=True), ValueError, "topk_indices"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_build_refusal(name):
    changes, kind, words = BUILDS[name]
    with pytest.raises(kind) as caught:
        build(**changes)
    assert type(caught.value) is kind
    assert "build_selection_plan: " in str(caught.value) and words in str(caught.value)


def test_checking_names_the_row_of_the_selection(monkeypatch):
    length = np.full(20, 8, np.int32)
    length[5] = 9
    build(topk_length=length)
    with pytest.raises(ValueError, match="topk_length.*5.*9"):
        build(topk_length=length, check=True)
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    with pytest.raises(ValueError, match="topk_length.*5.*9"):
        build(topk_length=length)


def misplaced(storage):
    """The same bytes at an odd address."""
    memory = np.zeros(storage.size + 64, np.uint8)
    begin = 1 + -memory.ctypes.data % 16
    memory[begin:begin + storage.size] = storage
    return memory[begin:begin + storage.size]


SIZES = "plan must be built for T_q = 20, K = 8, T_k = 24 and groups of 8 rows, got one for "

PLANS = {
    "tuple": (tuple, TypeError, "plan must be a SelectionPlan, got tuple"),
    "storage alone": (lambda plan: plan.storage, TypeError,
                      "plan must be a SelectionPlan, got numpy.ndarray"),
    "rows": (lambda plan: build(topk_indices=INDICES[:-1]), ValueError,
             SIZES + "T_q = 19, K = 8, T_k = 24 and groups of 8 rows"),
    "topk": (lambda plan: build(topk_indices=INDICES[:, :, :7]), ValueError,
             SIZES + "T_q = 20, K = 7, T_k = 24 and groups of 8 rows"),
    "keys": (lambda plan: build(total_key_tokens=25), ValueError,
             SIZES + "T_q = 20, K = 8, T_k = 25 and groups of 8 rows"),
    "heads": (lambda plan: build(heads=9), ValueError,
              SIZES + "T_q = 20, K = 8, T_k = 24 and groups of 4 rows"),
    "size kind": (lambda plan: plan._replace(group="8"), TypeError,
                  "plan.group must be an int, got str"),
    "size negative": (lambda plan: plan._replace(topk=-8), ValueError,
                      "plan.topk must be in 0..9223372036854775807, got -8"),
    "no storage": (lambda plan: plan._replace(storage=None), TypeError,
                   "plan.storage must be a tensor, got None"),
    "storage list": (lambda plan: plan._replace(storage=[0]), TypeError,
                     "plan.storage must be a numpy.ndarray as q is, got list"),
    "storage framework": (lambda plan: plan._replace(storage=tvm_ffi.from_dlpack(plan.storage)),
                          TypeError, "plan.storage must be a numpy.ndarray as q is, got tvm_ffi"),
    "storage dtype": (lambda plan: plan._replace(storage=plan.storage.view(np.int8)), TypeError,
                      "plan.storage must be uint8 [2240], got int8 [2240]"),
    "storage size": (lambda plan: plan._replace(storage=plan.storage[:-1]), ValueError,
                     "plan.storage must be uint8 [2240], got uint8 [2239]"),
    "storage strided": (lambda plan: plan._replace(storage=np.zeros(4480, np.uint8)[::2]),
                        ValueError, "plan.storage must be contiguous"),
    "storage misplaced": (lambda plan: plan._replace(storage=misplaced(plan.storage)), ValueError,
                          "plan.storage must lie at a multiple of 16 bytes"),
}


@pytest.mark.parametrize("operation", ["attention_forward", "attention_backward"])
@pytest.mark.parametrize("name", PLANS)
def test_plan_refusal(name, operation):
    change, kind, words = PLANS[name]
    case = problems.attention()
    if operation == "attention_backward":
        forward = flashdsa.attention_forward(**case)
        case.update(out=forward.out, lse=forward.lse, grad_out=forward.out)
    with pytest.raises(kind) as caught:
        getattr(flashdsa, operation)(**case, plan=change(plan_of(problems.attention())))
    assert type(caught.value) is kind
    assert f"{operation}: {words}" in str(caught.value)


# --- other frameworks

def test_tvm_ffi_tensors():
    plan = flashdsa.build_selection_plan(tvm_ffi.from_dlpack(rows_of(CONSECUTIVE)), 7, 8)
    assert isinstance(plan.storage, tvm_ffi.Tensor) and plan.nbytes == plan.storage.shape[0]
    assert items_of(plan._replace(storage=np.from_dlpack(plan.storage))) == [
        [0, 8, RANGE, 4, 0], [8, 2, RANGE, 4, 0]]


@pytest.mark.cuda
def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    plan = flashdsa.build_selection_plan(cupy.asarray(rows_of(CONSECUTIVE)), 7, 8)
    assert isinstance(plan.storage, cupy.ndarray) and plan.nbytes == plan.storage.nbytes
    assert items_of(plan._replace(storage=cupy.asnumpy(plan.storage))) == [
        [0, 8, RANGE, 4, 0], [8, 2, RANGE, 4, 0]]


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    host = jax.devices("cpu")[0]
    arrays = problems.attention()
    want = flashdsa.attention_forward(**arrays)
    case = {name: jax.device_put(value, host) if isinstance(value, np.ndarray) else value
            for name, value in arrays.items()}
    plan = plan_of(case)
    assert isinstance(plan.storage, jax.Array) and plan[1:] == plan_of(arrays)[1:]
    assert plan.nbytes == plan.storage.nbytes == 2240
    got = flashdsa.attention_forward(**case, plan=plan)
    assert same_bits(np.asarray(got.out), want.out)
    with pytest.raises(TypeError, match="plan.storage must be a jaxlib.* as q is, got numpy"):
        flashdsa.attention_forward(**case, plan=plan_of(arrays))
    case.update(out=got.out, lse=got.lse, grad_out=got.out)
    arrays.update(out=want.out, lse=want.lse, grad_out=want.out)
    for a, b in zip(flashdsa.attention_backward(**case, plan=plan),
                    flashdsa.attention_backward(**arrays)):
        assert same_bits(np.asarray(a), b)
