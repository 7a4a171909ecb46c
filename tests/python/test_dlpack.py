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


# JAX. Its arrays cannot be written into: the library allocates the results and hands them over.


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def to_jax(jax, arrays):
    """On the host, also where JAX has a GPU."""
    host = jax.devices("cpu")[0]
    return {name: jax.device_put(value, host) if isinstance(value, np.ndarray) else value
            for name, value in arrays.items()}


def address(jax_array):
    return jax_array.unsafe_buffer_pointer()


def test_jax_attention(jax):
    case = problems.attention()
    want = flashdsa.attention_forward(**case)
    extra = {"out": want.out, "lse": want.lse, "grad_out": want.out}
    got = flashdsa.attention_forward(**to_jax(jax, case))
    assert isinstance(got.out, jax.Array) and got.out.dtype == ml_dtypes.bfloat16
    assert problems.same_bits(np.asarray(got.out), want.out)
    assert problems.same_bits(np.asarray(got.lse), want.lse)
    want = flashdsa.attention_backward(**case, **extra)
    got = flashdsa.attention_backward(**to_jax(jax, {**case, **extra}))
    for a, b in zip(got, want):
        assert isinstance(a, jax.Array) and problems.same_bits(np.asarray(a), b)


def test_jax_metadata_and_selection(jax):
    arrays = dict(zip(("index_q", "index_k", "head_weights"), problems.indexer(9)))
    cu_seqlens = np.array([0, 3, 9], np.int32)
    want = flashdsa.indexer_topk(*arrays.values(), flashdsa.prepare_packed_metadata(cu_seqlens, 9),
                                 4, return_scores=True)
    rows = flashdsa.prepare_packed_metadata(to_jax(jax, {"": cu_seqlens})[""], 9)
    assert isinstance(rows.starts, jax.Array) and rows.query_valid.dtype == bool
    got = flashdsa.indexer_topk(**to_jax(jax, arrays), packed_metadata=rows, index_topk=4,
                                return_scores=True)
    for a, b in zip(got, want):
        assert problems.same_bits(np.asarray(a), b)


def test_jax_memory_is_not_copied(jax):
    from flashdsa._frameworks import framework_of

    array = to_jax(jax, {"": problems.attention()["q"]})[""]
    assert as_tvm(array).data_ptr() == address(array)
    framework = framework_of("x", "q", array)
    memory = framework.empty(array, (256, 512), "float32")
    assert address(framework.result(memory)) == np.from_dlpack(memory).ctypes.data


def test_jax_refusals(jax):
    case = to_jax(jax, problems.attention())
    with pytest.raises(TypeError, match="kv must be a jaxlib.* as q is, got numpy.ndarray"):
        flashdsa.attention_forward(**{**case, "kv": np.asarray(case["kv"])})
    with pytest.raises(TypeError, match="q must be bfloat16 or float64"):
        flashdsa.attention_forward(**{**case, "q": case["q"].astype(np.float32)})
    with pytest.raises(TypeError, match="got jax.*Tracer"):
        jax.jit(lambda q: flashdsa.attention_forward(**{**case, "q": q}).out)(case["q"])


@pytest.mark.cuda
def test_jax_arrays_on_a_gpu_are_refused(jax):
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    with pytest.raises(TypeError, match="indices must be a torch.Tensor or a cupy.ndarray to be"):
        flashdsa.compact_and_sort(jax.numpy.zeros((2, 3), jax.numpy.int32), 9)


# CuPy.


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.mark.cuda
def test_cupy_arrays(cupy):
    cu_seqlens = np.array([0, 3, 9], np.int32)
    rows = flashdsa.prepare_packed_metadata(cupy.asarray(cu_seqlens), 9)
    assert isinstance(rows.starts, cupy.ndarray) and rows.starts.tolist() == [0] * 3 + [3] * 6
    result = flashdsa.compact_and_sort(cupy.asarray([[7, -1, 3]], dtype=np.int32), 9)
    assert result.indices.tolist() == [[3, 7, -1]] and result.lengths.tolist() == [2]


@pytest.mark.cuda
def test_cupy_attention(cupy):
    case = problems.attention(rows=64, keys=96, width=32)
    want = flashdsa.attention_forward(**case)
    case["out"], case["lse"], case["grad_out"] = want.out, want.lse, want.out
    on_gpu = {name: to_cupy(cupy, value) for name, value in case.items()}
    got = flashdsa.attention_backward(**on_gpu)
    want = flashdsa.attention_backward(**case)
    for a, b in zip(got, want):
        assert isinstance(a, cupy.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        error = cupy.asnumpy(a).astype(np.float64) - b.astype(np.float64)
        assert np.linalg.norm(error) <= 1e-2 * np.linalg.norm(b.astype(np.float64))


def to_cupy(cupy, value):
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype != ml_dtypes.bfloat16:
        return cupy.asarray(value)
    patterns = cupy.asarray(value.view(np.uint16))
    try:
        return patterns.view(ml_dtypes.bfloat16)
    except (TypeError, ValueError):
        pytest.skip("this CuPy has no bfloat16")


@pytest.mark.cuda
def test_cupy_s_current_stream_is_used(cupy):
    rng = np.random.default_rng(5)
    indices = rng.integers(-1, 900, (4000, 512)).astype(np.int32)
    want = flashdsa.compact_and_sort(indices, 900)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = cupy.zeros(indices.shape, np.int32)
        busy = cupy.ones((4096, 4096), np.float32)
        for _ in range(20):
            busy = busy @ busy * 0  # keeps the stream busy
        late += cupy.asarray(indices)  # behind it
        result = flashdsa.compact_and_sort(late, 900)
    stream.synchronize()
    assert np.array_equal(cupy.asnumpy(result.indices), want.indices)
    assert np.array_equal(cupy.asnumpy(result.lengths), want.lengths)


@pytest.mark.cuda
def test_cupy_beside_host_arrays_is_refused(cupy):
    with pytest.raises(TypeError, match="query_indices must be a cupy.* as cu_seqlens is, got num"):
        flashdsa.prepare_packed_metadata(cupy.asarray([0, 9], dtype=np.int32), 9,
                                         query_indices=np.arange(9))
