"""How long a step takes: as it is, with exchanges that nothing runs beside, and without them."""

from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from flashdsa.torch.context_parallel import ContextParallel

from .equality import count_unequal_rows
from .exchanges import Copies, Exchanges, gathered_keys, installed
from .problem import Inputs, Problem, make_inputs, run_step
from .ranks import Ranks

AS_IT_IS, AWAITED, LOCAL = "as it is", "awaited", "local"


class RankTimes(NamedTuple):
    """Of one rank."""

    ms: dict[str, list[float]]
    """of every timed step, by what became of the exchanges"""
    exchange_bytes: int
    """that it receives in a step"""
    flop: int
    peak_memory_bytes: Optional[int]
    """of PyTorch's allocator, without the keys that are there to be copied"""
    unequal_rows: int
    """whose selection, of the last step, was not that of one rank"""


def time_call(ranks: Ranks, device: torch.device, call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds from where all ranks begin to this rank's end, and the result."""
    ranks.barrier()
    if device.type != "cuda":
        begin = time.perf_counter()
        result = call()
        return (time.perf_counter() - begin) * 1e3, result
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    result = call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last), result


def drop_gradients(inputs: Inputs) -> None:
    """As soon as they are there: a model has use for that of q in the layer's projection alone."""
    def drop(x: Tensor) -> None:
        x.grad = None

    for x in inputs.leaves():
        x.register_post_accumulate_grad_hook(drop)


def time_rank(cp: ContextParallel, problem: Problem, ranks: Ranks, one_rank: Tensor,
              samples: int, warmup: int) -> RankTimes:
    """The ways take turns, step by step, the exchanges as they are last; a played rank has only
    copies."""
    inputs = make_inputs(problem, problem.blocks_of(cp))
    drop_gradients(inputs)
    rows = cp.prepare_packed_metadata(problem.cu_seqlens())
    keys = gathered_keys(problem, cp)
    ways: dict[str, Callable[[], Any]] = {LOCAL: lambda: Copies(cp.rank, keys)}
    if not ranks.simulated:
        ways.update({AWAITED: lambda: Exchanges(awaited=True), AS_IT_IS: Exchanges})

    on_gpu = problem.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ms: dict[str, list[float]] = {way: [] for way in ways}
    for sample in range(-warmup, samples):
        for way, make_exchanges in ways.items():
            topk_indices = None  # no step has the memory of another
            with installed(make_exchanges()) as exchanges:
                elapsed, topk_indices = time_call(
                    ranks, problem.device,
                    lambda: run_step(cp, problem, inputs, rows).selection.topk_indices)
            if sample >= 0:
                ms[way].append(elapsed)
    peak = None
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() - sum(x.nbytes for x in keys)
    return RankTimes(ms, exchanges.bytes, problem.flop(rows.causal_lengths), peak,
                     count_unequal_rows(cp, topk_indices, one_rank))
