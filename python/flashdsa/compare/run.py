"""One run: every operation of every workload, FlashDSA beside one peer after the other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch

from . import operations, workloads
from .ceiling import Ceiling, measure_ceiling
from .context import Context
from .library import Library, NotInstalledError
from .operations import OPERATIONS, Inputs
from .ours import FlashDsa
from .record import Measured, Record, make_record
from .shapes import SHAPES
from .timing import Timing, peak_bytes, time_calls
from .workloads import WORKLOADS, Problem, Selection


@dataclasses.dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    operations: Sequence[str]
    workloads: Sequence[str]
    shapes: Sequence[str]
    regimes: Sequence[str]
    l2: Sequence[str]
    plans: Sequence[str]
    backend: str
    device: torch.device
    threads: int
    rows: int = 0
    seed: int = 1
    repeats: int = 0
    min_seconds: float = 0.5
    text_file: Optional[str] = None


@dataclasses.dataclass
class Peer:
    """A library and its version, or why it is not there."""

    library: Library
    version: str
    loaded: bool

    @property
    def full_name(self) -> str:
        return f"{self.library.name}@{self.version}"


def load_peers(libraries: Sequence[Library]) -> list[Peer]:
    """Raises CompareError where a peer is FlashDSA itself."""
    peers = []
    for library in libraries:
        try:
            peers.append(Peer(library, library.load(), True))
        except NotInstalledError as error:
            peers.append(Peer(library, str(error), False))
    return peers


class Comparison:
    """The records of a run, and what was left out of it."""

    def __init__(self, request: Request, peers: Sequence[Peer], context: Context):
        self._request = request
        self._peers = [peer for peer in peers if peer.loaded]
        self._context = context
        self.left_out: list[str] = []
        self.good = True

    def records(self) -> Iterator[Record]:
        """One after the other, as they are measured."""
        for workload in self._request.workloads:
            for shape in self._request.shapes:
                reason = workloads.refusal(WORKLOADS[workload], SHAPES[shape])
                if reason:
                    self._leave_out(reason)
                else:
                    yield from self._of_problem(self._make_problem(workload, shape))

    @functools.cached_property
    def _ceilings(self) -> dict[str, Ceiling]:
        request = self._request
        return {regime: measure_ceiling(Timing(regime, min_seconds=request.min_seconds),
                                        request.device) for regime in request.regimes}

    def _make_problem(self, workload: str, shape: str) -> Problem:
        request = self._request
        return workloads.make_problem(WORKLOADS[workload], SHAPES[shape], request.device,
                                      rows=request.rows, seed=request.seed,
                                      text_file=request.text_file)

    def _of_problem(self, problem: Problem) -> Iterator[Record]:
        timed, judged = (self._inputs(each) for each in (problem, problem.sharpened()))
        for name in self._request.operations:
            reason = operations.refusal(name, problem)
            if reason:
                self._leave_out(reason)
            else:
                yield from self._of_operation(name, timed, judged)

    def _inputs(self, problem: Problem) -> Inputs:
        forward = self._ours("none").forward(problem, problem.selection)
        return Inputs(problem, problem.selection, forward)

    def _of_operation(self, name: str, timed: Inputs, judged: Inputs) -> Iterator[Record]:
        problem = timed.problem
        peers = [(peer, call) for peer in self._peers
                 if (call := self._peer_call(peer, name, timed, judged)) is not None]
        for plan_use in _plan_uses(name, self._request.plans):
            library, selection = self._ours(plan_use), timed.selection
            if plan_use == "reused":
                selection = library.prepare(problem, selection)
            ours = self._checked(name, library, timed._replace(selection=selection),
                                 judged._replace(selection=selection))
            for timing in self._timings():
                fields = self._fields(name, problem, timing)
                fields.update(self._plan_fields(library, problem, selection, plan_use, timing))
                for peer, theirs in peers or [(None, None)]:
                    yield self._measure(name, fields, problem, timing, ours, peer, theirs)

    def _ours(self, plan_use: str) -> FlashDsa:
        return FlashDsa(self._request.backend, self._request.threads, plan_use)

    def _peer_call(self, peer: Peer, name: str, timed: Inputs, judged: Inputs) -> Optional[_Call]:
        """None where a peer does not have the operation, or does not take the problem."""
        library = peer.library
        if name not in library.operations:
            return None
        reason = library.refusal(name, timed.problem)
        if not reason:
            try:
                return self._checked(name, library, timed, judged)
            except Exception as error:  # whatever another library raises
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
        self._leave_out(f"{name} of {library.name}: {reason}")
        return None

    def _checked(self, name: str, library: Library, timed: Inputs, judged: Inputs) -> _Call:
        """The call to time, after the library's result for the other inputs has been judged."""
        operation, device = OPERATIONS[name], timed.problem.device
        tight = isinstance(library, FlashDsa) and device.type == "cpu"
        error = operation.check(judged, operation.run(library, judged), tight)
        self.good &= error.ok
        run = functools.partial(operation.run, library, timed)
        return _Call(run, error, peak_bytes(run, device))

    def _timings(self) -> Iterator[Timing]:
        for regime in self._request.regimes:
            for l2 in self._request.l2:
                yield Timing(regime, l2, self._request.repeats, self._request.min_seconds)

    def _measure(self, name: str, fields: Record, problem: Problem, timing: Timing, ours: _Call,
                 peer: Optional[Peer], theirs: Optional[_Call]) -> Record:
        calls = [call for call in (ours, theirs) if call is not None]
        times = time_calls([call.run for call in calls], timing, problem.device)
        measured = [Measured(call.error, of_call, call.peak_bytes)
                    for call, of_call in zip(calls, times)]
        return make_record(fields, OPERATIONS[name].work(problem), self._ceilings[timing.regime],
                           measured[0], peer and peer.full_name,
                           measured[1] if theirs is not None else None, self._context)

    def _fields(self, name: str, problem: Problem, timing: Timing) -> Record:
        shape = problem.shape
        return {"op": name, "backend": self._request.backend, "workload": problem.workload,
                "shape": shape.full_name(problem.t_k), "heads": shape.heads,
                "index_heads": shape.index_heads, "t_q": problem.t_q, "t_k": problem.t_k,
                "topk": shape.topk, "head_dim": shape.head_dim, "layers": OPERATIONS[name].layers,
                "threads": self._request.threads, "seed": self._request.seed,
                "regime": timing.regime, "l2": timing.l2, "simulated": False,
                "overlap": problem.overlap if name in ("forward", "backward") else None}

    def _plan_fields(self, library: FlashDsa, problem: Problem, selection: Selection,
                     plan_use: str, timing: Timing) -> Record:
        """Of a plan that is reused also the median of building it, which no row's time holds."""
        plan, milliseconds = selection.plan, None
        if plan is not None:
            build = functools.partial(library.build_plan, problem, selection)
            milliseconds = float(np.median(time_calls([build], timing, problem.device)))
        return {"plan": plan_use, "plan_bytes": plan and plan.nbytes, "plan_ms": milliseconds}

    def _leave_out(self, reason: str) -> None:
        if reason not in self.left_out:
            self.left_out.append(reason)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A library's call of one operation, and what the judge says of the library."""

    run: Callable[[], Any]
    error: Any
    peak_bytes: Optional[int]


def _plan_uses(operation: str, wanted: Sequence[str]) -> Sequence[str]:
    """The indexer has no plan. A step builds one for its layers, or none."""
    if operation == "topk":
        return ["none"]
    if operation == "step":
        return list(dict.fromkeys("none" if use == "none" else "built" for use in wanted))
    return wanted
