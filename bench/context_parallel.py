#!/usr/bin/env python3
"""The training step of several context-parallel ranks: equality, time, exchange, memory, balance.

    torchrun --nproc-per-node 8 bench/context_parallel.py --json results.jsonl
    python bench/context_parallel.py --simulate 8

One causal document, whose layers share one selection: indexer, forward and backward. NCCL between
GPUs, gloo on the host. With --simulate one process plays the ranks one after another; nothing is
exchanged then. docs/benchmarks.md says what the columns mean. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import sys
from typing import Any, NoReturn, Optional, Sequence

import torch

from flashdsa.torch.context_parallel import ORDERS, ContextParallel

from context_parallel.equality import select_on_one_rank, worst_figure
from context_parallel.problem import Problem
from context_parallel.ranks import PlayedRanks, Processes, Ranks
from context_parallel.record import (describe_machine, describe_problem, describe_times, overlap,
                                     to_table)
from context_parallel.timing import time_rank

# GLM-5.2 at 128K tokens, and what a host does in seconds.
DEFAULTS = {
    "cuda": {"tokens": 131072, "heads": 64, "index_heads": 32, "topk": 2048, "samples": 10},
    "cpu": {"tokens": 1024, "heads": 4, "index_heads": 4, "topk": 64, "samples": 3},
}
CHECK_TOKENS = 8192
PLANS = ("none", "built")


def fail(sentence: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(f"context_parallel.py: {sentence}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(message)


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = Parser(description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)

    def default(name: str) -> str:
        gpu, host = (DEFAULTS[kind][name] for kind in ("cuda", "cpu"))
        return f"(default: {gpu}, on the host {host})"

    parser.add_argument("--simulate", type=int, metavar="N", help="play N ranks in this process")
    parser.add_argument("--order", choices=(*ORDERS, "both"), default="both")
    parser.add_argument("--tokens", type=int, help=f"of the document {default('tokens')}")
    parser.add_argument("--layers", type=int, default=4, help="that share the selection")
    parser.add_argument("--heads", type=int, help=default("heads"))
    parser.add_argument("--index-heads", type=int, help=default("index_heads"))
    parser.add_argument("--topk", type=int, help=default("topk"))
    parser.add_argument("--head-dim", type=int, choices=(512, 576), default=576)
    parser.add_argument("--query-rank", type=int, default=0,
                        help="width of what every layer projects its queries from, which kv can "
                             "travel beside (default: 0, queries are given)")
    parser.add_argument("--plan", choices=PLANS, default="built",
                        help="built: once in every step, for all layers (default)")
    parser.add_argument("--samples", type=int, help=f"timed steps {default('samples')}")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them")
    parser.add_argument("--check-tokens", type=int,
                        help="of the document on which out and gradients are compared with those "
                             f"of one rank (default: --tokens, at most {CHECK_TOKENS})")
    parser.add_argument("--threads", type=int, default=1, help="of a rank on the host")
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        help="(default: cuda where there is a GPU)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="append the rows to it")
    parser.add_argument("--commit", help="of the build, for the rows")
    options = parser.parse_args(arguments)
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.ranks = options.simulate or int(os.environ.get("WORLD_SIZE", "1"))
    if options.check_tokens is None:
        blocks = 2 * options.ranks
        options.check_tokens = min(options.tokens, CHECK_TOKENS // blocks * blocks)
    check(options)
    return options


def check(options: argparse.Namespace) -> None:
    for name, low, high in (("simulate", 1, 64), ("layers", 1, None), ("heads", 1, 128),
                            ("index_heads", 1, 64), ("topk", 1, 2048), ("query_rank", 0, None),
                            ("samples", 1, None), ("warmup", 0, None), ("threads", 1, None)):
        value = getattr(options, name)
        if value is not None and (value < low or (high is not None and value > high)):
            expected = f"in {low}..{high}" if high is not None else f"at least {low}"
            fail(f"--{name.replace('_', '-')} must be {expected}, got {value}")
    if options.simulate is None and "RANK" not in os.environ:
        fail("expected to be started by torchrun, or --simulate, got neither")
    if options.simulate is not None and "RANK" in os.environ:
        fail("--simulate plays all ranks in one process, got one of torchrun's")
    for name in ("tokens", "check_tokens"):
        value = getattr(options, name)
        if value < 1 or value % (2 * options.ranks) != 0:
            fail(f"--{name.replace('_', '-')} must be a positive multiple of {2 * options.ranks}, "
                 f"twice the ranks, got {value}")
    if options.check_tokens > options.tokens:
        fail(f"--check-tokens must be at most --tokens, {options.tokens}, "
             f"got {options.check_tokens}")
    if options.device == "cuda":
        wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if torch.cuda.device_count() < wanted:
            fail(f"--device cuda needs {wanted} GPUs here, one for every rank, "
                 f"got {torch.cuda.device_count()}")
    if options.json is not None and not options.json.parent.is_dir():
        fail(f"--json cannot write {options.json}: no such folder")


def measure(problem: Problem, order: str, ranks: Ranks, one_rank: torch.Tensor,
            options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The row of an order, and what is wrong with it."""
    check_problem = problem._replace(tokens=options.check_tokens, query_rank=0)
    figures = ranks.collect([worst_figure(check_problem, order, ranks)])
    worst = max(figures, key=lambda figure: figure.share)
    if problem.device.type == "cuda":
        torch.cuda.empty_cache()
    times = ranks.collect([
        time_rank(ContextParallel(problem.tokens, order=order), problem, ranks, one_rank,
                  options.samples, options.warmup) for _ in ranks.play()])
    unequal = sum(rank.unequal_rows for rank in times)

    wrong = []
    if unequal > 0:
        wrong.append(f"rows with another selection than on one rank: {unequal}")
    if not worst.good:
        wrong.append(f"{worst} breaks its bound")
    for number, rank in enumerate(times):
        if rank.exchange_bytes != problem.exchange_bytes():
            wrong.append(f"rank {number} must receive {problem.exchange_bytes()} bytes in a step, "
                         f"received {rank.exchange_bytes}")
    return {"order": order, **describe_times(times), "unequal_rows": unequal,
            "error": str(worst)}, wrong


def command_of(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    launcher = "python" if options.simulate else f"torchrun --nproc-per-node {options.ranks}"
    return shlex.join([*launcher.split(), "bench/context_parallel.py", *arguments])


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.set_num_threads(options.threads)
    sizes = ("tokens", "ranks", "heads", "index_heads", "topk", "head_dim", "layers", "query_rank",
             "seed", "threads")
    problem = Problem(**{name: getattr(options, name) for name in sizes},
                      planned=options.plan == "built", device=device)
    ranks: Ranks = PlayedRanks(options.ranks) if options.simulate else Processes(device)
    one_rank = select_on_one_rank(problem).topk_indices.cpu()
    what = {**describe_problem(problem, options.check_tokens, ranks),
            "overlap": overlap(one_rank, problem.topk)}
    where = {**describe_machine(device), "commit": options.commit,
             "command": command_of(options, arguments)}
    rows, wrong = [], []
    for order in ORDERS if options.order == "both" else [options.order]:
        row, sentences = measure(problem, order, ranks, one_rank, options)
        rows.append({**what, **row, **where})
        wrong += [f"{order}: {sentence}" for sentence in sentences]
    ranks.close()
    if os.environ.get("RANK", "0") == "0":
        print(to_table(rows))
        for sentence in wrong:
            print(f"context_parallel.py: {sentence}", file=sys.stderr)
        if options.json is not None:
            append(options.json, rows)
    return 1 if wrong else 0


def append(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    except OSError as error:
        fail(f"--json cannot write {path}: {error.strerror}")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(map(str, arguments))
    return run(parse(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
