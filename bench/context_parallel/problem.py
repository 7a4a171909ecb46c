"""What is computed: the step of a model's attention, and its inputs."""

from __future__ import annotations

import zlib
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from flashdsa import PackedMetadata, Selection
from flashdsa.torch import build_selection_plan
from flashdsa.torch.context_parallel import ContextParallel

INDEX_DIM, VALUE_DIM = 128, 512
# Rows over which the indexer's queries change: at K of 64 K keys neighbours share 9 of 10.
DRIFT = 256


class Problem(NamedTuple):
    """One causal document of `tokens`, whose layers share one selection."""

    tokens: int
    ranks: int
    heads: int
    index_heads: int
    topk: int
    head_dim: int
    layers: int
    query_rank: int
    """of the projection that makes q; 0: q is given"""
    planned: bool
    """whether the layers share a plan too"""
    seed: int
    threads: int
    device: torch.device

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def block(self) -> int:
        """Rows that are made at once, whoever holds them; either order gives a rank two blocks."""
        return self.tokens // (2 * self.ranks)

    def blocks_of(self, cp: ContextParallel) -> list[int]:
        return [position // self.block
                for position in cp.query_indices()[::self.block].tolist()]

    def all_blocks(self) -> list[int]:
        return list(range(2 * self.ranks))

    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, self.tokens], dtype=torch.int32, device=self.device)

    def exchange_bytes(self) -> int:
        """What a rank receives in a step, by the formulas of docs/python.md."""
        index_k, kv, grad_kv = 2 * INDEX_DIM, 2 * self.head_dim, 4 * self.head_dim
        per_token = index_k + self.layers * (kv + grad_kv)
        return per_token * self.tokens * (self.ranks - 1) // self.ranks

    def flop(self, causal_lengths: Tensor) -> int:
        """Of rows, by the formulas of docs/benchmarks.md."""
        lengths = causal_lengths.long()
        pairs = int(lengths[lengths > self.topk].sum())
        picks = int(lengths.clamp(max=self.topk).sum())
        attention = 2 * self.heads * picks * (4 * self.head_dim + 3 * VALUE_DIM)
        projection = 6 * len(lengths) * self.query_rank * self.heads * self.head_dim
        return 2 * self.index_heads * INDEX_DIM * pairs + self.layers * (attention + projection)

    def normal(self, name: str, blocks: Sequence[int], *shape: int,
               deviation: float = 1 / 16) -> Tensor:
        """bfloat16 [rows of the blocks, *shape]."""
        x = torch.empty(len(blocks) * self.block, *shape, dtype=torch.bfloat16, device=self.device)
        for part, block in zip(x.split(self.block), blocks):
            part.normal_(0, deviation, generator=self._generator(name, block))
        return x

    def index_k(self, blocks: Sequence[int]) -> Tensor:
        return self.normal("index_k", blocks, INDEX_DIM, deviation=1.0)

    def kv(self, layer: int, blocks: Sequence[int]) -> Tensor:
        return self.normal(f"kv {layer}", blocks, 1, self.head_dim)

    def weight(self, layer: int) -> Tensor:
        """bfloat16 [query_rank, H D]"""
        weight = torch.empty(self.query_rank, self.heads * self.head_dim, dtype=torch.bfloat16,
                             device=self.device)
        return weight.normal_(0, self.query_rank**-0.5, generator=self._generator("weight", layer))

    def drifting(self, name: str, blocks: Sequence[int], width: int) -> Tensor:
        """float32 [rows of the blocks, width], of deviation 1: a row is the sum of DRIFT rows of
        noise, all but one of which it shares with the next row."""
        parts = []
        for block in blocks:
            x = torch.randn(self.block + DRIFT - 1, width, device=self.device,
                            generator=self._generator(name, block))
            summed = 1
            while summed < DRIFT:
                x = x[:-summed] + x[summed:]
                summed *= 2
            parts.append(x * DRIFT**-0.5)
        return torch.cat(parts)

    def _generator(self, name: str, block: int) -> torch.Generator:
        seed = zlib.crc32(f"{self.seed} {name} {block}".encode())
        return torch.Generator(self.device).manual_seed(seed)


class IndexInputs(NamedTuple):
    index_q: Tensor
    """bfloat16 [rows, H_index, 128]"""
    index_k: Tensor
    """bfloat16 [rows, 128]"""
    head_weights: Tensor
    """float32 [rows, H_index]"""


def index_inputs(problem: Problem, blocks: Sequence[int]) -> IndexInputs:
    heads = problem.index_heads
    drifting = problem.drifting("index", blocks, heads * (INDEX_DIM + 1))
    drifting = drifting.view(-1, heads, INDEX_DIM + 1)
    return IndexInputs(drifting[..., :INDEX_DIM].bfloat16(), problem.index_k(blocks),
                       (1 + drifting[..., INDEX_DIM] / 4) * (heads * INDEX_DIM)**-0.5)


class Layer(NamedTuple):
    kv: Tensor
    """bfloat16 [rows, 1, D]"""
    q: Optional[Tensor]
    """bfloat16 [rows, H, D]"""
    weight: Optional[Tensor]
    """bfloat16 [query_rank, H D], where a projection makes q"""


class Inputs(NamedTuple):
    index: IndexInputs
    layers: list[Layer]
    x: Optional[Tensor]
    """bfloat16 [rows, query_rank]"""
    grad_out: Tensor
    """bfloat16 [rows, H, 512], the same in all layers"""

    def leaves(self) -> list[Tensor]:
        candidates = [self.x, *(x for layer in self.layers for x in layer)]
        return [x for x in candidates if x is not None]


def make_inputs(problem: Problem, blocks: Sequence[int]) -> Inputs:
    """Leaves of autograd."""
    layers, x = [], None
    if problem.query_rank:
        x = problem.normal("x", blocks, problem.query_rank).requires_grad_()
    for layer in range(problem.layers):
        q = weight = None
        if problem.query_rank:
            weight = problem.weight(layer).requires_grad_()
        else:
            q = problem.normal(f"q {layer}", blocks, problem.heads, problem.head_dim)
            q.requires_grad_()
        layers.append(Layer(problem.kv(layer, blocks).requires_grad_(), q, weight))
    return Inputs(index_inputs(problem, blocks), layers, x,
                  problem.normal("grad_out", blocks, problem.heads, VALUE_DIM))


class StepResult(NamedTuple):
    selection: Selection
    outs: list[Tensor]


def run_step(cp: ContextParallel, problem: Problem, inputs: Inputs,
             rows: PackedMetadata) -> StepResult:
    """Forward and backward of all layers. Keys travel as early as a model can send them: those of
    the indexer first, which waits for nothing else; kv before q is made."""
    index_k = cp.start_gather(inputs.index.index_k)
    selection = plan = None
    outs = []
    for layer in inputs.layers:
        kv = cp.start_gather(layer.kv)
        q = layer.q
        if q is None:
            q = (inputs.x @ layer.weight).view(-1, problem.heads, problem.head_dim)
        if selection is None:
            selection = cp.indexer_topk(inputs.index.index_q, index_k, inputs.index.head_weights,
                                        rows, problem.topk, threads=problem.threads)
            if problem.planned:
                plan = build_selection_plan(selection.topk_indices, problem.tokens, problem.heads,
                                            selection.topk_length)
        outs.append(cp.sparse_attention(q, kv, selection.topk_indices, problem.softmax_scale,
                                        selection.topk_length, plan=plan,
                                        threads=problem.threads))
    torch.autograd.backward(outs, [inputs.grad_out] * len(outs))
    return StepResult(selection, outs)
