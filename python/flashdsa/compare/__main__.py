"""The command `flashdsa-compare`. Exit code 0: every result is right, 1: one is not, 2: bad usage,
3: something that the run needs is not there."""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional

from .errors import CHECK_FAILED, SUCCESS, CompareError, UnavailableError

_HOST_ROWS = 512
_DEFAULT_WORKLOADS = "random,drift90,sft4k"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parse(arguments)
        if importlib.util.find_spec("torch") is None:
            raise UnavailableError("PyTorch must be installed, got none: pip install "
                                   "'flashdsa[compare]'")
        if options.from_results:
            return _draw(options)
        return _compare(options, shlex.join(["flashdsa-compare", *arguments]))
    except CompareError as error:
        print(f"flashdsa-compare: {error}", file=sys.stderr)
        return error.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CompareError(message)


def _names(text: str) -> list[str]:
    return text.split(",")


def _count(most: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) > most:
            raise argparse.ArgumentTypeError(f"must be a whole number in 0..{most}, got {text!r}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number from 0 on, got {text!r}")
    return value


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="flashdsa-compare",
                     description="Times FlashDSA beside other libraries on the same inputs, after "
                     "checking the results of all. docs/benchmarks.md explains the table.")
    add = parser.add_argument
    add("--op", type=_names, default="topk,forward,backward,step",
        help="operations: topk, forward, backward, step; default all")
    add("--workload", type=_names, default=_DEFAULT_WORKLOADS,
        help=f"workloads by name; default {_DEFAULT_WORKLOADS}")
    add("--shape", type=_names, default="glm5.2",
        help="glm5.2, glm5.2-tp8, glm5.2-cp8-32k, dsv3.2; default glm5.2")
    add("--peer", type=_names,
        help="flash_mla, cudnn, flash_mla+cudnn, tilelang, torch; default all that are installed")
    add("--backend", default="auto", help="auto, cpu or sm90; auto is sm90 where there is a GPU")
    add("--rows", type=_count(),
        help=f"the last N query rows of a workload, 0: all; default all, on the host {_HOST_ROWS}")
    add("--regime", type=_names, default="warm", help="cold, warm, sustained; default warm")
    add("--plan", type=_names, default="built",
        help="plans of forward, backward and step: none, reused, built; default built")
    add("--l2", type=_names, default="warm", help="warm, flushed; default warm")
    add("--text-file", metavar="FILE", help="of workload text: what `flashdsa synth --text` wrote")
    add("--seed", type=_count(), default=1)
    add("--repeats", type=_count(), default=0, help="timed rounds; default as the regime has it")
    add("--min-seconds", type=_seconds, default=0.5, help="on the host: time of a row at least")
    add("--threads", type=_count(1024), default=0, help="of the host; default as many as it has")
    add("--json", type=Path, metavar="FILE", help="append one JSON object a row")
    add("--csv", type=Path, metavar="FILE", help="append one line a row")
    add("--plots", type=Path, metavar="DIR", help="draw the rows: SVG and PNG, light and dark")
    add("--from", dest="from_results", type=_names, metavar="FILE,...",
        help="run nothing: draw the rows of results files")
    add("--commit", default="unknown", help="of the build, for the records")
    return parser.parse_args(arguments)


def _draw(options: argparse.Namespace) -> int:
    from .plots import write_plots
    from .record import read_json_lines

    if options.plots is None:
        raise CompareError("--from must come with --plots, got none")
    records = [record for path in options.from_results for record in read_json_lines(Path(path))]
    write_plots(options.plots, records)
    return SUCCESS


def _compare(options: argparse.Namespace, command: str) -> int:
    from .context import describe_run
    from .plots import load_matplotlib, write_plots
    from .record import append_csv_line, append_json_line, check_appendable
    from .run import Comparison, load_peers
    from .table import format_table, records_table

    request = _request(options)
    _require_text(request)
    peers = load_peers(_libraries(options))
    outputs = [(path, append) for path, append in ((options.json, append_json_line),
                                                   (options.csv, append_csv_line)) if path]
    for path, _ in outputs:
        check_appendable(path)
    if options.plots:
        load_matplotlib()
    context = describe_run(request.device, request.threads, options.commit, command)
    _print_header(context)
    print(format_table([["peer", "version", "operations"]]
                       + [[peer.library.name, peer.version, ", ".join(peer.library.operations)]
                          for peer in peers]), flush=True)

    comparison = Comparison(request, peers, context)
    records = []
    for record in comparison.records():
        records.append(record)
        for path, append in outputs:
            append(path, record)
    if not records:
        raise CompareError("--op must name an operation that a workload has, got none: "
                           f"{comparison.left_out[0]}")
    print(records_table(records), end="")
    for reason in comparison.left_out:
        print(f"left out: {reason}")
    if options.plots:
        write_plots(options.plots, records)
    return SUCCESS if comparison.good else CHECK_FAILED


def _print_header(context: Any) -> None:
    print(f"device   {context.device}\nclock    {context.clock}, load {context.load:.2f}")
    if context.cuda:
        print(f"driver   {context.driver}, CUDA {context.cuda}")
    print(f"build    {context.build}, commit {context.commit}, PyTorch {context.torch}\n"
          f"command  {context.command}\n")


def _libraries(options: argparse.Namespace) -> list[Any]:
    from .peers import PEERS

    if options.peer is None:
        return [peer() for peer in PEERS.values()]
    return [PEERS[name]() for name in _among("--peer", options.peer, PEERS)]


def _request(options: argparse.Namespace) -> Any:
    import torch

    from .operations import OPERATIONS
    from .ours import PLAN_USES
    from .run import Request
    from .shapes import SHAPES
    from .timing import REGIMES
    from .workloads import WORKLOADS

    backend = _among("--backend", [options.backend], ("auto", "cpu", "sm90"))[0]
    if backend == "auto":
        backend = "sm90" if torch.cuda.is_available() else "cpu"
    on_host = backend == "cpu"
    _require_backend(backend)
    if options.threads and on_host:
        torch.set_num_threads(options.threads)
    rows = options.rows
    if rows is None:
        rows = _HOST_ROWS if on_host else 0
    regimes = _among("--regime", options.regime, ("warm",) if on_host else REGIMES)
    l2 = _among("--l2", options.l2, ("warm",) if on_host else ("warm", "flushed"))
    return Request(
        operations=_among("--op", options.op, OPERATIONS),
        workloads=_among("--workload", options.workload, WORKLOADS),
        shapes=_among("--shape", options.shape, SHAPES), regimes=regimes, l2=l2,
        plans=_among("--plan", options.plan, PLAN_USES), backend=backend,
        device=torch.device("cpu" if on_host else "cuda", None if on_host else 0),
        threads=torch.get_num_threads() if on_host else 1, rows=rows, seed=options.seed,
        repeats=options.repeats, min_seconds=options.min_seconds, text_file=options.text_file)


def _require_backend(backend: str) -> None:
    from .. import backends

    found = next((status for status in backends() if status.name == backend), None)
    if found is None or not found.available:
        raise UnavailableError(f"--backend {backend} must be available, got: "
                               f"{found.detail if found else 'no such backend'}")


def _require_text(request: Any) -> None:
    """Before anything is measured."""
    from .shapes import SHAPES
    from .workloads import WORKLOADS, read_text, refusal

    for shape in (SHAPES[name] for name in request.shapes):
        if "text" in request.workloads and not refusal(WORKLOADS["text"], shape):
            read_text(request.text_file, shape)


def _among(option: str, names: Sequence[str], known: Any) -> Sequence[str]:
    for name in names:
        if name not in known:
            raise CompareError(f"{option} must be among {', '.join(known)}, got {name!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())
