"""The package on a GPU with PyTorch. The oracle is a float32 attention of plain PyTorch."""

import pytest

torch = pytest.importorskip("torch")

import flashdsa  # noqa: E402
import flashdsa.torch as ft  # noqa: E402

pytestmark = pytest.mark.cuda


def problem(rows=256, keys=512, heads=8, dim=576, width=128, seed=0):
    """q, kv, topk_indices, softmax_scale, topk_length: distinct ascending keys, odd lengths."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads, dim, generator=generator).bfloat16()
    kv = torch.randn(keys, 1, dim, generator=generator).bfloat16()
    picked = torch.rand(rows, keys, generator=generator).topk(width, dim=1).indices.sort(1).values
    length = torch.randint(0, width + 1, (rows,), generator=generator)
    picked = picked.masked_fill(torch.arange(width) >= length[:, None], -1)
    return (q.cuda(), kv.cuda(), picked[:, None].int().cuda(), dim**-0.5, length.int().cuda())


def oracle(q, kv, topk_indices, softmax_scale, topk_length):
    keys = kv[topk_indices[:, 0].clamp(min=0).long(), 0]
    logits = softmax_scale * torch.einsum("thd,tkd->thk", q, keys)
    hole = (topk_indices < 0).expand(-1, q.shape[1], -1)
    weights = logits.masked_fill(hole, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("thk,tkd->thd", weights, keys[:, :, :512])


def gradients(run, q, kv, *rest):
    q, kv = q.clone().requires_grad_(), kv.clone().requires_grad_()
    out = run(q, kv, *rest)
    generator = torch.Generator("cuda").manual_seed(1)
    grad_out = torch.randn(out.shape, generator=generator, device="cuda").bfloat16()
    out.backward(grad_out.to(out.dtype))
    return out.detach(), q.grad, kv.grad


def relative(got, want):
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dim", [576, 512])
@pytest.mark.parametrize("heads", [8, 24, 64])
def test_autograd_against_float32(heads, dim):
    case = problem(heads=heads, dim=dim)
    got = gradients(ft.sparse_attention, *case)
    want = gradients(oracle, case[0].float(), case[1].float(), *case[2:])
    for name, bound, a, b in zip(("out", "grad_q", "grad_kv"), (4e-3, 1e-2, 1e-2), got, want):
        assert relative(a, b) <= bound, f"{name}: {relative(a, b)}"


def test_deterministic_algorithms_give_the_same_bits():
    case = problem(keys=64, width=64)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(ft.sparse_attention, *case)
        for _ in range(5):
            assert all(map(torch.equal, gradients(ft.sparse_attention, *case), first))
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_without_a_graph_break():
    case = problem()

    def layer(q, *rest):
        return ft.sparse_attention(q * 2, *rest) + 1

    got = gradients(torch.compile(layer, fullgraph=True), *case)
    want = gradients(layer, *case)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert relative(got[2], want[2].float()) <= 1e-2  # the backward may use atomics


def test_graph_replay():
    q, *rest = problem()
    q = q.clone()
    ft.sparse_attention(q, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ft.sparse_attention(q, *rest)
    for seed in (1, 2, 3):
        q.copy_(problem(seed=seed)[0])
        torch.empty(2**24, device="cuda").fill_(seed)  # stirs the allocator
        graph.replay()
        assert torch.equal(out, ft.sparse_attention(q, *rest))


def test_side_stream_is_used():
    q, *rest = problem()
    want = ft.sparse_attention(q, *rest)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(q)
        late.copy_(q)  # on this stream, behind the sleep
        out = ft.sparse_attention(late, *rest)
        del late
    stream.synchronize()
    assert torch.equal(out, want)


def test_scratch_is_pytorch_s():
    case = problem(keys=4096)
    forward = flashdsa.attention_forward(*case)
    arguments = (*case[:4], forward.out, forward.lse, forward.out, case[4])
    flashdsa.attention_backward(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = flashdsa.attention_backward(*arguments)
    results = grads.grad_q.nbytes + grads.grad_kv.nbytes
    assert torch.cuda.max_memory_allocated() - before > results  # a float32 grad_kv at least
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= results + 1024


def test_saved_for_backward():
    """A layer allocates out and lse, and keeps them beside the caller's own tensors."""
    rows, heads, width = 512, 64, 128
    q, kv, indices, scale, length = problem(rows=rows, heads=heads, width=width)
    layers = [(q.clone().requires_grad_(), kv.clone().requires_grad_()) for _ in range(3)]
    ft.sparse_attention(*layers[0], indices, scale, length)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    outs = [ft.sparse_attention(*layer, indices, scale, length) for layer in layers]
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    assert grown == len(layers) * (2 * rows * heads * 512 + 4 * rows * heads)
    del outs
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("which", [0, 1, 2, 4])
def test_tensors_may_begin_anywhere(which):
    """Kernels want rows at multiples of 16 bytes; others are read all the same."""
    case = list(problem())
    want = gradients(ft.sparse_attention, *case)
    moved = torch.zeros(case[which].numel() + 1, dtype=case[which].dtype, device="cuda")[1:]
    case[which] = moved.view(case[which].shape).copy_(case[which])
    got = gradients(ft.sparse_attention, *case)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert relative(got[2], want[2].float()) <= 1e-2  # the backward may use atomics


@pytest.mark.parametrize("layout", ["expanded", "expanded over rows", "strided"])
def test_gradients_of_any_strides(layout):
    q, kv, *rest = problem()
    options = {"device": "cuda", "dtype": torch.bfloat16}
    grad_out = {"expanded": torch.ones((), **options).expand(256, 8, 512),
                "expanded over rows": torch.randn(512, **options).expand(256, 8, 512),
                "strided": torch.randn(512, 8, 256, **options).permute(2, 1, 0)}[layout]
    assert not grad_out.is_contiguous()
    results = []
    for gradient in (grad_out, grad_out.contiguous()):
        a, b = q.clone().requires_grad_(), kv.clone().requires_grad_()
        ft.sparse_attention(a, b, *rest, deterministic=True).backward(gradient)
        results.append((a.grad, b.grad))
    assert all(map(torch.equal, *results))


def drifting_problem(heads=8, seed=0, **sizes):
    """As `problem`; a row's keys are those of the row before it but one, no length is short."""
    q, kv, indices, scale, length = problem(heads=heads, seed=seed, **sizes)
    rows, _, width = indices.shape
    generator = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(kv.shape[0], generator=generator)
    keys = torch.stack([order[t:t + width].sort().values for t in range(rows)])
    return q, kv, keys[:, None].int().cuda(), scale, torch.full_like(length, width)


def plan_of(q, kv, indices, _, length):
    return ft.build_selection_plan(indices, kv.shape[0], q.shape[1], length)


def items_of(plan):
    """(first row, rows, kind, keys, first key, 0, 0, 0) of every item: docs/selection_plan.md."""
    storage = plan.storage.cpu()
    count = storage[:4].view(torch.int32).item()
    return storage[64:64 + 32 * count].view(torch.int32).view(count, 8)


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_plan_is_that_of_the_host(heads):
    case = drifting_problem(heads)
    plan = plan_of(*case)
    host = plan_of(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in case))
    assert plan.storage.is_cuda and plan.storage.dtype == torch.uint8
    assert plan[1:] == host[1:] and plan.nbytes == host.nbytes
    assert torch.equal(items_of(plan), items_of(host))
    union = 1
    assert (items_of(plan)[:, 2] == union).any() == (heads <= 32)


@pytest.mark.parametrize("dim", [576, 512])
@pytest.mark.parametrize("heads", [8, 24, 64])
def test_autograd_with_a_plan_against_float32(heads, dim):
    case = drifting_problem(heads, dim=dim)
    plan = plan_of(*case)
    got = gradients(lambda *rest: ft.sparse_attention(*rest, plan=plan), *case)
    want = gradients(oracle, case[0].float(), case[1].float(), *case[2:])
    for name, bound, a, b in zip(("out", "grad_q", "grad_kv"), (4e-3, 1e-2, 1e-2), got, want):
        assert relative(a, b) <= bound, f"{name}: {relative(a, b)}"


def test_layers_share_a_plan():
    """Its memory is PyTorch's, saved once, and in use until the last backward."""
    q, kv, *rest = drifting_problem()
    want = gradients(ft.sparse_attention, q, kv, *rest)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    plan = plan_of(q, kv, *rest)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before >= plan.nbytes
    layers = [(q.clone().requires_grad_(), kv.clone().requires_grad_()) for _ in range(4)]
    outs = [ft.sparse_attention(*layer, *rest, plan=plan) for layer in layers]
    del plan
    torch.empty(2**24, device="cuda").fill_(7)  # stirs the allocator
    generator = torch.Generator("cuda").manual_seed(1)  # as in `gradients`
    grad_out = torch.randn(outs[0].shape, generator=generator, device="cuda").bfloat16()
    for out in outs:
        out.backward(grad_out)
    for (a, b), out in zip(layers, outs):
        for name, bound, x, y in zip(("out", "grad_q", "grad_kv"), (4e-3, 1e-2, 1e-2),
                                     (out.detach(), a.grad, b.grad), want):
            assert relative(x, y.float()) <= bound, name
    del layers, outs, out, a, b, x, grad_out
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_graph_with_a_plan_is_replayed():
    """A graph that builds the plan of its selection, then runs forward and backward with it."""
    def step(q, kv, indices, scale, length):
        plan = plan_of(q, kv, indices, scale, length)
        forward = flashdsa.attention_forward(q, kv, indices, scale, length, plan=plan)
        grads = flashdsa.attention_backward(q, kv, indices, scale, forward.out, forward.lse,
                                            forward.out, length, plan=plan)
        return forward.out, grads.grad_q, grads.grad_kv

    q, kv, indices, scale, length = drifting_problem()
    step(q, kv, indices, scale, length)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(q, kv, indices, scale, length)
    for seed in (1, 2, 3):
        other = drifting_problem(seed=seed)
        q.copy_(other[0])
        indices.copy_(other[2])
        torch.empty(2**24, device="cuda").fill_(seed)  # stirs the allocator
        graph.replay()
        want = step(q, kv, indices, scale, length)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert relative(got[2], want[2].float()) <= 1e-2  # the backward may use atomics
        assert relative(got[0], oracle(q.float(), kv.float(), indices, scale, length)) <= 4e-3


def test_compiled_with_a_plan():
    case = drifting_problem()

    def layer(q, *rest):
        return ft.sparse_attention(q * 2, *rest, plan=plan_of(q, *rest)) + 1

    got = gradients(torch.compile(layer, fullgraph=True), *case)
    want = gradients(layer, *case)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert relative(got[2], want[2].float()) <= 1e-2  # the backward may use atomics


def test_metadata_and_selection():
    cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32)
    host = flashdsa.prepare_packed_metadata(cu_seqlens, 300)
    rows = flashdsa.prepare_packed_metadata(cu_seqlens.cuda(), 300)
    for name in ("starts", "causal_lengths", "query_valid", "segment_cu_q", "segment_cu_k"):
        field = getattr(rows, name)
        assert field.is_cuda and torch.equal(field.cpu(), getattr(host, name))
    inputs = torch.ones(300, 8, 128), torch.ones(300, 128), torch.ones(300, 8)
    keys = ft.indexer_topk(*(x.bfloat16().cuda() for x in inputs), rows, 64)
    assert keys.topk_indices[299, 0].tolist() == list(range(100, 164))


def test_compact_and_sort():
    indices = torch.tensor([[7, -1, 3, 9, 3]], dtype=torch.int32, device="cuda")
    result = flashdsa.compact_and_sort(indices, 9)
    assert result.indices.tolist() == [[3, 3, 7, -1, -1]] and result.lengths.tolist() == [3]


@pytest.mark.parametrize("function", [flashdsa.attention_forward, ft.sparse_attention])
def test_two_devices_are_refused(function):
    q, kv, indices, scale, length = problem()
    with pytest.raises(ValueError, match="kv must be on cuda:0 as q is, got cpu"):
        function(q, kv.cpu(), indices, scale, length)
    with pytest.raises(ValueError, match="topk_length must be on cpu as q is, got cuda:0"):
        function(q.cpu(), kv.cpu(), indices.cpu(), scale, length)
    plan = plan_of(q.cpu(), kv.cpu(), indices.cpu(), scale, length.cpu())
    with pytest.raises(ValueError, match="plan.storage must be on cuda:0 as q is, got cpu"):
        function(q, kv, indices, scale, length, plan=plan)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="kv must be on cuda:0 as q is, got cuda:1"):
            function(q, kv.to("cuda:1"), indices, scale, length)
