"""Arrays of other frameworks: whatever has __dlpack__."""

import ml_dtypes
import numpy as np
import pytest
import tvm_ffi

import flashdsa
import problems


def as_tvm(array):
    return tvm_ffi.from_dlpack(array)


def test_tvm_ffi_tensors():
    rows = flashdsa.prepare_packed_metadata(as_tvm(np.array([0, 3, 9], np.int32)), 9)
    assert isinstance(rows.starts, tvm_ffi.Tensor)
    assert np.from_dlpack(rows.starts).tolist() == [0] * 3 + [3] * 6
    result = flashdsa.compact_and_sort(as_tvm(np.array([[7, -1, 3]], np.int32)), 9)
    assert np.from_dlpack(result.indices).tolist() == [[3, 7, -1]]


def test_float64_attention_on_tvm_ffi_tensors():
    case = problems.attention()
    for name in ("q", "kv", "attn_sink"):
        case[name] = case[name].astype(np.float64)
    want = flashdsa.attention_forward(**case)
    got = flashdsa.attention_forward(**{
        name: as_tvm(value) if isinstance(value, np.ndarray) else value
        for name, value in case.items()})
    assert problems.same_bits(np.from_dlpack(got.out), want.out)
    assert problems.same_bits(np.from_dlpack(got.lse), want.lse)


def test_frameworks_do_not_mix():
    case = problems.attention()
    case["topk_length"] = as_tvm(case["topk_length"])
    with pytest.raises(TypeError, match="topk_length must be a numpy.ndarray as q is, got tvm_ffi"):
        flashdsa.attention_forward(**case)
    case = problems.attention()
    with pytest.raises(TypeError, match="cu_seqlens_padded must be a tvm_ffi"):
        flashdsa.prepare_packed_metadata(as_tvm(np.array([0, 9], np.int32)), 9,
                                         cu_seqlens_padded=np.array([0, 9], np.int32))


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    case = problems.attention()
    want = flashdsa.attention_forward(**case)
    got = flashdsa.attention_forward(**{
        name: jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in case.items()})
    assert isinstance(got.out, jax.Array) and got.out.dtype == ml_dtypes.bfloat16
    assert problems.same_bits(np.asarray(got.out), want.out)
    assert problems.same_bits(np.asarray(got.lse), want.lse)
