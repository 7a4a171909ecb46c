"""flashdsa.compat on a GPU, against the same calls on the host and the same oracles."""

import pytest

torch = pytest.importorskip("torch")

import flashdsa.compat as compat  # noqa: E402
from test_compat import (assert_vectors, attention, backward_arguments,  # noqa: E402
                         dense_forward, dense_gradients, generator, hard_rows, ints,
                         packed_problem)

pytestmark = [pytest.mark.cuda,
              pytest.mark.skipif(torch.cuda.is_available()
                                 and torch.cuda.get_device_capability() != (9, 0),
                                 reason="the GPU is not a Hopper")]


def on_gpu(values):
    return [value.cuda() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("dim", [576, 512])
def test_flash_mla_forward(dim):
    q, kv, indices, sm_scale, sink, length = attention(rows=100, dim=dim, heads=16)
    got = compat.flash_mla_sparse_fwd(*on_gpu((q, kv, indices, sm_scale, 512, sink, length)))
    want = dense_forward(q, kv, indices, sm_scale, sink, length)
    assert all(tensor.is_cuda for tensor in got)
    assert_vectors(got[0].cpu(), want[0], 4e-3)
    for a, b in zip(got[1:], want[1:]):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-6, atol=1e-4)
    assert (got[2][:2] == float("inf")).all() and not got[0][:2].any()


@pytest.mark.parametrize("with_sink", [False, True])
def test_backward(with_sink):
    arguments = backward_arguments(with_sink)
    got = compat.sparse_attention_backward_wrapper(*on_gpu(arguments))
    want = dense_gradients(*arguments)
    assert_vectors(got.dq.cpu(), want[0].nan_to_num(0.0), 1e-2)
    assert_vectors(got.dkv.cpu(), want[1], 1e-2)
    if with_sink:
        assert_vectors(got.d_sink.cpu(), want[2], 1e-2)


def packed_arguments(heads=32, rows=300, keys=5000):
    q, k, w = packed_problem(heads, rows=rows, keys=keys)
    return (q, k, w), {"ratio": 1, "cu_seqlens_q": ints(0, 100, rows), "cu_seqlens_k": ints(
        0, 600, keys), "max_seqlen_q": 200, "max_seqlen_k": keys - 600, "q_causal_offsets": ints(
            500, 4200)}


@pytest.mark.parametrize("heads", [1, 32, 64])
def test_scores(heads):
    tensors, named = packed_arguments(heads)
    want = compat.indexer_forward_wrapper(*tensors, **named).scores
    got = compat.indexer_forward_wrapper(*on_gpu(tensors),
                                         **dict(zip(named, on_gpu(named.values())))).scores
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("tie_break", [0, 2])
@pytest.mark.parametrize("columns, top_k", [(17, 5), (3000, 2048), (100, 2048)])
def test_topk(columns, top_k, tie_break):
    values = hard_rows(50, columns)
    lengths = torch.randint(-1, columns + 2, (50,), generator=generator(1)).int()
    want = compat.indexer_top_k_wrapper(values, lengths, top_k, tie_break=tie_break)
    got = compat.indexer_top_k_wrapper(values.cuda(), lengths.cuda(), top_k, tie_break=tie_break)
    assert torch.equal(got.indices.cpu(), want.indices)
    torch.testing.assert_close(got["values"].cpu(), want["values"], equal_nan=True, rtol=0, atol=0)


def test_indices():
    indices = torch.randint(-4, 10, (20, 300), generator=generator(0)).int()
    want, got = compat.compactify_wrapper(indices), compat.compactify_wrapper(indices.cuda())
    assert torch.equal(got.indices.cpu(), want.indices)
    assert torch.equal(got.topk_length.cpu(), want.topk_length)
    bounds = ints(0, 3, 20), ints(0, 40, 90)
    want = compat.local_to_global_wrapper(indices, 50, *bounds).indices
    got = compat.local_to_global_wrapper(indices.cuda(), 50, *on_gpu(bounds)).indices
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("as_handle", [False, True])
def test_the_caller_s_stream_is_used(as_handle):
    (q, k, w), named = packed_arguments()
    named = dict(zip(named, on_gpu(named.values())))
    q, k, w = on_gpu((q, k, w))
    want = compat.indexer_forward_wrapper(q, k, w, **named).scores
    late = torch.zeros_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)  # on this stream, behind the sleep
    got = compat.indexer_forward_wrapper(late, k, w, **named,
                                         stream=stream.cuda_stream if as_handle else stream).scores
    stream.synchronize()
    assert torch.equal(got, want)


def test_the_reference_module_s_way_is_captured():
    (q, k, w), named = packed_arguments()
    named = dict(zip(named, on_gpu(named.values())))
    q, k, w = on_gpu((q, k, w))
    lengths = torch.randint(1, 4400, (300,), generator=generator(2)).int().cuda()

    def select():
        scores = compat.indexer_forward_wrapper(q, k, w, **named).scores
        local = compat.indexer_top_k_wrapper(scores, lengths, 64, return_val=False).indices
        moved = compat.local_to_global_wrapper(local, 0, named["cu_seqlens_q"],
                                               named["cu_seqlens_k"]).indices
        return compat.compactify_wrapper(moved).indices

    want = select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = select()
    got.zero_()
    graph.replay()
    assert torch.equal(got, want)
