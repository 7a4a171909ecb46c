"""indexer_backward on NumPy arrays, judged by NumPy alone."""

import numpy as np
import pytest

import flashdsa
import problems
from problems import BF16, same_bits

BACKENDS = ("cpu", "reference")


def case_of(rows=12, keys=30, heads=5, width=9, seed=0):
    """Arguments of indexer_backward by name: holes, lengths and a repeated key included."""
    rng = np.random.default_rng(seed)
    indices = rng.integers(-1, keys, (rows, 1, width)).astype(np.int32)
    indices[0, 0, :3] = 7
    return {
        "index_q": problems.bf16(rng, rows, heads, 128),
        "index_k": problems.bf16(rng, keys, 128),
        "head_weights": rng.standard_normal((rows, heads)).astype(np.float32),
        "topk_indices": indices,
        "grad_scores": rng.standard_normal((rows, width)).astype(np.float32),
        "topk_length": rng.integers(0, width + 1, rows).astype(np.int32),
    }


def oracle(index_q, index_k, head_weights, topk_indices, grad_scores, topk_length=None):
    """SPEC section 3 in float64: the three gradients."""
    q, k, w = (x.astype(np.float64) for x in (index_q, index_k, head_weights))
    grad_q, grad_k, grad_w = np.zeros_like(q), np.zeros_like(k), np.zeros_like(w)
    for t in range(q.shape[0]):
        for j in range(topk_indices.shape[2] if topk_length is None else topk_length[t]):
            key, g = topk_indices[t, 0, j], float(grad_scores[t, j])
            if not 0 <= key < k.shape[0]:
                continue
            dots = q[t] @ k[key]
            factors = g * w[t] * (dots > 0)
            grad_w[t] += g * np.maximum(dots, 0)
            grad_q[t] += np.outer(factors, k[key])
            grad_k[key] += factors @ q[t]
    return grad_q, grad_k, grad_w


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", [np.float32, BF16])
@pytest.mark.parametrize("sizes", [{}, {"heads": 1, "width": 1}, {"heads": 64, "width": 200},
                                   {"rows": 1, "keys": 1}])
def test_agrees_with_numpy(backend, weights, sizes):
    case = case_of(**sizes)
    case["head_weights"] = case["head_weights"].astype(weights)
    for wide in (False, True):
        grads = flashdsa.indexer_backward(**case, backend=backend, grad_index_k_float32=wide)
        assert [x.dtype for x in grads] == [BF16, np.float32 if wide else BF16, weights]
        for name, got, want in zip(grads._fields, grads, oracle(**case)):
            error = np.linalg.norm(got.astype(float) - want)
            assert error <= 1e-2 * np.linalg.norm(want), f"{name}: {error}"


def test_reference_takes_float64():
    case = case_of()
    for name in ("index_q", "index_k", "head_weights", "grad_scores"):
        case[name] = case[name].astype(np.float64)
    grads = flashdsa.indexer_backward(**case)
    for got, want in zip(grads, oracle(**case)):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}])
def test_threads_do_not_change_the_bits(options):
    case = case_of()
    assert all(map(same_bits, flashdsa.indexer_backward(**case),
                   flashdsa.indexer_backward(**case, **options)))


def test_empty_problem():
    case = case_of()
    for name in case:
        if name != "index_k":
            case[name] = case[name][:0]
    grads = flashdsa.indexer_backward(**case)
    assert grads.grad_index_q.shape == (0, 5, 128) and grads.grad_head_weights.shape == (0, 5)
    assert grads.grad_index_k.shape == (30, 128) and not grads.grad_index_k.any()


REFUSALS = {
    "weights framework": (dict(head_weights=[[1.0]]), TypeError,
                          "head_weights must be a numpy.ndarray as index_q is, got list"),
    "weights dtype": (dict(head_weights=np.ones((12, 5))), TypeError,
                      "head_weights must be float32 or bfloat16"),
    "scores dtype": (dict(grad_scores=np.ones((12, 9))), TypeError, "grad_scores must be float32"),
    "scores shape": (dict(grad_scores=np.ones((12, 8), np.float32)), ValueError,
                     "grad_scores must be float32"),
    "scores missing": (dict(grad_scores=None), TypeError, "grad_scores must be"),
    "indices dtype": (dict(topk_indices=np.zeros((12, 1, 9), np.int64)), TypeError,
                      "topk_indices must be int32"),
    "q rank": (dict(index_q=np.zeros((12, 128), BF16)), ValueError, "index_q must be bfloat16"),
    "q channels": (dict(index_q=np.zeros((12, 5, 64), BF16)), ValueError,
                   "index_q must be bfloat16"),
    "k channels": (dict(index_k=np.zeros((30, 64), BF16)), ValueError, "index_k must be bfloat16"),
    "flag": (dict(grad_index_k_float32=1), TypeError, "grad_index_k_float32 must be a bool"),
    "contents": (dict(topk_indices=np.full((12, 1, 9), 30, np.int32), topk_length=None,
                      check=True), ValueError, "topk_indices row 0 must hold -1..29"),
    "backend": (dict(backend="sm80"), RuntimeError, "no backend takes this call with backend sm80"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    changes, kind, words = REFUSALS[name]
    with pytest.raises(kind) as caught:
        flashdsa.indexer_backward(**{**case_of(), **changes})
    assert type(caught.value) is kind
    assert str(caught.value).startswith("indexer_backward: ") and words in str(caught.value)
