"""The ranks of a run: processes that torchrun started, or played one after another by this one."""

from __future__ import annotations

from typing import Any, Iterator, Union

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


class Processes:
    """Every process is a rank."""

    simulated = False

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self.backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(self.backend, device_id=device if on_gpu else None)
        self.size = dist.get_world_size()

    def play(self) -> Iterator[int]:
        """The ranks of this process, each while it has that rank in the default group."""
        yield dist.get_rank()

    def barrier(self) -> None:
        dist.barrier()

    def collect(self, own: list[Any]) -> list[Any]:
        """Something of every rank, by what this process has of its ranks."""
        everything: list[Any] = [None] * self.size
        dist.all_gather_object(everything, own[0])
        return everything

    def close(self) -> None:
        dist.destroy_process_group()


class PlayedRanks:
    """This process is all ranks in turn, in groups of PyTorch's backend that exchanges nothing."""

    simulated = True
    backend = "fake"

    def __init__(self, size: int):
        self.size = size

    def play(self) -> Iterator[int]:
        for rank in range(self.size):
            dist.init_process_group(self.backend, store=FakeStore(), rank=rank,
                                    world_size=self.size)
            try:
                yield rank
            finally:
                dist.destroy_process_group()

    def barrier(self) -> None:
        pass

    def collect(self, own: list[Any]) -> list[Any]:
        return own

    def close(self) -> None:
        pass


Ranks = Union[Processes, PlayedRanks]
