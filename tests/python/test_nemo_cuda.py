"""flashdsa.nemo on a GPU."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

import flashdsa.nemo as nemo  # noqa: E402
from test_nemo import (attention_arguments, check_empty_rows_change_nothing_else,  # noqa: E402
                       dense_selection, gradients, indexer_arguments, ints, oracle, relative)

pytestmark = [pytest.mark.cuda,
              pytest.mark.skipif(torch.cuda.is_available()
                                 and torch.cuda.get_device_capability() != (9, 0),
                                 reason="the GPU is not a Hopper")]

LAYOUT = {"query_indices": torch.arange(2, 10), "cu_seqlens_padded": ints(0, 4, 9, 12)}


def on_gpu(arguments):
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()}


@pytest.fixture
def no_waiting():
    """PyTorch raises where it would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("masked", [False, True])
def test_metadata_is_that_of_the_host(masked):
    arguments = dict(LAYOUT)
    if masked:
        arguments["padding_mask"] = torch.arange(8) > 5
    host = nemo.prepare_cudnn_dsa_packed_metadata(ints(0, 3, 7, 9), 12, 4, **arguments)
    rows = nemo.prepare_cudnn_dsa_packed_metadata(ints(0, 3, 7, 9).cuda(), 12, 4,
                                                  **on_gpu(arguments))
    for field in dataclasses.fields(host):
        got, want = getattr(rows, field.name), getattr(host, field.name)
        if isinstance(want, torch.Tensor):
            assert got.is_cuda and got.dtype == want.dtype and torch.equal(got.cpu(), want)
        else:
            assert got == want
    assert nemo._unpack_packed_metadata(rows, total_query_tokens=8, total_key_tokens=12,
                                        device=rows.starts.device) is rows


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_max_seqlen_on_the_device_costs_no_wait_of_its_own(no_waiting, shape, dtype):
    cu_seqlens = ints(0, 3, 7, 9).pin_memory().cuda(non_blocking=True)
    right, wrong = (torch.full(shape, value, dtype=dtype).pin_memory().cuda(non_blocking=True)
                    for value in (4, 5))
    assert nemo.prepare_cudnn_dsa_packed_metadata(cu_seqlens, 9, right).max_seqlen_k == 4
    with pytest.raises(ValueError, match="largest real length 4, got 5"):
        nemo.prepare_cudnn_dsa_packed_metadata(cu_seqlens, 9, wrong)


def test_max_seqlen_does_not_hide_a_wrong_layout():
    right = torch.tensor(4).cuda()
    for wrong in (ints(0), ints(1, 3), ints(0, 3, 3)[None]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            nemo.prepare_cudnn_dsa_packed_metadata(wrong.cuda(), 9, right)


@pytest.mark.parametrize("heads", [1, 32, 64])
@pytest.mark.parametrize("width", [1, 8, 2048])
def test_indexer_selects(heads, width):
    case = indexer_arguments(rows=200, heads=heads, width=width)
    got = nemo.cudnn_indexer_topk(**on_gpu(case))
    assert torch.equal(got.cpu(), dense_selection(**case))


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_attention_and_its_gradients(heads):
    case = attention_arguments(rows=100, keys=128, heads=heads, width=32)
    grad_out = torch.randn(100, heads, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = gradients(nemo.cudnn_sparse_attention, *on_gpu(case).values(), grad_out=grad_out.cuda())
    want = gradients(oracle, case["q"].double(), case["kv_latent"].double(),
                     *list(case.values())[2:], grad_out=grad_out)
    for name, bound, a, b in zip(("out", "grad_q", "grad_kv"), (4e-3, 1e-2, 1e-2), got, want):
        assert a.dtype == torch.bfloat16 and a.shape == b.shape
        assert relative(a.cpu(), b) <= bound, name


@pytest.mark.parametrize("repeat", range(20))
def test_empty_rows_change_nothing_else(repeat):
    check_empty_rows_change_nothing_else(torch.Tensor.cuda, seed=repeat)


def test_deterministic_algorithms_give_the_same_bits():
    case = on_gpu(attention_arguments(rows=300, keys=16, heads=16, width=16))
    grad_out = torch.randn(300, 16, 512, generator=torch.Generator().manual_seed(2))
    grad_out = grad_out.bfloat16().cuda()
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(nemo.cudnn_sparse_attention, *case.values(), grad_out=grad_out)
        for _ in range(5):
            again = gradients(nemo.cudnn_sparse_attention, *case.values(), grad_out=grad_out)
            assert all(map(torch.equal, again, first))
    finally:
        torch.use_deterministic_algorithms(False)


def test_layers_with_metadata_do_not_wait(no_waiting):
    """A graph's capture fails where anything waits, the library included."""
    torch.cuda.set_sync_debug_mode("default")  # moving the inputs waits
    index = on_gpu(indexer_arguments(rows=96, heads=32, width=16))
    attend = on_gpu(attention_arguments(rows=96, keys=96, heads=16))
    mask = (torch.arange(96) > 90).cuda()
    meta = nemo.prepare_cudnn_dsa_packed_metadata(index["cu_seqlens"], 96, padding_mask=mask)
    lengths = meta.causal_lengths.clamp_max(16).contiguous()

    def layer():
        selection = nemo.cudnn_indexer_topk(**index, packed_metadata=meta)
        return selection, nemo.cudnn_sparse_attention(
            attend["q"], attend["kv_latent"], selection, 0.05, lengths, meta.all_rows_nonempty,
            meta.valid_row_indices)

    want = layer()
    torch.cuda.set_sync_debug_mode("error")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer()
    torch.cuda.set_sync_debug_mode("default")
    for tensor in got:
        tensor.zero_()
    graph.replay()
    assert all(map(torch.equal, got, want)) and (want[0][91:] == -1).all()


def test_host_tensors_beside_a_device_are_a_runtime_error():
    with pytest.raises(RuntimeError, match="index_q must be on a CUDA device, got cpu"):
        nemo.cudnn_indexer_topk(**indexer_arguments())
    mixed = {**on_gpu(attention_arguments()), "kv_latent": attention_arguments()["kv_latent"]}
    with pytest.raises(RuntimeError, match="kv_latent must be on a CUDA device, got cpu"):
        nemo.cudnn_sparse_attention(**mixed)


def test_two_devices_are_a_value_error():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    mixed = on_gpu(attention_arguments())
    mixed["kv_latent"] = mixed["kv_latent"].to("cuda:1")
    with pytest.raises(ValueError, match="kv_latent must be on cuda:0 as q is, got cuda:1"):
        nemo.cudnn_sparse_attention(**mixed)
