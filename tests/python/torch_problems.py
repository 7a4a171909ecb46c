"""Those problems as tensors of PyTorch, and what the tests of the operators share."""

import contextlib

import flashdsa.torch as ft
import ml_dtypes
import numpy as np
import problems
import torch


def to_torch(value):
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def case_of(**sizes):
    return {name: to_torch(value) for name, value in problems.attention(**sizes).items()}


def differentiable(case):
    return {name: value.clone().requires_grad_() if name in ("q", "kv", "attn_sink") else value
            for name, value in case.items()}


def gradients(case, run=ft.sparse_attention, grad_out=None):
    """out and the gradients of q, kv and attn_sink."""
    case = differentiable(case)
    out = run(**case)
    out.backward(torch.ones_like(out) if grad_out is None else grad_out)
    return [out.detach(), *(case[name].grad for name in ("q", "kv", "attn_sink"))]


def assert_same(got, want):
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and torch.equal(a, b)


@contextlib.contextmanager
def saved_tensors():
    """What autograd keeps of the calls inside."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        yield saved


def saved_bytes(tensors):
    """A storage counts once, whoever shares it."""
    return sum({id_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def id_of(tensor):
    return tensor.untyped_storage()._cdata


def assert_both_get_the_plan(monkeypatch, module, plan, run):
    """`run` calls forward and backward of `module`, each with `plan`."""
    seen = []

    def spy_on(name):
        plain = getattr(module, name)

        def call(*arguments, plan, **options):
            seen.append((name, plan[1:], plan.storage.data_ptr()))
            return plain(*arguments, plan=plan, **options)

        monkeypatch.setattr(module, name, call)

    spy_on("attention_forward")
    spy_on("attention_backward")
    run()
    assert seen == [(name, plan[1:], plan.storage.data_ptr())
                    for name in ("attention_forward", "attention_backward")]
