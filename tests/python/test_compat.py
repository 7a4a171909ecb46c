"""flashdsa.compat: the conventions of FlashMLA and cuDNN Frontend, on host tensors."""

import functools
import inspect
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

import flashdsa  # noqa: E402
import flashdsa.compat as compat  # noqa: E402
import flashdsa.compat._cudnn_dsa as cudnn_dsa_module  # noqa: E402
import flashdsa.compat._dense_scores as dense_scores_module  # noqa: E402
import flashdsa.compat._dense_topk as dense_topk_module  # noqa: E402

INF, NAN = math.inf, math.nan


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def generator(seed):
    return torch.Generator().manual_seed(seed)


SIGNATURES = {
    "flash_mla_sparse_fwd": "q kv indices sm_scale d_v=512 attn_sink=None topk_length=None",
    "indexer_forward_wrapper":
        "q k w ratio=4 qhead_per_kv_head=None m_block_size=128 n_block_size=128 q_stage=2 "
        "kv_stage=4 sm_scale=1.0 out=None stream=None cu_seqlens_q=None cu_seqlens_k=None "
        "max_seqlen_q=None max_seqlen_k=None q_causal_offsets=None precision=bf16",
    "indexer_top_k_wrapper":
        "input_values seq_lens top_k next_n=1 return_val=True num_copy_bits=256 stream=None "
        "tie_break=0",
    "sparse_attention_backward_wrapper":
        "q kv out dout lse attn_sink topk_idxs softmax_scale=None topk_length=None dq=None "
        "dkv=None block_tile=64 stream=None",
    "compactify_wrapper": "indices stream=None",
    "local_to_global_wrapper":
        "local_indices seqlen_k cu_seqlens_q=None cu_seqlens_k=None stream=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_begins_as_the_original(name):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    shown = [parameter.name if parameter.default is parameter.empty
             else f"{parameter.name}={parameter.default}" for parameter in parameters]
    want = SIGNATURES[name].split()
    assert shown[:len(want)] == want
    assert all(parameter.default is not parameter.empty
               for parameter in list(parameters)[len(want):])


def test_results_are_dicts_that_unpack():
    result = compat.compactify_wrapper(ints(-1, 4)[None])
    indices, topk_length = result
    assert isinstance(result, dict) and list(result.keys()) == ["indices", "topk_length"]
    assert result["indices"] is result.indices is result[0] is indices
    assert result["topk_length"] is result[1] is topk_length
    assert {**result} == dict(result.items()) and "indices" in result and len(result) == 2
    with pytest.raises(AttributeError, match="no 'scores'"):
        result.scores
    with pytest.raises(KeyError):
        result["scores"]
    with pytest.raises(IndexError):
        result[2]


# FlashMLA.


def attention(rows=20, keys=24, heads=4, dim=576, width=8, seed=0):
    """q, kv, indices, sm_scale, attn_sink, topk_length. A hole, a key that does not exist and one
    that stands twice in every row; the first rows have no keys, the others three different ones at
    least, so that no gradient cancels to nothing."""
    make = functools.partial(torch.randn, generator=generator(seed))
    indices = torch.rand(rows, keys, generator=generator(seed)).topk(width).indices.int()[:, None]
    indices[..., 1], indices[..., 5], indices[..., 6] = -1, keys, indices[..., 0]
    length = torch.randint(4, width + 1, (rows,), generator=generator(seed)).int()
    indices[0], length[1] = -1, 0
    return (make(rows, heads, dim).bfloat16(), make(keys, 1, dim).bfloat16(), indices, 0.05,
            make(heads), length)


def dense_forward(q, kv, indices, sm_scale, attn_sink=None, topk_length=None):
    """FlashMLA's definition in float64: output, max_logits, lse."""
    q, kv = q.double(), kv.double()[:, 0]
    hole = (indices[:, 0] < 0) | (indices[:, 0] >= len(kv))
    if topk_length is not None:
        hole = hole | (torch.arange(hole.shape[1]) >= topk_length[:, None])
    keys = kv[indices[:, 0].masked_fill(hole, 0).long()]
    logits = sm_scale * torch.einsum("thd,tkd->thk", q, keys)
    logits = logits.masked_fill(hole[:, None], -INF)
    lse = logits.logsumexp(-1)
    out = torch.einsum("thk,tkd->thd", (logits - lse[..., None]).exp().nan_to_num(0.0),
                       keys[..., :512])
    if attn_sink is not None:
        out = out * torch.sigmoid(lse - attn_sink.double())[..., None]
    lonely = lse == -INF
    return out.masked_fill(lonely[..., None], 0), logits.amax(-1), lse.masked_fill(lonely, INF)


def assert_vectors(got, want, bound):
    """Relative error over the whole tensor, and of every vector within four times of it."""
    error, scale = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    assert error.norm() <= bound * scale.norm()
    assert (error <= 4 * bound * scale).all()


@pytest.mark.parametrize("dim", [576, 512])
@pytest.mark.parametrize("with_sink, with_length", list(itertools.product([False, True], repeat=2)))
def test_flash_mla_forward(dim, with_sink, with_length):
    q, kv, indices, sm_scale, sink, length = attention(dim=dim)
    options = {"attn_sink": sink if with_sink else None,
               "topk_length": length if with_length else None}
    out, max_logits, lse = compat.flash_mla_sparse_fwd(q, kv, indices, sm_scale, 512, **options)
    want_out, want_max, want_lse = dense_forward(q, kv, indices, sm_scale, **options)
    assert (out.dtype, max_logits.dtype, lse.dtype) == (torch.bfloat16, torch.float32,
                                                        torch.float32)
    assert_vectors(out, want_out, 4e-3)
    torch.testing.assert_close(max_logits.double(), want_max, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-5)
    empty = [0, 1] if with_length else [0]
    assert not out[empty].any()
    assert (lse[empty] == INF).all() and (max_logits[empty] == -INF).all()


def test_flash_mla_sinks_without_end():
    q, kv, indices, sm_scale, *_ = attention()
    sink = torch.tensor([INF, -INF, 0.0, 1e30])
    out, _, lse = compat.flash_mla_sparse_fwd(q, kv, indices, sm_scale, attn_sink=sink)
    plain, _, plain_lse = compat.flash_mla_sparse_fwd(q, kv, indices, sm_scale)
    assert not out[:, [0, 3]].any() and torch.equal(out[:, 1], plain[:, 1])
    assert torch.equal(lse, plain_lse)


def test_flash_mla_takes_what_requires_grad_and_any_strides():
    q, kv, indices, sm_scale, sink, length = attention()
    want = compat.flash_mla_sparse_fwd(q, kv, indices, sm_scale, 512, sink, length)
    spread = [torch.stack((x, x), -1)[..., 0] for x in (q, kv, indices, sink, length)]
    got = compat.flash_mla_sparse_fwd(spread[0].requires_grad_(), spread[1].requires_grad_(),
                                      spread[2], sm_scale, 512, *spread[3:], indexer_topk=0)
    assert all(map(torch.equal, got, want)) and not got[0].requires_grad


Q, KV, INDICES, SCALE, SINK, LENGTH = attention()
FLASH_MLA_ERRORS = {
    "d_v": (dict(d_v=576), ValueError, "d_v must be 512, the only value that FlashDSA serves"),
    "indexer_topk": (dict(indexer_topk=64), ValueError, "indexer_topk must be 0"),
    "q list": (dict(q=[1]), TypeError, "q must be a torch.Tensor"),
    "q float16": (dict(q=Q.half()), TypeError, "q must be bfloat16"),
    "indices int64": (dict(indices=INDICES.long()), TypeError, "must be int32"),
    "indices rank": (dict(indices=INDICES[:, 0]), ValueError, "topk_indices must be"),
    "two kv heads": (dict(kv=KV.expand(-1, 2, -1)), ValueError, "kv must be"),
    "sink": (dict(attn_sink=SINK[:2]), ValueError, "attn_sink must be"),
    "sink dtype": (dict(attn_sink=SINK.double()), TypeError, "attn_sink must be"),
    "length": (dict(topk_length=LENGTH[:2]), ValueError, "topk_length must be"),
    "scale": (dict(sm_scale=0), ValueError, "softmax_scale must be"),
    "scale nan": (dict(sm_scale=NAN), TypeError, "softmax_scale must be"),
}


def assert_refused(function, arguments, case):
    changes, kind, words = case
    with pytest.raises(kind, match=words) as caught:
        function(**{**arguments, **changes})
    assert type(caught.value) is kind and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FLASH_MLA_ERRORS)
def test_flash_mla_refuses(name):
    assert_refused(compat.flash_mla_sparse_fwd,
                   {"q": Q, "kv": KV, "indices": INDICES, "sm_scale": SCALE},
                   FLASH_MLA_ERRORS[name])


# sparse_attention_backward_wrapper.


def backward_arguments(with_sink=True):
    """Arguments in order, of a forward call through FlashMLA's convention: lse +inf for rows
    without keys."""
    q, kv, indices, sm_scale, sink, length = attention()
    if not with_sink:
        sink = torch.full_like(sink, -INF)
    out, _, lse = compat.flash_mla_sparse_fwd(q, kv, indices, sm_scale, 512, sink, length)
    dout = torch.randn(out.shape, generator=generator(5)).bfloat16()
    return q, kv[:, 0], out, dout, lse, sink, indices[:, 0], sm_scale, length


def dense_gradients(q, kv, out, dout, lse, sink, indices, sm_scale, length):
    q, kv, sink = (x.double().requires_grad_() for x in (q, kv, sink))
    output, *_ = dense_forward(q, kv[:, None], indices[:, None], sm_scale, None, length)
    plain = dense_forward(q, kv[:, None], indices[:, None], sm_scale, None, length)[2]
    output = output * torch.sigmoid(plain - sink)[..., None]
    output[2:].backward(dout[2:].double())  # without the rows that have no keys
    return q.grad, kv.grad, sink.grad


@pytest.mark.parametrize("with_sink", [False, True])
def test_backward(with_sink):
    arguments = backward_arguments(with_sink)
    result = compat.sparse_attention_backward_wrapper(*arguments)
    dq, dkv, d_sink = result
    want = dense_gradients(*arguments)
    assert list(result.keys()) == ["dq", "dkv", "d_sink"]
    assert (dq.dtype, dkv.dtype, d_sink.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert_vectors(dq, want[0].nan_to_num(0.0), 1e-2)
    assert_vectors(dkv, want[1], 1e-2)
    if with_sink:
        assert_vectors(d_sink, want[2], 1e-2)
    else:
        assert not d_sink.any()
    assert not dq[:2].any()


def test_backward_writes_where_it_is_told():
    arguments = backward_arguments()
    want = compat.sparse_attention_backward_wrapper(*arguments)
    dq = torch.full((*arguments[0].shape, 2), NAN).bfloat16()[..., 0]
    dkv = torch.full_like(arguments[1], NAN)
    got = compat.sparse_attention_backward_wrapper(*arguments, dq, dkv, deterministic=True)
    assert got.dq is dq and got.dkv is dkv
    assert torch.equal(dq, want.dq) and torch.equal(dkv, want.dkv)


@pytest.mark.parametrize("rows, switch, asked, want", [(20, False, False, True),
                                                       (65, False, False, False),
                                                       (65, True, False, True),
                                                       (65, False, True, True)])
def test_backward_in_a_fixed_order(monkeypatch, rows, switch, asked, want):
    modes = []

    def spy(*arguments, deterministic, **named):
        modes.append(deterministic)
        return flashdsa.attention_backward(*arguments, **named)

    monkeypatch.setattr(cudnn_dsa_module, "attention_backward", spy)
    q, kv, indices, sm_scale, sink, length = attention(rows=rows)
    out, _, lse = compat.flash_mla_sparse_fwd(q, kv, indices, sm_scale, 512, sink, length)
    torch.use_deterministic_algorithms(switch)
    try:
        compat.sparse_attention_backward_wrapper(q, kv[:, 0], out, out, lse, sink, indices[:, 0],
                                                 sm_scale, length, deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(False)
    assert modes == [want]


def test_backward_defaults():
    q, kv, out, dout, lse, _, indices, _, length = backward_arguments()
    scale = 576**-0.5
    out, _, lse = compat.flash_mla_sparse_fwd(q, kv[:, None], indices[:, None], scale,
                                              topk_length=length)
    given = compat.sparse_attention_backward_wrapper(q, kv, out, dout, lse, None, indices, scale,
                                                     length)
    default = compat.sparse_attention_backward_wrapper(q, kv, out, dout, lse, None, indices,
                                                       topk_length=length)
    assert torch.equal(given.dq, default.dq) and default.d_sink is None


BACKWARD = dict(zip(("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs", "softmax_scale",
                     "topk_length"), backward_arguments()))
BACKWARD_ERRORS = {
    "kv rank": (dict(kv=BACKWARD["kv"][:, None]), ValueError, "kv must be \\[T_k, d\\]"),
    "indices rank": (dict(topk_idxs=BACKWARD["topk_idxs"][:, None]), ValueError, "topk_idxs"),
    "dq shape": (dict(dq=BACKWARD["q"][:1]), ValueError, "dq must be"),
    "dkv dtype": (dict(dkv=BACKWARD["kv"].float()), ValueError, "dkv must be"),
    "dout dtype": (dict(dout=BACKWARD["dout"].float()), TypeError, "grad_out must be"),
    "lse shape": (dict(lse=BACKWARD["lse"][:, :2]), ValueError, "lse must be"),
    "sink list": (dict(attn_sink=[0.0]), TypeError, "attn_sink must be a torch.Tensor"),
}


@pytest.mark.parametrize("name", BACKWARD_ERRORS)
def test_backward_refuses(name):
    assert_refused(compat.sparse_attention_backward_wrapper, BACKWARD, BACKWARD_ERRORS[name])


# indexer_forward_wrapper.


def small_integers(*shape, seed=0):
    return torch.randint(-3, 4, shape, generator=generator(seed))


def score(q, k, w):
    """[rows, keys], exact for these integers."""
    products = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return torch.einsum("th,ths->ts", w.double(), products).float()


def dense_scores(q, k, w, cu_seqlens_q, cu_seqlens_k, offsets, columns):
    want = torch.full((len(q), columns), -INF)
    for segment in range(len(offsets)):
        first, last = cu_seqlens_q[segment], cu_seqlens_q[segment + 1]
        keys = k[cu_seqlens_k[segment]:cu_seqlens_k[segment + 1], 0]
        for row in range(first, last):
            visible = min(offsets[segment] + row - first + 1, len(keys))
            want[row, :visible] = score(q[row:row + 1], keys[:visible], w[row:row + 1])[0]
    return want


def packed_problem(heads=4, weights=torch.float32, rows=13, keys=31):
    return (small_integers(rows, heads, 128).bfloat16(), small_integers(keys, 1, 128, seed=1)
            .bfloat16(), small_integers(rows, heads, seed=2).to(weights))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 32, 64])
@pytest.mark.parametrize("window, chunk", [(2048, 16384), (4, 5), (1, 1)])
def test_packed_scores(monkeypatch, heads, weights, window, chunk):
    monkeypatch.setattr(dense_scores_module, "MAX_TOPK", window)
    monkeypatch.setattr(dense_scores_module, "_CHUNK_ROWS", chunk)
    q, k, w = packed_problem(heads, weights)
    bounds = [0, 2, 2, 8, 12], [0, 7, 9, 20, 31]  # the last row lies in no segment
    offsets = [6, 0, 8, 2]  # some rows stand behind all keys of their segment
    result = compat.indexer_forward_wrapper(
        q, k, w, ratio=1, cu_seqlens_q=ints(*bounds[0]), cu_seqlens_k=ints(*bounds[1]),
        max_seqlen_q=6, max_seqlen_k=11, q_causal_offsets=ints(*offsets))
    want = dense_scores(q, k, w, *bounds, offsets, 11)
    assert (want[12] == -INF).all() and torch.equal(result["scores"], want)


def test_packed_scores_without_offsets_begin_at_the_first_key():
    q, k, w = packed_problem()
    bounds = [0, 4, 13], [0, 20, 31]
    named = {"ratio": 1, "cu_seqlens_q": ints(*bounds[0]), "cu_seqlens_k": ints(*bounds[1]),
             "max_seqlen_q": 9, "max_seqlen_k": 20}
    (scores,) = compat.indexer_forward_wrapper(q, k, w, **named)
    assert torch.equal(scores, dense_scores(q, k, w, *bounds, [0, 0], 20))
    scaled = compat.indexer_forward_wrapper(q, k, w, sm_scale=0.5, **named).scores
    assert torch.equal(scaled, scores * 0.5)


@pytest.mark.parametrize("with_offsets", [False, True])
def test_batched_scores(with_offsets):
    q = small_integers(2, 5, 4, 128).bfloat16()
    k = small_integers(2, 7, 1, 128, seed=1).bfloat16()
    w = small_integers(2, 5, 4, seed=2).bfloat16()
    offsets = [1, 4] if with_offsets else [0, 0]
    scores = compat.indexer_forward_wrapper(
        q, k, w, ratio=1, q_causal_offsets=ints(*offsets) if with_offsets else None).scores
    want = dense_scores(q.flatten(0, 1), k.flatten(0, 1), w.flatten(0, 1), [0, 5, 10], [0, 7, 14],
                        offsets, 7)
    assert torch.equal(scores, want.view(2, 5, 7))


@pytest.mark.parametrize("gaps", [False, True])
def test_scores_are_written_where_told(gaps):
    q, k, w = small_integers(1, 5, 4, 128).bfloat16(), small_integers(1, 7, 1, 128).bfloat16(), None
    w = torch.ones(1, 5, 4)
    want = compat.indexer_forward_wrapper(q, k, w, ratio=1).scores
    out = torch.full((1, 5, 8), NAN)[..., :7] if gaps else torch.full((1, 5, 7), NAN)
    result = compat.indexer_forward_wrapper(q, k, w, ratio=1, out=out)
    assert result.scores is out and torch.equal(out, want)


def test_scores_of_the_worked_example_s_metadata():
    """As the reference module calls it: repacked key prefixes of a context-parallel shard."""
    meta = flashdsa.prepare_packed_metadata(
        ints(0, 3, 7, 9), 12, query_indices=torch.arange(2, 10),
        cu_seqlens_padded=ints(0, 4, 9, 12))
    q, k, w = packed_problem(rows=8, keys=12)
    scores = compat.indexer_forward_wrapper(
        q, k[meta.key_source_indices], w, ratio=1, sm_scale=1.0, cu_seqlens_q=meta.segment_cu_q,
        cu_seqlens_k=meta.segment_cu_k, max_seqlen_q=meta.max_seqlen_q,
        max_seqlen_k=meta.max_seqlen_k, q_causal_offsets=meta.q_causal_offsets)["scores"]
    position = torch.arange(2, 10)
    for row in range(8):
        start = int(meta.starts[row])
        visible = int(position[row]) + 1 - start
        want = score(q[row:row + 1], k[start:start + visible, 0], w[row:row + 1])[0]
        assert torch.equal(scores[row, :visible], want)
        assert (scores[row, visible:] == -INF).all()


def test_scores_and_selection_give_what_the_indexer_gives():
    """The reference module's way over a dense matrix ends at the library's own selection, on random
    inputs too, since the scores are the same bits."""
    rows = 300
    q = torch.randn(rows, 32, 128, generator=generator(1)).bfloat16()
    k = torch.randn(rows, 128, generator=generator(2)).bfloat16()
    w = torch.randn(rows, 32, generator=generator(3)).bfloat16()
    meta = flashdsa.prepare_packed_metadata(ints(0, 100, rows), rows)
    scores = compat.indexer_forward_wrapper(
        q, k[:, None], w, ratio=1, cu_seqlens_q=meta.segment_cu_q, cu_seqlens_k=meta.segment_cu_k,
        max_seqlen_q=meta.max_seqlen_q, max_seqlen_k=meta.max_seqlen_k,
        q_causal_offsets=meta.q_causal_offsets).scores
    local = compat.indexer_top_k_wrapper(scores, meta.causal_lengths, 16, return_val=False).indices
    moved = compat.local_to_global_wrapper(local, rows, meta.segment_cu_q, meta.segment_cu_k)
    want = flashdsa.indexer_topk(q, k, w, meta, 16).topk_indices[:, 0]
    assert torch.equal(moved.indices, want)


def test_scores_when_contents_are_checked(monkeypatch):
    monkeypatch.setattr(dense_scores_module, "MAX_TOPK", 4)
    q, k, w = packed_problem()
    named = {"ratio": 1, "cu_seqlens_q": ints(0, 13), "cu_seqlens_k": ints(0, 31),
             "max_seqlen_q": 13, "max_seqlen_k": 31}
    want = compat.indexer_forward_wrapper(q, k, w, **named).scores
    monkeypatch.setenv("FLASHDSA_CHECK", "1")
    assert torch.equal(compat.indexer_forward_wrapper(q, k, w, **named).scores, want)


FORWARD = dict(zip("qkw", packed_problem()), ratio=1, cu_seqlens_q=ints(0, 13),
               cu_seqlens_k=ints(0, 31), max_seqlen_q=13, max_seqlen_k=31)
FORWARD_ERRORS = {
    "ratio": (dict(ratio=4), ValueError, "ratio must be 1, the only value that FlashDSA serves"),
    "precision": (dict(precision="mxfp8"), ValueError, "precision must be 'bf16'"),
    "q_scale": (dict(q_scale=torch.ones(3)), ValueError, "q_scale must be None"),
    "k_scale": (dict(k_scale=torch.ones(3)), ValueError, "k_scale must be None"),
    "return_lse": (dict(return_lse=True), ValueError, "return_lse must be False"),
    "lse_out": (dict(lse_out=torch.ones(13)), ValueError, "lse_out must be None"),
    "sf_vec_size": (dict(sf_vec_size=16), ValueError, "sf_vec_size must be 32"),
    "scale padded": (dict(cu_seqlens_q_scale_padded=ints(0)), ValueError, "_q_scale_padded"),
    "heads": (dict(qhead_per_kv_head=8), ValueError, "qhead_per_kv_head must be H = 4, got 8"),
    "scale zero": (dict(sm_scale=0.0), ValueError, "sm_scale must be positive"),
    "scale nan": (dict(sm_scale=NAN), ValueError, "sm_scale must be positive"),
    "scale text": (dict(sm_scale="1"), TypeError, "sm_scale must be a float"),
    "one bound": (dict(cu_seqlens_k=None), ValueError, "both or neither"),
    "bound dtype": (dict(cu_seqlens_q=torch.tensor([0, 13])), TypeError, "cu_seqlens_q"),
    "bound lengths": (dict(cu_seqlens_k=ints(0, 1, 31)), ValueError, "cu_seqlens_k"),
    "bound one": (dict(cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)), ValueError, "cu_seqlens_q"),
    "bound device": (dict(cu_seqlens_q=ints(0, 13).to("meta")), ValueError, "cu_seqlens_q"),
    "max none": (dict(max_seqlen_k=None), ValueError, "max_seqlen_k must be given"),
    "max float": (dict(max_seqlen_q=13.0), TypeError, "max_seqlen_q must be an int"),
    "offsets dtype": (dict(q_causal_offsets=torch.tensor([0])), TypeError, "q_causal_offsets"),
    "offsets shape": (dict(q_causal_offsets=ints(0, 0)), ValueError, "q_causal_offsets"),
    "q rank": (dict(q=FORWARD["q"][None]), ValueError, "q must be \\[T_q, H, 128\\]"),
    "k heads": (dict(k=FORWARD["k"].expand(-1, 2, -1)), ValueError, "k \\[T_k, 1, 128\\]"),
    "w shape": (dict(w=FORWARD["w"][:, :2]), ValueError, "w \\[T_q, H\\]"),
    "q dtype": (dict(q=FORWARD["q"].float()), TypeError, "index_q must be bfloat16"),
    "k dtype": (dict(k=FORWARD["k"].half()), TypeError, "index_k must be bfloat16"),
    "w dtype": (dict(w=FORWARD["w"].half()), TypeError, "head_weights must be"),
    "out dtype": (dict(out=torch.empty(13, 31).double()), TypeError, "out must be float32"),
    "out shape": (dict(out=torch.empty(13, 30)), ValueError, "out must be float32"),
    "q list": (dict(q=[1]), TypeError, "q must be a torch.Tensor"),
    "offsets list": (dict(q_causal_offsets=[0]), TypeError, "q_causal_offsets"),
}


@pytest.mark.parametrize("name", FORWARD_ERRORS)
def test_scores_refuse(name):
    assert_refused(compat.indexer_forward_wrapper, FORWARD, FORWARD_ERRORS[name])


# indexer_top_k_wrapper.


def selected(row, length, top_k, larger=False):
    """Columns in ascending order by a comparison sort of Python's."""
    def compare(a, b):
        x, y = row[a], row[b]
        if math.isnan(x) != math.isnan(y):
            return -1 if math.isnan(x) else 1
        if x != y and not math.isnan(x):
            return -1 if x > y else 1
        return (b - a) if larger else (a - b)

    order = sorted(range(max(0, min(length, len(row)))), key=functools.cmp_to_key(compare))
    return sorted(order[:top_k])


HARD = [0.0, -0.0, NAN, INF, -INF, 1.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38, -NAN]


def hard_rows(rows, columns, dtype=torch.float32, seed=0):
    pick = torch.randint(0, len(HARD), (rows, columns), generator=generator(seed))
    return torch.tensor(HARD)[pick].to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tie_break", [0, 1, 2])
@pytest.mark.parametrize("chunk", [2**24, 40, 1])
def test_topk_is_exact(monkeypatch, dtype, tie_break, chunk):
    monkeypatch.setattr(dense_topk_module, "_CHUNK_ELEMENTS", chunk)
    values = hard_rows(50, 17, dtype)
    lengths = torch.randint(-1, 20, (50,), generator=generator(1)).int()
    result = compat.indexer_top_k_wrapper(values, lengths, 5, tie_break=tie_break)
    assert result.indices.dtype == torch.int32 and result["values"].dtype == dtype
    for row in range(50):
        want = selected(values[row].tolist(), int(lengths[row]), 5, tie_break == 2)
        padded = want + [-1] * (5 - len(want))
        assert result.indices[row].tolist() == padded
        found = torch.tensor([values[row, column] for column in want] + [-INF] * (5 - len(want)),
                             dtype=dtype)
        torch.testing.assert_close(result["values"][row], found, equal_nan=True, rtol=0, atol=0)


def test_topk_of_random_rows():
    values = torch.randn(20, 3000, generator=generator(3))
    lengths = torch.randint(1, 3001, (20,), generator=generator(4)).int()
    indices = compat.indexer_top_k_wrapper(values, lengths, 2048, return_val=False).indices
    for row in range(20):
        want = selected(values[row].tolist(), int(lengths[row]), 2048)
        assert indices[row, :len(want)].tolist() == want and (indices[row, len(want):] == -1).all()


def test_topk_worked_by_hand():
    values = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, NAN, 2.0]])
    for tie_break, want in ((0, [1, 5]), (1, [1, 5]), (2, [2, 5])):
        result = compat.indexer_top_k_wrapper(values, ints(7), 2, tie_break=tie_break)
        assert result.indices.tolist() == [want]
    assert compat.indexer_top_k_wrapper(values[:, 3:5], ints(2), 1).indices.tolist() == [[0]]
    assert compat.indexer_top_k_wrapper(values[:, 3:5], ints(2), 1,
                                        tie_break=2).indices.tolist() == [[1]]


def test_topk_of_staggered_rows():
    values = torch.arange(8.0).repeat(6, 1)
    result = compat.indexer_top_k_wrapper(values, ints(2, 8), 2, next_n=3)
    assert result.indices.tolist() == [[-1, -1], [0, -1], [0, 1], [4, 5], [5, 6], [6, 7]]


def test_topk_wider_than_the_rows():
    result = compat.indexer_top_k_wrapper(torch.tensor([[1.0, 2.0]]), ints(2), 4)
    assert result.indices.tolist() == [[0, 1, -1, -1]]
    assert result["values"].tolist() == [[1.0, 2.0, -INF, -INF]]
    empty = compat.indexer_top_k_wrapper(torch.empty(1, 0), ints(0), 2, return_val=False)
    assert empty.indices.tolist() == [[-1, -1]] and empty["values"] is None


TOPK = {"input_values": torch.zeros(6, 4), "seq_lens": ints(4, 4), "top_k": 2, "next_n": 3}
TOPK_ERRORS = {
    "values float64": (dict(input_values=torch.zeros(6, 4).double()), TypeError, "input_values"),
    "values rank": (dict(input_values=torch.zeros(6)), ValueError, "input_values must be"),
    "lens int64": (dict(seq_lens=torch.tensor([4, 4])), TypeError, "seq_lens must be int32"),
    "lens rank": (dict(seq_lens=ints(4, 4)[None]), ValueError, "seq_lens"),
    "rows": (dict(next_n=2), ValueError, "seq_lens \\* next_n"),
    "lens device": (dict(seq_lens=ints(4, 4).to("meta")), ValueError, "seq_lens must be on cpu"),
    "top_k zero": (dict(top_k=0), ValueError, "top_k must be in 1..2048"),
    "top_k large": (dict(top_k=2049), ValueError, "top_k must be in 1..2048"),
    "top_k float": (dict(top_k=2.0), TypeError, "top_k must be an int"),
    "next_n zero": (dict(next_n=0), ValueError, "next_n must be"),
    "tie_break": (dict(tie_break=3), ValueError, "tie_break must be in 0..2"),
    "values list": (dict(input_values=[1.0]), TypeError, "input_values must be a torch.Tensor"),
}


@pytest.mark.parametrize("name", TOPK_ERRORS)
def test_topk_refuses(name):
    assert_refused(compat.indexer_top_k_wrapper, TOPK, TOPK_ERRORS[name])


# compactify_wrapper, local_to_global_wrapper.


def test_compactify_keeps_the_order():
    indices = ints(-1, 7, 3, -2, 7, 2**31 - 1, -1, -1, -1, 0, 0, 0).view(2, 2, 3)
    result = compat.compactify_wrapper(indices)
    assert result.indices.tolist() == [[7, 3, -1], [7, 2**31 - 1, -1], [-1, -1, -1], [0, 0, 0]]
    assert result.topk_length.tolist() == [2, 2, 0, 3]
    assert result.indices.dtype == result.topk_length.dtype == torch.int32
    assert torch.equal(compat.compactify_wrapper(indices.view(4, 3)).indices, result.indices)


def test_compactify_of_long_rows_keeps_the_order():
    indices = torch.randint(-4, 10, (20, 3000), generator=generator(0)).int()
    result = compat.compactify_wrapper(indices)
    for row, got, length in zip(indices.tolist(), result.indices.tolist(), result.topk_length):
        kept = [index for index in row if index >= 0]
        assert got == kept + [-1] * (3000 - len(kept)) and length == len(kept)


def test_compactify_refuses():
    with pytest.raises(TypeError, match="indices must be int32, got torch.int64"):
        compat.compactify_wrapper(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="indices must be"):
        compat.compactify_wrapper(ints(1))
    with pytest.raises(TypeError, match="indices must be a torch.Tensor"):
        compat.compactify_wrapper([[1]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_to_global_of_batches(dtype):
    local = torch.tensor([[[0, -1], [3, -7]], [[2, 1], [-1, 0]]], dtype=dtype)
    got = compat.local_to_global_wrapper(local, 10).indices
    assert got.dtype == torch.int32
    assert got.tolist() == [[[0, -1], [3, -1]], [[12, 11], [-1, 10]]]


def test_local_to_global_of_packed_rows():
    local = ints(0, -1, 1, 2, 0, 1).view(3, 2)
    got = compat.local_to_global_wrapper(local, 99, ints(0, 1, 1, 3), ints(0, 5, 9, 12)).indices
    assert got.tolist() == [[0, -1], [10, 11], [9, 10]]


LOCAL = {"local_indices": ints(0, 1).view(1, 2), "seqlen_k": 4, "cu_seqlens_q": ints(0, 1),
         "cu_seqlens_k": ints(0, 4)}
LOCAL_ERRORS = {
    "dtype": (dict(local_indices=torch.zeros(1, 2)), TypeError, "local_indices must be int32"),
    "one bound": (dict(cu_seqlens_q=None), ValueError, "both or neither"),
    "bound dtype": (dict(cu_seqlens_k=torch.tensor([0, 4])), TypeError, "cu_seqlens_k"),
    "bound length": (dict(cu_seqlens_k=ints(0, 1, 4)), ValueError, "cu_seqlens_k"),
    "rank packed": (dict(local_indices=ints(0)), ValueError, "local_indices must be \\[T_q, K\\]"),
    "rank batched": (dict(cu_seqlens_q=None, cu_seqlens_k=None), ValueError, "\\[B, S_q, K\\]"),
    "seqlen float": (dict(seqlen_k=4.0), TypeError, "seqlen_k must be an int"),
    "seqlen negative": (dict(seqlen_k=-1), ValueError, "seqlen_k must be in"),
}


@pytest.mark.parametrize("name", LOCAL_ERRORS)
def test_local_to_global_refuses(name):
    assert_refused(compat.local_to_global_wrapper, LOCAL, LOCAL_ERRORS[name])
