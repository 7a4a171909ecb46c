"""Real text as packed batches of bytes."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import random
from collections import Counter
from typing import Iterator, Sequence

import torch
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
LICENCES = pathlib.Path("/usr/share/common-licenses")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Documents one behind the other; every byte shall tell the next one of its document."""

    tokens: Tensor
    """int64 [T]"""
    targets: Tensor
    """int64 [T]"""
    cu_seqlens: Tensor
    """int32 [N+1]: where documents start and end"""


def default_texts() -> list[pathlib.Path]:
    """The licence texts that Debian has; elsewhere this project's pages."""
    licences = [path for path in LICENCES.glob("*") if path.is_file() and not path.is_symlink()]
    return sorted(licences) or [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def unigram_entropy(documents: Sequence[bytes]) -> float:
    """Nats per byte of the best guess that knows how frequent bytes are, and nothing else."""
    counts = Counter(b"".join(documents))
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def batches(documents: Sequence[bytes], tokens: int, length: int, seed: int) -> Iterator[Batch]:
    """Endless batches of exactly `tokens` bytes, the same for the same seed. Documents, one of at
    least 2 bytes among them, are cut into pieces of at most `length` bytes, of which each comes
    once before any comes again; the last one of a batch is cut to fit."""
    pieces = [document[start:start + length + 1] for document in documents
              for start in range(0, len(document) - 1, length)]
    order = random.Random(seed)
    queue: list[bytes] = []
    while True:
        inputs, targets, cu_seqlens = bytearray(), bytearray(), [0]
        while len(inputs) < tokens:
            if not queue:
                queue = order.sample(pieces, len(pieces))
            piece = queue.pop()[:tokens - len(inputs) + 1]
            inputs += piece[:-1]
            targets += piece[1:]
            cu_seqlens.append(len(inputs))
        yield Batch(torch.tensor(list(inputs)), torch.tensor(list(targets)),
                    torch.tensor(cu_seqlens, dtype=torch.int32))
