"""The functions on NumPy arrays: worked values, kinds of arrays, options."""

import concurrent.futures
import dataclasses

import numpy as np
import pytest

import flashdsa
import problems
from problems import BF16, same_bits


def test_metadata_of_the_worked_example():
    rows = flashdsa.prepare_packed_metadata(
        np.array([0, 3, 7, 9], np.int32), 12, 4, query_indices=np.arange(2, 10),
        cu_seqlens_padded=np.array([0, 4, 9, 12], np.int32))
    expected = {
        "starts": np.array([0, 0, 4, 4, 4, 4, 4, 9], np.int32),
        "causal_lengths": np.array([3, 0, 1, 2, 3, 4, 0, 1], np.int32),
        "query_valid": np.array([1, 0, 1, 1, 1, 1, 0, 1], bool),
        "valid_row_indices": np.array([0, 2, 3, 4, 5, 7]),
        "segment_cu_q": np.array([0, 2, 7, 8], np.int32),
        "segment_cu_k": np.array([0, 4, 9, 10], np.int32),
        "q_causal_offsets": np.array([2, 0, 0], np.int32),
        "key_source_indices": np.arange(10),
    }
    for name, want in expected.items():
        assert same_bits(getattr(rows, name), want), name
    assert (rows.max_seqlen_q, rows.max_seqlen_k, rows.total_key_tokens) == (5, 5, 12)
    assert rows.all_rows_nonempty is False and rows.status is None


def test_metadata_leaves_out_what_is_trivial():
    rows = flashdsa.prepare_packed_metadata(np.array([0, 3, 9], np.int32), 9)
    assert rows.valid_row_indices is None and rows.key_source_indices is None
    assert rows.all_rows_nonempty is True


def test_metadata_is_frozen_and_replaceable():
    rows = flashdsa.prepare_packed_metadata(np.array([0, 9], np.int32), 9)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.max_seqlen_q = 1
    assert dataclasses.replace(rows, max_seqlen_q=1).max_seqlen_q == 1


def test_capture_safe_metadata_reports_in_status():
    good = flashdsa.prepare_packed_metadata(np.array([0, 9], np.int32), 9, capture_safe=True)
    bad = flashdsa.prepare_packed_metadata(np.array([0, 5], np.int32), 9, capture_safe=True)
    assert good.status.tolist() == [0] and good.max_seqlen_k == 9
    assert bad.status.tolist() == [5] and not bad.query_valid.any()  # storage ends elsewhere


def test_max_seqlen_may_be_a_scalar_array():
    cu_seqlens = np.array([0, 3, 9], np.int32)
    flashdsa.prepare_packed_metadata(cu_seqlens, 9, np.array(6, np.int32))
    with pytest.raises(ValueError, match="max_seqlen"):
        flashdsa.prepare_packed_metadata(cu_seqlens, 9, np.array(5))


def test_lse_is_the_natural_logarithm():
    q, kv = np.zeros((1, 1, 576), BF16), np.zeros((1, 1, 576), BF16)
    q[0, 0, 0] = kv[0, 0, 0] = 2
    result = flashdsa.attention_forward(q, kv, np.zeros((1, 1, 1), np.int32), 0.5,
                                        return_max_logits=True)
    assert result.lse.tolist() == [[2.0]] and result.max_logits.tolist() == [[2.0]]
    assert same_bits(result.out, kv[:, :, :512])


def test_optional_results_are_none_unless_asked_for():
    case = problems.attention()
    assert flashdsa.attention_forward(**case).max_logits is None
    del case["attn_sink"]
    forward = flashdsa.attention_forward(**case)
    grads = flashdsa.attention_backward(**case, out=forward.out, lse=forward.lse,
                                        grad_out=forward.out)
    assert grads.grad_attn_sink is None


def test_one_key_passes_the_gradient_on():
    rng = np.random.default_rng(1)
    q, kv = problems.bf16(rng, 3, 2, 512), problems.bf16(rng, 5, 1, 512)
    indices = np.full((3, 1, 1), 4, np.int32)
    grad_out = np.ones((3, 2, 512), BF16)
    forward = flashdsa.attention_forward(q, kv, indices, 0.5)
    grads = flashdsa.attention_backward(q, kv, indices, 0.5, forward.out, forward.lse, grad_out)
    assert (grads.grad_kv[4].astype(float) == 6).all() and not grads.grad_kv[:4].any()
    assert np.abs(grads.grad_q.astype(float)).max() < 1e-3


@pytest.mark.parametrize("wide", [False, True])
def test_grad_kv_comes_in_float32_on_request(wide):
    case = problems.attention()
    forward = flashdsa.attention_forward(**case)
    grads = flashdsa.attention_backward(**case, out=forward.out, lse=forward.lse,
                                        grad_out=forward.out, grad_kv_float32=wide)
    assert grads.grad_kv.dtype == (np.float32 if wide else BF16)
    assert grads.grad_attn_sink.dtype == np.float32 and grads.grad_attn_sink.shape == (4,)


def test_reference_takes_float64():
    case = problems.attention()
    for name in ("q", "kv", "attn_sink"):
        case[name] = case[name].astype(np.float64)
    result = flashdsa.attention_forward(**case)
    assert result.out.dtype == result.lse.dtype == np.float64


def test_backends_agree():
    case = problems.attention()
    cpu = flashdsa.attention_forward(**case, backend="cpu").out.astype(float)
    reference = flashdsa.attention_forward(**case, backend="reference").out.astype(float)
    assert np.linalg.norm(cpu - reference) <= 4e-3 * np.linalg.norm(reference)


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"deterministic": True},
                                     {"invariant": True}])
def test_options_do_not_change_the_bits_of_the_host(options):
    case = problems.attention()
    assert same_bits(flashdsa.attention_forward(**case).out,
                     flashdsa.attention_forward(**case, **options).out)


def test_selection_takes_the_smaller_key_among_equals():
    rows = flashdsa.prepare_packed_metadata(np.array([0, 100], np.int32), 100)
    selection = flashdsa.indexer_topk(problems.ones(100, 2, 128), problems.ones(100, 128),
                                      problems.ones(100, 2), rows, 64, return_scores=True)
    assert selection.topk_indices[99, 0].tolist() == list(range(64))
    assert selection.topk_length.tolist() == [min(t + 1, 64) for t in range(100)]
    assert selection.topk_scores[99].tolist() == [256.0] * 64
    assert selection.topk_indices[0, 0, 1] == -1 and selection.topk_scores[0, 1] == -np.inf


def test_compact_and_sort():
    indices = np.array([[7, -1, 3, 9, 3, 2**31 - 1]], np.int32)
    result = flashdsa.compact_and_sort(indices, 9)
    assert result.indices.tolist() == [[3, 3, 7, -1, -1, -1]] and result.lengths.tolist() == [3]
    assert indices[0, 0] == 7


def test_read_only_strided_and_mapped_arrays_are_taken(tmp_path):
    case = problems.attention()
    want = flashdsa.attention_forward(**case).out
    wide = np.zeros((40, 8, 576), BF16)
    wide[::2, ::2] = case["q"]
    case["q"] = wide[::2, ::2]
    case["kv"] = np.frombuffer(case["kv"].tobytes(), BF16).reshape(case["kv"].shape)
    np.save(tmp_path / "indices.npy", case["topk_indices"])
    case["topk_indices"] = np.load(tmp_path / "indices.npy", mmap_mode="r")
    assert not case["kv"].flags.writeable and isinstance(case["topk_indices"], np.memmap)
    assert same_bits(flashdsa.attention_forward(**case).out, want)


def test_empty_problem():
    case = problems.attention()
    for name in ("q", "topk_indices", "topk_length"):
        case[name] = case[name][:0]
    result = flashdsa.attention_forward(**case)
    assert result.out.shape == (0, 4, 512) and result.lse.shape == (0, 4)
    grads = flashdsa.attention_backward(**case, out=result.out, lse=result.lse, grad_out=result.out)
    assert not grads.grad_kv.any() and grads.grad_kv.shape == (24, 1, 576)


def test_results_outlive_everything_else():
    starts = flashdsa.prepare_packed_metadata(np.array([0, 3, 9], np.int32), 9).starts
    assert starts.tolist() == [0] * 3 + [3] * 6
    starts[0] = 1  # and belong to the caller


def test_threads_of_the_caller_do_not_disturb_each_other():
    cases = [problems.attention(seed=seed) for seed in range(4)]
    want = [flashdsa.attention_forward(**case).out for case in cases]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            got = pool.map(lambda case: flashdsa.attention_forward(**case).out, cases)
            assert all(map(same_bits, got, want))


def test_info():
    backends = {status.name: status for status in flashdsa.backends()}
    assert list(backends) == ["sm90", "sm80", "cpu", "reference"]
    assert backends["cpu"].available and backends["reference"].available
    assert flashdsa.__version__.count(".") == 2 and flashdsa.build_description()
