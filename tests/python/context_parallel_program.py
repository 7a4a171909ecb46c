"""The ranks of the tests of context parallelism: context_parallel_program.py BACKEND RANKS FOLDER.

Reads FOLDER/problem.pt; every rank, a process, leaves what it found in FOLDER/rank-RANK.pt.
"""

import contextlib
import datetime
import io
import multiprocessing
import os
import pathlib
import re
import sys

import flashdsa.torch as ft
import torch
import torch.distributed as dist
from flashdsa.torch.context_parallel import ORDERS, ContextParallel

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/python.md"
SHARDED = ("index_q", "index_k", "head_weights", "q", "kv", "grad_out", "grad_scores",
           "padding_mask")
DIFFERENTIABLE = ("q", "kv", "attn_sink")


def join(backend, rank, ranks, folder):
    """The default group. Gloo shall not look for another interface than the host's own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank,
                            world_size=ranks, timeout=datetime.timedelta(seconds=60))


def inputs_of(cp, problem):
    """This rank's rows, and what all ranks have; leaves of autograd."""
    case = {name: cp.shard(value).clone() if name in SHARDED else value
            for name, value in problem.items()}
    return {name: value.clone().requires_grad_() if name in DIFFERENTIABLE else value
            for name, value in case.items()}


def metadata_of(cp, case):
    return cp.prepare_packed_metadata(case["cu_seqlens"], padding_mask=case["padding_mask"],
                                      cu_seqlens_padded=case["cu_seqlens_padded"])


def results_of(case, rows, selection, out):
    out.backward(case["grad_out"])
    return {"topk_indices": selection.topk_indices, "topk_length": selection.topk_length,
            "starts": rows.starts, "causal_lengths": rows.causal_lengths,
            "query_valid": rows.query_valid, "out": out.detach(),
            **{f"grad_{name}": case[name].grad for name in DIFFERENTIABLE}}


def in_one_call(cp, problem):
    case = inputs_of(cp, problem)
    rows = metadata_of(cp, case)
    out, selection = cp.indexer_sparse_attention(
        case["index_q"], case["index_k"], case["head_weights"], case["q"], case["kv"], rows,
        case["index_topk"], case["softmax_scale"], case["attn_sink"], threads=1)
    return results_of(case, rows, selection, out)


def in_steps(cp, problem, planned=False):
    """Row by row the bits of one rank; not with a plan, which the invariant mode would not use."""
    case = inputs_of(cp, problem)
    rows = metadata_of(cp, case)
    kv = cp.start_gather(case["kv"])
    selection = cp.indexer_topk(case["index_q"], case["index_k"], case["head_weights"], rows,
                                case["index_topk"], threads=1)
    plan = None
    if planned:
        plan = ft.build_selection_plan(selection.topk_indices, cp.total_tokens, case["q"].shape[1],
                                       selection.topk_length)
    out, lse = cp.sparse_attention(case["q"], kv, selection.topk_indices, case["softmax_scale"],
                                   selection.topk_length, case["attn_sink"], return_lse=True,
                                   plan=plan, invariant=not planned, threads=1)
    return {**results_of(case, rows, selection, out), "lse": lse}


def twice(cp, problem):
    """grad_kv when two attentions use one gather."""
    case = inputs_of(cp, problem)
    rows = metadata_of(cp, case)
    kv = cp.start_gather(case["kv"])
    selection = cp.indexer_topk(case["index_q"], case["index_k"], case["head_weights"], rows,
                                case["index_topk"], threads=1)
    arguments = (case["q"], kv, selection.topk_indices, case["softmax_scale"],
                 selection.topk_length)
    out = cp.sparse_attention(*arguments, threads=1) + cp.sparse_attention(*arguments, threads=1)
    out.backward(case["grad_out"])
    return case["kv"].grad


def scored(cp, problem):
    """The selection's scores and the gradients of the indexer."""
    case = inputs_of(cp, problem)
    inputs = [case[name].clone().requires_grad_() for name in ("index_q", "index_k",
                                                               "head_weights")]
    selection = cp.indexer_topk(*inputs, metadata_of(cp, case), case["index_topk"],
                                return_scores=True, threads=1)
    selection.topk_scores.backward(case["grad_scores"])
    grads = (x.grad for x in inputs)
    return dict(zip(("topk_scores", "grad_index_q", "grad_index_k", "grad_head_weights"),
                    (selection.topk_scores.detach(), *grads)))


def sum_of_gradients(cp, device, dtype):
    """The gradient of a BF16 tensor, of which rank 0 has 1 + 2^-8 and rank 1 has -1."""
    x = torch.ones(cp.local_tokens, 3, dtype=torch.bfloat16, device=device, requires_grad=True)
    full = cp.gather(x, dtype=dtype)
    factor = {0: 1 + 2.0**-8, 1: -1.0}.get(cp.rank, 0.0)
    (full.float() * factor).sum().backward()
    return x.grad


def refusal(function, *args, **options):
    try:
        function(*args, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def example():
    """What the program of the documentation prints."""
    source, = re.findall(r"```python3\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, PAGE, "exec"), {"__name__": "example"})
    return output.getvalue()


def found_by(rank, ranks, problem):
    total, device = problem["q"].shape[0], problem["q"].device
    found = {}
    for order in ORDERS:
        cp = ContextParallel(total, order=order)
        found[order] = {
            "query_indices": cp.query_indices(device),
            "in one call": in_one_call(cp, problem),
            "in steps": in_steps(cp, problem),
            "with a plan": in_steps(cp, problem, planned=True),
            "twice": twice(cp, problem),
            "gathered": {name: cp.gather(cp.shard(value)) for name, value in problem.items()
                         if name in SHARDED},
            "sum in float32": sum_of_gradients(cp, device, torch.float32),
            "sum in bfloat16": sum_of_gradients(cp, device, None),
        }
        if device.type == "cpu":  # no GPU backend has indexer_backward in this version
            found[order]["scored"] = scored(cp, problem)
    if device.type == "cpu":
        found["example"] = example()
    some = dist.new_group([0])
    found["refusals"] = {
        "contiguous": refusal(ContextParallel, ranks + 1),
        "zigzag": refusal(ContextParallel, ranks, order="zigzag"),
        "group": refusal(ContextParallel, total, group=some),
    }
    if rank == 0:
        found["alone"] = in_steps(ContextParallel(total, order="zigzag", group=some), problem)
    return found


def run_rank(backend, rank, ranks, folder):
    torch.set_num_threads(1)
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    before = refusal(ContextParallel, ranks)
    join(backend, rank, ranks, folder)
    found = found_by(rank, ranks, torch.load(f"{folder}/problem.pt", map_location=device))
    found["refusals"]["no group"] = before
    torch.save(found, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


def main():
    backend, ranks, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # Forked, because importing PyTorch takes longer than all that a rank does, and no thread runs
    # yet. CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "fork")
    processes = [context.Process(target=run_rank, args=(backend, rank, ranks, folder))
                 for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in processes))


if __name__ == "__main__":
    main()
