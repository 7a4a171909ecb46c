"""What stands between flashdsa.torch.context_parallel and torch.distributed while a step runs."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional, Sequence

from torch import Tensor

from flashdsa.torch import context_parallel
from flashdsa.torch.context_parallel import ContextParallel

from .problem import Problem


class Done:
    """The work of an exchange that is over."""

    def wait(self) -> None:
        pass


class Exchanges:
    """Those of torch.distributed. `bytes` counts what this rank receives by them; with `awaited`
    nothing runs beside them."""

    def __init__(self, awaited: bool = False):
        self.bytes = 0
        self._awaited = awaited
        self._all_gather = context_parallel._all_gather
        self._reduce_scatter = context_parallel._reduce_scatter

    def all_gather(self, received: Tensor, own: Tensor, **options: Any) -> Any:
        self.bytes += received.nbytes - own.nbytes
        return self._started(self._all_gather(received, own, **options))

    def reduce_scatter(self, own: Tensor, grad: Tensor, **options: Any) -> Any:
        self.bytes += grad.nbytes - own.nbytes
        return self._started(self._reduce_scatter(own, grad, **options))

    def _started(self, work: Any) -> Any:
        if self._awaited:
            work.wait()
            return Done()
        return work


class Copies:
    """Copies within this rank. `gathered` are the results of a step's gathers, in their order and
    in that of ranks; of a gradient this rank's rows arrive as they are. `bytes` counts what did not
    travel, and `grads` takes what was to be summed."""

    def __init__(self, rank: int, gathered: Sequence[Tensor], grads: Optional[list[Tensor]] = None):
        self.bytes = 0
        self._rank = rank
        self._gathered = iter(gathered)
        self._grads = grads

    def all_gather(self, received: Tensor, own: Tensor, **_: Any) -> Done:
        self.bytes += received.nbytes - own.nbytes
        received.copy_(next(self._gathered))
        return Done()

    def reduce_scatter(self, own: Tensor, grad: Tensor, **_: Any) -> Done:
        self.bytes += grad.nbytes - own.nbytes
        own.copy_(grad.narrow(0, self._rank * len(own), len(own)))
        if self._grads is not None:
            self._grads.append(grad)
        return Done()


def gathered_keys(problem: Problem, cp: ContextParallel) -> list[Tensor]:
    """What the gathers of a step bring, for `Copies`."""
    blocks = problem.all_blocks()
    keys = [problem.index_k(blocks),
            *(problem.kv(layer, blocks) for layer in range(problem.layers))]
    return [cp.to_rank_order(x) for x in keys]


@contextlib.contextmanager
def installed(exchanges: Any) -> Iterator[Any]:
    """Within it, ContextParallel exchanges by `exchanges`."""
    saved = context_parallel._all_gather, context_parallel._reduce_scatter
    context_parallel._all_gather = exchanges.all_gather
    context_parallel._reduce_scatter = exchanges.reduce_scatter
    try:
        yield exchanges
    finally:
        context_parallel._all_gather, context_parallel._reduce_scatter = saved
