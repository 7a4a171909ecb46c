"""Refusals: the exception's type, and the words of its sentence."""

import threading

import numpy as np
import pytest

import flashdsa
import problems
from problems import BF16


def forward(**changes):
    return flashdsa.attention_forward(**{**problems.attention(), **changes})


def topk(**changes):
    index_q, index_k, head_weights = problems.indexer()
    rows = flashdsa.prepare_packed_metadata(np.array([0, 40], np.int32), 40)
    arguments = {"index_q": index_q, "index_k": index_k, "head_weights": head_weights,
                 "packed_metadata": rows, "index_topk": 8}
    return flashdsa.indexer_topk(**{**arguments, **changes})


def prepare(cu_seqlens=np.array([0, 3, 9], np.int32), total_key_tokens=9, max_seqlen=None, **rest):
    return flashdsa.prepare_packed_metadata(cu_seqlens, total_key_tokens, max_seqlen, **rest)


class Fake:
    shape = (1, 2)


class Half:
    """Has of an array what makes it look like one."""

    def __dlpack__(self, **_):
        pytest.fail("asked for memory")


class Empty:
    """An array that hands out something else than memory."""

    shape, dtype = (20, 4), "int32"

    def __dlpack__(self, **_):
        return 3

    def __dlpack_device__(self):
        return 1, 0


Q = problems.attention()["q"]
KV = problems.attention()["kv"]
INDICES = problems.attention()["topk_indices"]

CASES = {
    # kinds of objects
    "list": (lambda: forward(q=[1.0]), TypeError,
             "attention_forward: q must be a numpy.ndarray, a torch.Tensor or another array with "
             "__dlpack__, got list"),
    "none": (lambda: forward(q=None), TypeError, "got NoneType"),
    "no array": (lambda: forward(q=Fake()), TypeError, "got test_errors.Fake"),
    "half an array": (lambda: forward(q=Half()), TypeError,
                      "another array with __dlpack__, got test_errors.Half"),
    "no memory": (lambda: flashdsa.compact_and_sort(Empty(), 3), ValueError, ""),
    "second is a list": (lambda: forward(kv=[[1.0]]), TypeError,
                         "attention_forward: kv must be a numpy.ndarray as q is, got list"),
    "second is none": (lambda: forward(kv=None), TypeError,
                       "attention_forward: kv must be a tensor, got None"),
    "optional is a number": (lambda: forward(topk_length=3), TypeError,
                             "topk_length must be a numpy.ndarray as q is, got int"),
    "masked array": (lambda: forward(topk_indices=np.ma.masked_array(INDICES)), TypeError,
                     "topk_indices must be a numpy.ndarray as q is, got numpy"),
    "metadata is a dict": (lambda: topk(packed_metadata={}), TypeError,
                           "indexer_topk: packed_metadata must be a PackedMetadata, got dict"),
    # dtypes
    "q float32": (lambda: forward(q=Q.astype(np.float32)), TypeError,
                  "attention_forward: q must be bfloat16 or float64 [T_q, H, D]"),
    "q uint16": (lambda: forward(q=Q.view(np.uint16)), TypeError, "got uint16 [20, 4, 576]"),
    "kv float64 beside bfloat16": (lambda: forward(kv=KV.astype(np.float64)), TypeError,
                                   "kv must be bfloat16"),
    "indices int64": (lambda: forward(topk_indices=INDICES.astype(np.int64)), TypeError,
                      "attention_forward: topk_indices must be int32 [T_q, 1, K] = [20, 1, K] with "
                      "K in 1..2048, got int64 [20, 1, 8]"),
    "complex": (lambda: forward(q=np.zeros((20, 4, 576), np.complex64)), TypeError,
                "q must be a bool, an integer, a float16, bfloat16, float32 or float64, got "
                "complex64"),
    "object": (lambda: forward(q=np.zeros((20, 4, 576), object)), TypeError, "got dtype object"),
    "text": (lambda: forward(topk_length=np.zeros(20, "U4")), TypeError,
             "topk_length must be an array of numbers in native byte order, got dtype <U4"),
    "foreign byte order": (lambda: forward(topk_length=np.zeros(20, ">i4")), TypeError,
                           "got dtype >i4"),
    "long double": (lambda: forward(q=np.zeros((20, 4, 576), np.longdouble)), TypeError,
                    "at most 64 bits"),
    # shapes, strides
    "q rank": (lambda: forward(q=Q[0]), ValueError, "got bfloat16 [4, 576]"),
    "q rank 9": (lambda: forward(q=Q.reshape((1,) * 6 + Q.shape)), ValueError, "of rank 9"),
    "q scalar": (lambda: forward(q=np.array(1, BF16)), ValueError, "got bfloat16 []"),
    "heads": (lambda: forward(q=np.broadcast_to(np.zeros(576, BF16), (2**40, 129, 576))),
              ValueError, "H in 1..128"),
    "head dim": (lambda: forward(q=Q[:, :, :575]), ValueError, "D 512 or 576"),
    "dims differ": (lambda: forward(kv=KV[:, :, :512]), ValueError,
                    "attention_forward: kv must be bfloat16 [T_k, 1, D] = [T_k, 1, 576]"),
    "rows differ": (lambda: forward(topk_indices=INDICES[:-1]), ValueError,
                    "topk_indices must be int32 [T_q, 1, K] = [20, 1, K]"),
    "last axis": (lambda: forward(q=np.zeros((20, 4, 1152), BF16)[:, :, ::2]), ValueError,
                  "q must be contiguous in its last axis and have no negative stride"),
    "negative stride": (lambda: forward(q=Q[::-1]), ValueError, "no negative stride"),
    "broken stride": (lambda: forward(topk_length=np.zeros(
        20, [("a", np.int32), ("b", np.int8)])["a"]), ValueError,
        "topk_length must have strides of whole elements, got (5,) bytes for dtype int32"),
    "metadata of another batch": (lambda: topk(packed_metadata=prepare()), ValueError,
                                  "indexer_topk: starts must be int32 [T_q] = [40], got int32 [9]"),
    # numbers
    "scale text": (lambda: forward(softmax_scale="1"), TypeError,
                   "softmax_scale must be a float or an int, got str"),
    "scale bool": (lambda: forward(softmax_scale=True), TypeError, "got bool"),
    "scale none": (lambda: forward(softmax_scale=None), TypeError, "got NoneType"),
    "scale nan": (lambda: forward(softmax_scale=float("nan")), TypeError,
                  "softmax_scale must be a positive finite FP32 number, got nan"),
    "scale inf": (lambda: forward(softmax_scale=float("inf")), TypeError, "got inf"),
    "scale zero": (lambda: forward(softmax_scale=0), ValueError,
                   "softmax_scale must be a positive finite FP32 number, got 0"),
    "scale too large": (lambda: forward(softmax_scale=1e39), ValueError, "got 1e+39"),
    "topk float": (lambda: topk(index_topk=8.0), TypeError,
                   "indexer_topk: index_topk must be an int, got float"),
    "topk bool": (lambda: topk(index_topk=True), TypeError, "got bool"),
    "topk zero": (lambda: topk(index_topk=0), ValueError, "index_topk must be in 1..2048, got 0"),
    "topk large": (lambda: topk(index_topk=2049), ValueError, "got 2049"),
    "key count negative": (lambda: flashdsa.compact_and_sort(INDICES[:, 0], -1), ValueError,
                           "compact_and_sort: key_count must be in 0..2147483646, got -1"),
    "key count float": (lambda: flashdsa.compact_and_sort(INDICES[:, 0], 1.0), TypeError,
                        "key_count must be an int, got float"),
    "compact rank": (lambda: flashdsa.compact_and_sort(INDICES, 5), ValueError,
                     "compact_and_sort: indices must be int32 [T, K]"),
    # metadata, where the reference module wants ValueError for total_key_tokens of any kind
    "total bool": (lambda: prepare(total_key_tokens=True), ValueError,
                   "total_key_tokens must be an int, got bool"),
    "total float": (lambda: prepare(total_key_tokens=9.0), ValueError, "got float"),
    "total zero": (lambda: prepare(total_key_tokens=0), ValueError,
                   "total_key_tokens must be in 1..2147483646, got 0"),
    "total too large": (lambda: prepare(total_key_tokens=2**31 - 1), ValueError, "got 2147483647"),
    "total beyond int64": (lambda: prepare(total_key_tokens=2**70), ValueError, "in 1..2147483646"),
    "cu_seqlens int64": (lambda: prepare(np.array([0, 9])), TypeError,
                         "prepare_packed_metadata: cu_seqlens must be int32 [N+1]"),
    "cu_seqlens strided": (lambda: prepare(np.array([0, 5, 9, 9], np.int32)[::2]), ValueError,
                           "cu_seqlens must be contiguous"),
    "cu_seqlens start": (lambda: prepare(np.array([1, 9], np.int32)), ValueError, "cu_seqlens"),
    "max_seqlen float": (lambda: prepare(max_seqlen=6.0), TypeError,
                         "max_seqlen must be an int, got float"),
    "max_seqlen bool": (lambda: prepare(max_seqlen=True), TypeError, "got bool"),
    "max_seqlen array": (lambda: prepare(max_seqlen=np.array([6])), ValueError,
                         "max_seqlen must be an int or an int32 or int64 tensor [], got int64 [1]"),
    "max_seqlen float array": (lambda: prepare(max_seqlen=np.array(6.0)), ValueError,
                               "got float64 []"),
    "max_seqlen wrong": (lambda: prepare(max_seqlen=5), ValueError, "max_seqlen"),
    "mask dtype": (lambda: prepare(padding_mask=np.zeros(9, np.uint8)), TypeError,
                   "padding_mask must be bool"),
    "query mode": (lambda: prepare(query_mode="zigzag"), ValueError,
                   "query_mode must be contiguous or general, got 'zigzag'"),
    "lenient": (lambda: prepare(lenient=1), TypeError, "lenient must be a bool, got int"),
    # options
    "backend": (lambda: forward(backend="tpu"), ValueError,
                "backend must be one of auto, reference, cpu, sm90, sm80, got 'tpu'"),
    "backend kind": (lambda: forward(backend=["cpu"]), ValueError, "backend must be one of"),
    "threads": (lambda: forward(threads=-1), ValueError,
                "threads must be in 0..2147483647, got -1"),
    "threads kind": (lambda: forward(threads=1.0), TypeError, "threads must be an int, got float"),
    "deterministic": (lambda: forward(deterministic=1), TypeError,
                      "deterministic must be a bool, got int"),
    "invariant": (lambda: forward(invariant=None), TypeError, "invariant must be a bool"),
    "check": (lambda: forward(check="1"), TypeError, "check must be a bool, got str"),
    "max logits": (lambda: forward(return_max_logits=1), TypeError, "return_max_logits"),
    # no backend
    "sm80": (lambda: forward(backend="sm80"), RuntimeError,
             "attention_forward: no backend takes this call with backend sm80"),
    "float64 on cpu": (lambda: forward(q=Q.astype(np.float64), kv=KV.astype(np.float64),
                                       attn_sink=None, backend="cpu"), RuntimeError,
                       "no backend takes this call with backend cpu"),
}


@pytest.mark.parametrize("name", CASES)
def test_refusal(name):
    call, kind, words = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_memory_that_is_not_there_is_a_runtime_error():
    rows = 2**38
    q = np.broadcast_to(np.zeros(576, BF16), (rows, 1, 576))
    indices = np.broadcast_to(np.zeros(1, np.int32), (rows, 1, 1))
    with pytest.raises((RuntimeError, ValueError), match="attention_forward|memory"):
        forward(q=q, topk_indices=indices, topk_length=None, attn_sink=None)


@pytest.mark.parametrize("bad, words", [(99, "topk_indices"), (-2, "topk_indices")])
def test_checking_names_the_row(bad, words, monkeypatch):
    indices = INDICES.copy()
    indices[7, 0, 0] = bad
    length = np.full(20, 8, np.int32)
    forward(topk_indices=indices, topk_length=length)  # by default such a slot does not count
    with pytest.raises(ValueError, match=words) as caught:
        forward(topk_indices=indices, topk_length=length, check=True)
    assert "7" in str(caught.value) and str(bad) in str(caught.value)
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    with pytest.raises(ValueError, match=words):
        forward(topk_indices=indices, topk_length=length)
    forward(topk_indices=indices, topk_length=length, check=False)


def test_check_variable_must_be_a_switch(monkeypatch):
    for text in ("", "0"):
        monkeypatch.setenv("FLASHDSA_CHECK", text)
        forward()
    monkeypatch.setenv("FLASHDSA_CHECK", "yes")
    with pytest.raises(ValueError, match="FLASHDSA_CHECK must be 0 or 1, got 'yes'"):
        forward()


def test_errors_of_threads_stay_apart():
    wrong = []

    def refuse(width):
        for _ in range(200):
            try:
                topk(index_topk=width)
                wrong.append(width)
            except ValueError as error:
                if f"got {width}" not in str(error):
                    wrong.append(str(error))

    threads = [threading.Thread(target=refuse, args=(3000 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
