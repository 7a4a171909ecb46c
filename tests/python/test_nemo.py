"""flashdsa.nemo against the reference module's contract. Where a call wants a GPU, the tests here
let host tensors pass that one check, so that all the rest is run on any machine."""

import dataclasses
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashdsa  # noqa: E402
import flashdsa.nemo as nemo  # noqa: E402
import flashdsa.nemo._kernels as kernels  # noqa: E402


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def prepare(cu_seqlens=ints(0, 3, 7, 9), total_key_tokens=12, max_seqlen=None, **changes):
    arguments = {"query_indices": torch.arange(2, 10, dtype=torch.int32),
                 "cu_seqlens_padded": ints(0, 4, 9, 12), **changes}
    return nemo.prepare_cudnn_dsa_packed_metadata(cu_seqlens, total_key_tokens, max_seqlen,
                                                  **arguments)


@pytest.fixture
def host(monkeypatch):
    """Host tensors are taken as if they lay on a GPU."""
    monkeypatch.setattr(kernels, "is_cudnn_dsa_available", lambda: True)
    monkeypatch.setattr(kernels, "_require_gpu", lambda *_: None)


def indexer_arguments(rows=12, heads=4, width=3):
    generator = torch.Generator().manual_seed(0)
    return {
        "index_q": torch.randint(-2, 3, (rows, heads, 128), generator=generator).bfloat16(),
        "index_k": torch.randint(-2, 3, (rows, 128), generator=generator).bfloat16(),
        "head_weights": torch.rand(rows, heads, generator=generator),
        "cu_seqlens": ints(0, 5, rows),
        "index_topk": width,
    }


def attention_arguments(rows=6, keys=8, heads=3, width=4):
    generator = torch.Generator().manual_seed(1)
    return {
        "q": torch.randn(rows, heads, 576, generator=generator).bfloat16(),
        "kv_latent": torch.randn(keys, 1, 576, generator=generator).bfloat16(),
        "topk_indices": torch.randint(0, keys, (rows, 1, width), generator=generator).int(),
        "softmax_scale": 0.05,
    }


SIGNATURES = {
    "prepare_cudnn_dsa_packed_metadata":
        "(cu_seqlens, total_key_tokens, max_seqlen=None, *, query_indices=None, "
        "cu_seqlens_padded=None, padding_mask=None)",
    "cudnn_indexer_topk":
        "(index_q, index_k, head_weights, cu_seqlens, index_topk, query_indices=None, "
        "cu_seqlens_padded=None, packed_metadata=None)",
    "cudnn_sparse_attention":
        "(q, kv_latent, topk_indices, softmax_scale, topk_length=None, all_rows_nonempty=False, "
        "valid_row_indices=None)",
    "is_cudnn_dsa_available": "()",
    "_unpack_packed_metadata":
        "(packed_metadata, *, total_query_tokens, total_key_tokens, device)",
    "_compact_and_sort_indices": "(indices, key_count)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_reference_module_s(name):
    signature = inspect.signature(getattr(nemo, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()]
    bare = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert str(bare) == SIGNATURES[name]


def test_public_names():
    assert sorted(nemo.__all__) == [
        "CudnnDsaPackedMetadata", "cudnn_indexer_topk", "cudnn_sparse_attention",
        "is_cudnn_dsa_available", "prepare_cudnn_dsa_packed_metadata"]


# Metadata.


def test_metadata_of_the_worked_example():
    rows = prepare()
    assert [field.name for field in dataclasses.fields(rows)] == [
        "starts", "causal_lengths", "query_valid", "valid_row_indices", "segment_cu_q",
        "segment_cu_k", "q_causal_offsets", "key_source_indices", "max_seqlen_q", "max_seqlen_k",
        "total_key_tokens", "all_rows_nonempty"]
    want = {
        "starts": [0, 0, 4, 4, 4, 4, 4, 9],
        "causal_lengths": [3, 0, 1, 2, 3, 4, 0, 1],
        "query_valid": [True, False, True, True, True, True, False, True],
        "valid_row_indices": [0, 2, 3, 4, 5, 7],
        "segment_cu_q": [0, 2, 7, 8],
        "segment_cu_k": [0, 4, 9, 10],
        "q_causal_offsets": [2, 0, 0],
        "key_source_indices": list(range(10)),
    }
    dtypes = {"query_valid": torch.bool, "valid_row_indices": torch.int64,
              "key_source_indices": torch.int64}
    for name, values in want.items():
        field = getattr(rows, name)
        assert field.tolist() == values and field.dtype == dtypes.get(name, torch.int32), name
    assert (rows.max_seqlen_q, rows.max_seqlen_k, rows.total_key_tokens) == (5, 5, 12)
    assert rows.all_rows_nonempty is False


def test_metadata_of_all_rows():
    rows = nemo.prepare_cudnn_dsa_packed_metadata(ints(0, 3, 8), 8)
    assert rows.valid_row_indices is None and rows.key_source_indices is None
    assert rows.all_rows_nonempty is True
    assert rows.causal_lengths.tolist() == [1, 2, 3, 1, 2, 3, 4, 5]


def test_padding_mask_outranks_cu_seqlens():
    mask = torch.tensor([False] * 5 + [True] * 3)
    rows = nemo.prepare_cudnn_dsa_packed_metadata(ints(0, 3, 8), 8, padding_mask=mask)
    assert rows.causal_lengths.tolist() == [1, 2, 3, 1, 2, 0, 0, 0]
    assert rows.valid_row_indices.tolist() == [0, 1, 2, 3, 4]
    assert rows.all_rows_nonempty is False


def test_metadata_is_frozen_and_replaceable():
    rows = prepare()
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.total_key_tokens = 3
    assert dataclasses.replace(rows, total_key_tokens=3).total_key_tokens == 3


@pytest.mark.parametrize("max_seqlen", [4, torch.tensor(4), torch.tensor([4]), ints(4)])
def test_max_seqlen_is_taken(max_seqlen):
    assert prepare(max_seqlen=max_seqlen).max_seqlen_k == 5  # of the padded prefixes


def strided(*values):
    return torch.stack((ints(*values), ints(*values)), 1)[:, 0]


BUILD_ERRORS = {
    "total bool": (dict(total_key_tokens=True), ValueError, "total_key_tokens"),
    "total float": (dict(total_key_tokens=12.0), ValueError, "total_key_tokens"),
    "total none": (dict(total_key_tokens=None), ValueError, "total_key_tokens"),
    "total zero": (dict(total_key_tokens=0), ValueError, "total_key_tokens"),
    "total negative": (dict(total_key_tokens=-12), ValueError, "total_key_tokens"),
    "total large": (dict(total_key_tokens=2**31 - 1), ValueError, "total_key_tokens"),
    "cu_seqlens list": (dict(cu_seqlens=[0, 9]), TypeError, "cu_seqlens must be a torch.Tensor"),
    "cu_seqlens array": (dict(cu_seqlens=np.array([0, 9], np.int32)), TypeError, "cu_seqlens"),
    "cu_seqlens rank": (dict(cu_seqlens=torch.zeros(2, 2, dtype=torch.int32)), ValueError,
                        "cu_seqlens"),
    "cu_seqlens scalar": (dict(cu_seqlens=torch.tensor(0, dtype=torch.int32)), ValueError,
                          "cu_seqlens"),
    "cu_seqlens one": (dict(cu_seqlens=ints(0)), ValueError, "cu_seqlens"),
    "cu_seqlens stride": (dict(cu_seqlens=strided(0, 3, 7, 9)), ValueError, "contiguous"),
    "cu_seqlens int64": (dict(cu_seqlens=torch.tensor([0, 3, 7, 9])), TypeError, "int64"),
    "padded int64": (dict(cu_seqlens_padded=torch.tensor([0, 4, 9, 12])), TypeError,
                     "cu_seqlens_padded"),
    "padded shape": (dict(cu_seqlens_padded=ints(0, 12)), ValueError, "cu_seqlens_padded"),
    "padded device": (dict(cu_seqlens_padded=ints(0, 4, 9, 12).to("meta")), ValueError,
                      "cu_seqlens_padded"),
    "padded stride": (dict(cu_seqlens_padded=strided(0, 4, 9, 12)), ValueError, "contiguous"),
    "queries empty": (dict(query_indices=ints()), ValueError, "query_indices"),
    "queries rank": (dict(query_indices=ints(2, 3)[None]), ValueError, "query_indices"),
    "queries float": (dict(query_indices=torch.arange(2.0, 10.0)), TypeError, "query_indices"),
    "queries int16": (dict(query_indices=torch.arange(2, 10).short()), TypeError, "query_indices"),
    "queries device": (dict(query_indices=ints(2, 3).to("meta")), ValueError, "query_indices"),
    "queries stride": (dict(query_indices=strided(2, 3)), ValueError, "contiguous"),
    "mask dtype": (dict(padding_mask=torch.zeros(8, dtype=torch.uint8)), ValueError,
                   "padding_mask must be bool"),
    "mask shape": (dict(padding_mask=torch.zeros(7, dtype=torch.bool)), ValueError,
                   "padding_mask"),
    "mask rank": (dict(padding_mask=torch.zeros(8, 1, dtype=torch.bool)), ValueError,
                  "padding_mask"),
    "mask device": (dict(padding_mask=torch.zeros(8, dtype=torch.bool, device="meta")), ValueError,
                    "padding_mask"),
    "mask stride": (dict(padding_mask=torch.zeros(16, dtype=torch.bool)[::2]), ValueError,
                    "contiguous"),
    "max float": (dict(max_seqlen=4.0), TypeError, "max_seqlen"),
    "max bool": (dict(max_seqlen=True), TypeError, "max_seqlen"),
    "max text": (dict(max_seqlen="4"), TypeError, "max_seqlen"),
    "max two": (dict(max_seqlen=ints(4, 4)), ValueError, "max_seqlen"),
    "max none of it": (dict(max_seqlen=ints()), ValueError, "max_seqlen"),
    "max float tensor": (dict(max_seqlen=torch.tensor(4.0)), ValueError, "max_seqlen"),
    "max wrong": (dict(max_seqlen=5), ValueError, "max_seqlen"),
    "max tensor wrong": (dict(max_seqlen=torch.tensor(3)), ValueError, "max_seqlen"),
    "cu_seqlens start": (dict(cu_seqlens=ints(1, 3, 7, 9)), ValueError, "cu_seqlens"),
    "cu_seqlens flat": (dict(cu_seqlens=ints(0, 3, 3, 9)), ValueError, "cu_seqlens"),
    "cu_seqlens falling": (dict(cu_seqlens=ints(0, 5, 3, 9)), ValueError, "cu_seqlens"),
    "padded start": (dict(cu_seqlens_padded=ints(1, 4, 9, 12)), ValueError, "cu_seqlens_padded"),
    "padded end": (dict(cu_seqlens_padded=ints(0, 4, 9, 11)), ValueError, "total_key_tokens"),
    "padded flat": (dict(cu_seqlens_padded=ints(0, 9, 9, 12)), ValueError, "cu_seqlens_padded"),
    "padded below real": (dict(cu_seqlens_padded=ints(0, 2, 9, 12)), ValueError,
                          "cu_seqlens_padded"),
    "queries negative": (dict(query_indices=ints(-1, 0)), ValueError, "query_indices"),
    "queries beyond": (dict(query_indices=ints(11, 12)), ValueError, "query_indices"),
    "queries gap": (dict(query_indices=ints(2, 4)), ValueError, "query_indices"),
    "queries falling": (dict(query_indices=ints(3, 2)), ValueError, "query_indices"),
    "queries twice": (dict(query_indices=ints(3, 3)), ValueError, "query_indices"),
}


@pytest.mark.parametrize("name", BUILD_ERRORS)
def test_build_refuses(name):
    changes, kind, words = BUILD_ERRORS[name]
    with pytest.raises(kind, match=words) as caught:
        prepare(**changes)
    assert type(caught.value) is kind


def unpack(rows, queries=8, keys=12, device="cpu"):
    return nemo._unpack_packed_metadata(rows, total_query_tokens=queries, total_key_tokens=keys,
                                        device=torch.device(device))


def test_unpack_returns_the_object():
    rows = prepare()
    assert unpack(rows) is rows
    whole = nemo.prepare_cudnn_dsa_packed_metadata(ints(0, 4), 4)
    assert unpack(whole, 4, 4) is whole


UNPACK_ERRORS = {
    "starts shape": dict(starts=ints(0)),
    "starts dtype": dict(starts=torch.zeros(8, dtype=torch.int64)),
    "starts none": dict(starts=None),
    "causal_lengths stride": dict(causal_lengths=strided(*range(8))),
    "causal_lengths rank": dict(causal_lengths=torch.zeros(8, 1, dtype=torch.int32)),
    "query_valid dtype": dict(query_valid=torch.zeros(8, dtype=torch.uint8)),
    "query_valid shape": dict(query_valid=torch.zeros(7, dtype=torch.bool)),
    "valid_row_indices none": dict(valid_row_indices=None),
    "valid_row_indices dtype": dict(valid_row_indices=ints(0, 2)),
    "valid_row_indices rank": dict(valid_row_indices=torch.zeros(2, 1, dtype=torch.int64)),
    "valid_row_indices stride": dict(valid_row_indices=torch.arange(6)[::2]),
    "valid_row_indices beside nonempty": dict(all_rows_nonempty=True),
    "segment_cu_q dtype": dict(segment_cu_q=torch.tensor([0, 2, 7, 8])),
    "segment_cu_q short": dict(segment_cu_q=ints(0)),
    "segment_cu_q rank": dict(segment_cu_q=ints(0, 2, 7, 8)[None]),
    "segment_cu_k shape": dict(segment_cu_k=ints(0, 4, 9)),
    "segment_cu_k stride": dict(segment_cu_k=strided(0, 4, 9, 10)),
    "q_causal_offsets shape": dict(q_causal_offsets=ints(2, 0)),
    "q_causal_offsets dtype": dict(q_causal_offsets=torch.tensor([2, 0, 0])),
    "key_source_indices dtype": dict(key_source_indices=ints(*range(10))),
    "key_source_indices rank": dict(key_source_indices=torch.arange(10)[None]),
    "key_source_indices stride": dict(key_source_indices=torch.arange(20)[::2]),
    "max_seqlen_q zero": dict(max_seqlen_q=0),
    "max_seqlen_k negative": dict(max_seqlen_k=-1),
    "max_seqlen_k float": dict(max_seqlen_k=5.0),
    "total_key_tokens other": dict(total_key_tokens=11),
}


@pytest.mark.parametrize("name", UNPACK_ERRORS)
def test_unpack_names_the_field(name):
    rows = dataclasses.replace(prepare(), **UNPACK_ERRORS[name])
    with pytest.raises(ValueError, match=f"packed {name.split()[0]} must"):
        unpack(rows)


def test_unpack_has_the_words_that_the_reference_test_wants():
    rows = dataclasses.replace(prepare(), q_causal_offsets=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(ValueError, match="q_causal_offsets must be contiguous int32"):
        unpack(rows)


def test_unpack_of_other_sizes_and_devices():
    with pytest.raises(ValueError, match="packed starts"):
        unpack(prepare(), queries=9)
    with pytest.raises(ValueError, match="total_key_tokens must be 13, got 12"):
        unpack(prepare(), keys=13)
    with pytest.raises(ValueError, match="packed starts must be .* on meta"):
        unpack(prepare(), device="meta")


@pytest.mark.parametrize("rows", [None, (1, 2), flashdsa.prepare_packed_metadata(ints(0, 4), 4)])
def test_unpack_of_another_type(rows):
    with pytest.raises(TypeError, match="packed_metadata must be a CudnnDsaPackedMetadata"):
        unpack(rows)


@pytest.mark.parametrize("flag", [0, 1, None, torch.tensor(True)])
def test_unpack_wants_a_bool(flag):
    with pytest.raises(TypeError, match="all_rows_nonempty must be a bool"):
        unpack(dataclasses.replace(prepare(), all_rows_nonempty=flag))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compact_and_sort(dtype):
    indices = torch.tensor([[7, -1, 3, 9, 3], [-5, 8, 100, -1, 0], [9, 9, 9, 9, 9]], dtype=dtype)
    if dtype == torch.int64:
        indices[1, 2], indices[1, 0] = 2**32 + 1, -2**32
    sorted_indices, lengths = nemo._compact_and_sort_indices(indices, 9)
    assert sorted_indices.tolist() == [[3, 3, 7, -1, -1], [0, 8, -1, -1, -1], [-1] * 5]
    assert lengths.tolist() == [3, 2, 0]
    assert sorted_indices.dtype == lengths.dtype == torch.int32


# The two kernel calls.


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_nothing_is_available_without_a_device():
    assert nemo.is_cudnn_dsa_available() is False
    with pytest.raises(RuntimeError, match="cudnn_indexer_topk: expected a GPU"):
        nemo.cudnn_indexer_topk(*[torch.empty(0)] * 4, index_topk=1)
    with pytest.raises(RuntimeError, match="cudnn_sparse_attention: expected a GPU"):
        nemo.cudnn_sparse_attention(**attention_arguments())


def test_host_tensors_are_a_runtime_error(monkeypatch):
    monkeypatch.setattr(kernels, "is_cudnn_dsa_available", lambda: True)
    with pytest.raises(RuntimeError, match="index_q must be on a CUDA device, got cpu"):
        nemo.cudnn_indexer_topk(**indexer_arguments())
    with pytest.raises(RuntimeError, match="q must be on a CUDA device, got cpu"):
        nemo.cudnn_sparse_attention(**attention_arguments())


def dense_selection(index_q, index_k, head_weights, cu_seqlens, index_topk):
    """Exact for these integers and weights of BF16; a stable sort keeps the smaller key first."""
    scores = torch.einsum("thd,sd->ths", index_q.double(), index_k.double()).relu()
    scores = torch.einsum("th,ths->ts", head_weights.bfloat16().double(), scores)
    result = torch.full((index_q.shape[0], 1, index_topk), -1, dtype=torch.int32)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        for row in range(start, end):
            order = scores[row, start:row + 1].sort(descending=True, stable=True).indices
            best = order[:index_topk].sort().values + start
            result[row, 0, :len(best)] = best.int()
    return result


@pytest.mark.parametrize("with_metadata", [False, True])
def test_indexer_selects(host, with_metadata):
    case = indexer_arguments(rows=40)
    want = dense_selection(**case)
    if with_metadata:
        case["packed_metadata"] = nemo.prepare_cudnn_dsa_packed_metadata(case["cu_seqlens"], 40)
    got = nemo.cudnn_indexer_topk(**case)
    assert got.dtype == torch.int32 and got.is_contiguous() and torch.equal(got, want)


def test_indexer_rounds_weights_first(host):
    # 1 + 2^-9 and 1 are one number in BF16, so that the smaller key wins the tie.
    index_q = torch.zeros(3, 2, 128).bfloat16()
    index_q[:, 0, 0] = index_q[:, 1, 1] = 1
    index_k = torch.zeros(3, 128).bfloat16()
    index_k[0, 0] = index_k[1, 1] = 1
    weights = torch.tensor([1.0, 1 + 2**-9]).repeat(3, 1)
    rows = nemo.prepare_cudnn_dsa_packed_metadata(ints(0, 3), 3)
    unrounded = flashdsa.indexer_topk(index_q, index_k, weights, rows, 1)
    assert unrounded.topk_indices[2].tolist() == [[1]]
    got = nemo.cudnn_indexer_topk(index_q, index_k, weights, ints(0, 3), 1)
    assert got[2].tolist() == [[0]]
    same = nemo.cudnn_indexer_topk(index_q, index_k, weights.bfloat16(), ints(0, 3), 1)
    assert torch.equal(got, same)


def test_indexer_of_a_shard_with_padding(host):
    rows = indexer_arguments(rows=8, width=2)
    keys = indexer_arguments(rows=12)["index_k"]
    case = {**rows, "index_k": keys, "cu_seqlens": ints(0, 3, 7, 9)}
    layout = {"query_indices": torch.arange(2, 10), "cu_seqlens_padded": ints(0, 4, 9, 12)}
    got = nemo.cudnn_indexer_topk(**case, **layout)
    meta = prepare()
    assert torch.equal(got, nemo.cudnn_indexer_topk(**case, packed_metadata=meta))
    for row in range(8):
        start, length = int(meta.starts[row]), int(meta.causal_lengths[row])
        picked = [key for key in got[row, 0].tolist() if key >= 0]
        assert len(picked) == min(2, length)
        assert all(start <= key < start + length for key in picked)


def test_indexer_honours_a_replaced_query_valid(host):
    case = indexer_arguments()
    meta = nemo.prepare_cudnn_dsa_packed_metadata(case["cu_seqlens"], 12)
    valid = torch.ones(12, dtype=torch.bool)
    valid[3] = False
    meta = dataclasses.replace(meta, query_valid=valid, all_rows_nonempty=False,
                               valid_row_indices=valid.nonzero()[:, 0])
    got = nemo.cudnn_indexer_topk(**case, packed_metadata=meta)
    assert (got[3] == -1).all() and (got[4] >= 0).any()


def test_indexer_takes_any_strides(host):
    case = indexer_arguments()
    want = nemo.cudnn_indexer_topk(**case)
    for name in ("index_q", "index_k", "head_weights"):
        spread = torch.zeros(*case[name].shape, 2, dtype=case[name].dtype)
        spread[..., 0] = case[name]
        assert torch.equal(nemo.cudnn_indexer_topk(**{**case, name: spread[..., 0]}), want), name


def test_metadata_is_not_built_again(host, monkeypatch):
    case = indexer_arguments()
    meta = nemo.prepare_cudnn_dsa_packed_metadata(case["cu_seqlens"], 12)
    monkeypatch.setattr(kernels, "prepare_cudnn_dsa_packed_metadata",
                        lambda *_, **__: pytest.fail("built"))
    nemo.cudnn_indexer_topk(**case, packed_metadata=meta)


INDEX = indexer_arguments()
INDEXER_ERRORS = {
    "topk float": (dict(index_topk=3.0), TypeError, "index_topk must be an int"),
    "topk bool": (dict(index_topk=True), TypeError, "index_topk must be an int"),
    "topk none": (dict(index_topk=None), TypeError, "index_topk must be an int"),
    "topk zero": (dict(index_topk=0), ValueError, "index_topk must be in 1..2048"),
    "topk large": (dict(index_topk=2049), ValueError, "index_topk must be in 1..2048"),
    "q float32": (dict(index_q=INDEX["index_q"].float()), TypeError, "index_q must be bfloat16"),
    "q float64": (dict(index_q=INDEX["index_q"].double()), TypeError, "index_q must be bfloat16"),
    "k float16": (dict(index_k=INDEX["index_k"].half()), TypeError, "index_k must be bfloat16"),
    "weights float16": (dict(head_weights=INDEX["head_weights"].half()), TypeError,
                        "head_weights must be float32 or bfloat16"),
    "q array": (dict(index_q=np.zeros(3)), TypeError, "index_q must be a torch.Tensor"),
    "q rank": (dict(index_q=INDEX["index_q"][0]), ValueError, "index_q must be"),
    "q dim": (dict(index_q=INDEX["index_q"][:, :, :64]), ValueError, "index_q must be"),
    "k rank": (dict(index_k=INDEX["index_k"][:, None]), ValueError, "index_k"),
    "k dim": (dict(index_k=INDEX["index_k"][:, :64]), ValueError, "index_k must be"),
    "weights shape": (dict(head_weights=INDEX["head_weights"][:, :3]), ValueError, "head_weights"),
    "weights rank": (dict(head_weights=INDEX["head_weights"][0]), ValueError, "head_weights"),
    "heads": (dict(index_q=torch.zeros(12, 65, 128).bfloat16(), head_weights=torch.zeros(12, 65)),
              ValueError, "H_index in 1..64"),
    "keys": (dict(index_k=torch.zeros(1, 128).bfloat16().expand(2**31 - 1, 128)), ValueError,
             "total_key_tokens|index_k"),
    "rows": (dict(query_indices=ints(3, 4)), ValueError, "T_q"),
    "metadata": (dict(packed_metadata=(1, 2)), TypeError, "packed_metadata must be"),
    "cu_seqlens": (dict(cu_seqlens=ints(1, 12)), ValueError, "cu_seqlens"),
}


@pytest.mark.parametrize("name", INDEXER_ERRORS)
def test_indexer_refuses(host, name):
    changes, kind, words = INDEXER_ERRORS[name]
    with pytest.raises(kind, match=words) as caught:
        nemo.cudnn_indexer_topk(**{**INDEX, **changes})
    assert type(caught.value) is kind


def oracle(q, kv_latent, topk_indices, softmax_scale, topk_length=None):
    q, keys = q.double(), kv_latent.double()[topk_indices[:, 0].clamp(min=0).long(), 0]
    logits = softmax_scale * torch.einsum("thd,tkd->thk", q, keys)
    hole = topk_indices < 0
    if topk_length is not None:
        hole = hole | (torch.arange(hole.shape[2]) >= topk_length[:, None, None])
    weights = logits.masked_fill(hole, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("thk,tkd->thd", weights, keys[:, :, :512])


def gradients(function, q, kv_latent, *rest, grad_out, **named):
    q, kv_latent = q.clone().requires_grad_(), kv_latent.clone().requires_grad_()
    out = function(q, kv_latent, *rest, **named)
    out.backward(grad_out.to(out.dtype))
    return out.detach(), q.grad, kv_latent.grad


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dim", [576, 512])
def test_attention_and_its_gradients(host, dim):
    case = attention_arguments(rows=20, keys=24, width=8)
    case["q"], case["kv_latent"] = case["q"][..., :dim], case["kv_latent"][..., :dim]
    grad_out = torch.randn(20, 3, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = gradients(nemo.cudnn_sparse_attention, *case.values(), grad_out=grad_out)
    want = gradients(oracle, case["q"].double(), case["kv_latent"].double(),
                     *list(case.values())[2:], grad_out=grad_out)
    for name, bound, a, b in zip(("out", "grad_q", "grad_kv"), (4e-3, 1e-2, 1e-2), got, want):
        assert a.dtype == torch.bfloat16 and a.shape == b.shape
        assert relative(a, b) <= bound, name


def check_empty_rows_change_nothing_else(place=lambda tensor: tensor, seed=3):
    """The call with an empty row and the call without it, all tensors brought to `place`."""
    *tensors, scale = attention_arguments(rows=4, keys=8, heads=64).values()
    q, kv, indices = map(place, tensors)
    lengths, valid = place(ints(1, 0, 2, 3)), place(torch.tensor([0, 2, 3]))
    grad_out = torch.randn(4, 64, 512, generator=torch.Generator().manual_seed(seed))
    grad_out = place(grad_out.bfloat16())
    padded = gradients(nemo.cudnn_sparse_attention, q, kv, indices, scale, lengths, False, valid,
                       grad_out=grad_out)
    compact = gradients(nemo.cudnn_sparse_attention, q[valid], kv, indices[valid], scale,
                        lengths[valid], True, grad_out=grad_out[valid])
    assert torch.equal(padded[0][valid], compact[0]) and not padded[0][1].any()
    assert torch.equal(padded[1][valid], compact[1]) and not padded[1][1].any()
    assert torch.equal(padded[2], compact[2])


def test_empty_rows_change_nothing_else(host):
    check_empty_rows_change_nothing_else()


def test_only_empty_rows(host):
    case = attention_arguments(rows=2)
    out, *grads = gradients(nemo.cudnn_sparse_attention, *case.values(), ints(0, 0), False,
                            torch.empty(0, dtype=torch.int64),
                            grad_out=torch.ones(2, 3, 512).bfloat16())
    assert not out.any() and not any(grad.any() for grad in grads)


@pytest.mark.parametrize("switch, rows, want", [(True, 100, True), (False, 100, False),
                                                (False, 64, True)])
def test_attention_follows_pytorch_s_switch(host, monkeypatch, switch, rows, want):
    modes = []

    def spy(*arguments, deterministic, **named):
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        modes.append(deterministic)

    monkeypatch.setattr(kernels, "sparse_attention", spy)
    torch.use_deterministic_algorithms(switch)
    try:
        nemo.cudnn_sparse_attention(**attention_arguments(rows=rows))
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes == [want]


def test_attention_is_compiled_without_a_graph_break(host):
    case = attention_arguments(rows=20, keys=24, width=8)

    def layer(q, *rest):
        return nemo.cudnn_sparse_attention(q * 2, *rest) + 1

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*case.values())
    assert torch.equal(got, layer(*case.values()))


ATTEND = attention_arguments()
LENGTHS = torch.full((6,), 4, dtype=torch.int32)
ATTENTION_ERRORS = {
    "q float32": (dict(q=ATTEND["q"].float()), TypeError, "q must be bfloat16"),
    "q float64": (dict(q=ATTEND["q"].double()), TypeError, "q must be bfloat16"),
    "kv float16": (dict(kv_latent=ATTEND["kv_latent"].half()), TypeError,
                   "kv_latent must be bfloat16"),
    "indices int64": (dict(topk_indices=ATTEND["topk_indices"].long()), TypeError,
                      "topk_indices must be int32"),
    "q list": (dict(q=[1.0]), TypeError, "q must be a torch.Tensor"),
    "scale text": (dict(softmax_scale="1"), TypeError, "softmax_scale"),
    "scale tensor": (dict(softmax_scale=torch.tensor(1.0)), TypeError, "softmax_scale"),
    "scale none": (dict(softmax_scale=None), TypeError, "softmax_scale"),
    "scale nan": (dict(softmax_scale=float("nan")), TypeError, "softmax_scale"),
    "scale inf": (dict(softmax_scale=float("inf")), TypeError, "softmax_scale"),
    "scale zero": (dict(softmax_scale=0.0), ValueError, "softmax_scale"),
    "scale negative": (dict(softmax_scale=-1), ValueError, "softmax_scale"),
    "nonempty int": (dict(all_rows_nonempty=1), TypeError, "all_rows_nonempty must be a bool"),
    "q rank": (dict(q=ATTEND["q"][0]), ValueError, "q must be"),
    "q dim": (dict(q=ATTEND["q"][..., :575]), ValueError, "q must be"),
    "kv rank": (dict(kv_latent=ATTEND["kv_latent"][:, 0]), ValueError, "kv must be"),
    "kv dim": (dict(kv_latent=ATTEND["kv_latent"][..., :512]), ValueError, "kv must be"),
    "kv heads": (dict(kv_latent=ATTEND["kv_latent"].expand(-1, 2, -1)), ValueError, "kv must be"),
    "keys": (dict(kv_latent=ATTEND["kv_latent"][:1].expand(2**31 - 1, 1, 576)), ValueError,
             "kv must be"),
    "indices rows": (dict(topk_indices=ATTEND["topk_indices"][:5]), ValueError, "topk_indices"),
    "indices rank": (dict(topk_indices=ATTEND["topk_indices"][:, 0]), ValueError, "topk_indices"),
    "K zero": (dict(topk_indices=ATTEND["topk_indices"][..., :0]), ValueError, "K in 1..2048"),
    "K large": (dict(topk_indices=torch.zeros(6, 1, 2049, dtype=torch.int32)), ValueError,
                "K in 1..2048"),
    "length dtype": (dict(topk_length=LENGTHS.long()), ValueError, "topk_length"),
    "length shape": (dict(topk_length=LENGTHS[:5]), ValueError, "topk_length"),
    "length rank": (dict(topk_length=LENGTHS[None]), ValueError, "topk_length"),
    "length stride": (dict(topk_length=LENGTHS.repeat(2)[::2]), ValueError, "topk_length"),
    "length device": (dict(topk_length=LENGTHS.to("meta")), ValueError, "topk_length"),
    "length list": (dict(topk_length=[4] * 6), TypeError, "topk_length must be a torch.Tensor"),
    "rows beside nonempty": (dict(topk_length=LENGTHS, all_rows_nonempty=True,
                                  valid_row_indices=torch.arange(6)), ValueError,
                             "valid_row_indices must be None"),
    "rows without length": (dict(valid_row_indices=torch.arange(6)), ValueError, "topk_length"),
    "rows dtype": (dict(topk_length=LENGTHS, valid_row_indices=ints(0)), ValueError,
                   "valid_row_indices"),
    "rows rank": (dict(topk_length=LENGTHS, valid_row_indices=torch.arange(6)[None]), ValueError,
                  "valid_row_indices"),
    "rows stride": (dict(topk_length=LENGTHS, valid_row_indices=torch.arange(6)[::2]), ValueError,
                    "valid_row_indices"),
    "rows device": (dict(topk_length=LENGTHS, valid_row_indices=torch.arange(6).to("meta")),
                    ValueError, "valid_row_indices"),
    "rows too many": (dict(topk_length=LENGTHS, valid_row_indices=torch.arange(7)), ValueError,
                      "at most T_q = 6"),
}


@pytest.mark.parametrize("name", ATTENTION_ERRORS)
def test_attention_refuses(host, name):
    changes, kind, words = ATTENTION_ERRORS[name]
    with pytest.raises(kind, match=words) as caught:
        nemo.cudnn_sparse_attention(**{**ATTEND, **changes})
    assert type(caught.value) is kind
