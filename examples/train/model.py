"""A small decoder in the manner of GLM-5.2: latent attention (MLA), a lightning indexer that a
group of layers shares, RMS norms, rotary positions, SwiGLU.

Weights and activations have PyTorch's default dtype; BF16 is what the kernels take, and nothing
else is rounded. In comments T is the number of tokens of the batch, n of those on this rank (all T
on one rank); H, H_index and K are as in docs/spec.md.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Optional, Union

import torch
import torch.nn.functional as F
from flashdsa import PackedMetadata
from flashdsa.torch import indexer_topk
from flashdsa.torch.context_parallel import ContextParallel
from torch import Tensor, nn

from shards import OneRank

LATENT = 512  # channels of a key's latent row, of which the value is made too
ROPE = 64  # channels with rotary positions: behind the latent, the first ones of the indexer's
INDEX_DIM = 128


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 4
    layers_per_selection: int = 2
    dim: int = 128
    heads: int = 4
    head_dim: int = 32
    """channels of a head's value, and of its query and key without the rotary ones"""
    mlp_dim: int = 384
    index_heads: int = 4


class Rows(NamedTuple):
    """Where this rank's tokens stand."""

    metadata: PackedMetadata
    """of the rank's rows"""
    shards: Union[ContextParallel, OneRank]
    """how the rows of all ranks come together"""

    @property
    def positions(self) -> Tensor:
        """int32 [n]: a token's place in its document."""
        return self.metadata.causal_lengths - 1


class Selection(NamedTuple):
    """The keys of every query, which a group of layers shares."""

    topk_indices: Tensor
    """int32 [n, 1, K]"""
    topk_length: Tensor
    """int32 [n]"""
    scores: Tensor
    """[n, K], differentiable; -inf in unused slots"""


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, ROPE], channels c and c + ROPE / 2 a pair."""
    frequencies = 10000.0**(-torch.arange(ROPE // 2, device=x.device) / (ROPE // 2))
    angles = positions[:, None, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


def round_to_bf16(x: Tensor) -> Tensor:
    """BF16 values in x's dtype; the gradient passes as it is."""
    return x + (x.bfloat16().to(x.dtype) - x).detach()


def products(q: Tensor, keys: Tensor, indices: Tensor) -> Tensor:
    """[n, heads, K]: q [n, heads, D] times the selected rows of keys [T, D]."""
    return q @ F.embedding(indices.clamp(min=0), keys).transpose(1, 2)


class Indexer(nn.Module):
    """Scores every visible key for a query and selects the K best.

    It learns nothing from the text: it is to select the keys to which attention would look, so its
    input is detached, and its loss compares two distributions over the selected keys.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.index_heads
        self.query = linear(config.dim, self.heads * INDEX_DIM)
        self.key = linear(config.dim, INDEX_DIM)
        self.key_norm = nn.LayerNorm(INDEX_DIM)
        self.weight = linear(config.dim, self.heads)

    def forward(self, x: Tensor, rows: Rows, topk: int) -> Selection:
        x = x.detach()
        q = self.query(x).view(-1, self.heads, INDEX_DIM)
        k = self.key_norm(self.key(x))[:, None]
        q, k = (torch.cat((rotate(part[..., :ROPE], rows.positions), part[..., ROPE:]), -1)
                for part in (q, k))
        q, k = round_to_bf16(q), rows.shards.gather(round_to_bf16(k[:, 0]))
        weights = self.weight(x) * (self.heads * INDEX_DIM)**-0.5
        with torch.no_grad():
            keys = indexer_topk(q.bfloat16(), k.bfloat16(), weights.float(), rows.metadata, topk,
                                threads=torch.get_num_threads())

        # Those of the selection once more, for autograd.
        indices = keys.topk_indices[:, 0]
        scores = (weights[:, :, None] * products(q, k, indices).relu()).sum(1)
        return Selection(keys.topk_indices, keys.topk_length,
                         scores.masked_fill(indices < 0, -torch.inf))


@torch.no_grad()
def attention_over(selection: Selection, q: Tensor, kv: Tensor, scale: float) -> Tensor:
    """[n, K]: how attention spreads over the selected keys, mean of the heads. q [n, H, 576],
    kv [T, 576]."""
    spread = []
    # In pieces: the rows that 128 queries select are many.
    for some_q, indices in zip(q.split(128), selection.topk_indices[:, 0].split(128)):
        logits = (products(some_q, kv, indices) * scale).masked_fill(indices[:, None] < 0,
                                                                     -torch.inf)
        spread.append(logits.softmax(-1).mean(1))
    return torch.cat(spread)


def indexer_loss(selection: Selection, target: Tensor) -> Tensor:
    """Kullback-Leibler divergence from attention to the indexer's softmax, both over the selected
    keys, summed over this rank's rows."""
    unused = selection.topk_indices[:, 0] < 0
    return F.kl_div(selection.scores.log_softmax(-1).masked_fill(unused, 0), target,
                    reduction="sum")


class Attention(nn.Module):
    """MLA. A token leaves one row for all heads: 512 latent channels and 64 rotary ones."""

    def __init__(self, config: Config, selects: bool):
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.scale = (self.head_dim + ROPE)**-0.5
        self.query = linear(config.dim, self.heads * (self.head_dim + ROPE))
        self.latent = linear(config.dim, LATENT + ROPE)
        self.latent_norm = nn.RMSNorm(LATENT)
        self.up_key = nn.Parameter(torch.randn(self.heads, self.head_dim, LATENT) * LATENT**-0.5)
        self.up_value = nn.Parameter(torch.randn(self.heads, LATENT, self.head_dim) * LATENT**-0.5)
        self.out = linear(self.heads * self.head_dim, config.dim, (2 * config.layers)**-0.5)
        self.indexer = Indexer(config) if selects else None

    def forward(self, x: Tensor, rows: Rows, topk: Optional[int], selection: Optional[Selection]
                ) -> tuple[Tensor, Optional[Selection], Tensor]:
        """Attention's output, the selection it used, the loss of its indexer."""
        q = self.query(x).view(-1, self.heads, self.head_dim + ROPE)
        q, q_rope = q[..., :self.head_dim], rotate(q[..., self.head_dim:], rows.positions)
        latent, k_rope = self.latent(x).split((LATENT, ROPE), -1)
        kv = torch.cat((self.latent_norm(latent), rotate(k_rope[:, None], rows.positions)[:, 0]),
                       -1)  # [n, 576]
        if topk is None:
            out, loss = self.dense(q, q_rope, rows.shards.gather(kv), rows), x.new_zeros(())
        else:
            out, selection, loss = self.sparse(x, q, q_rope, kv, rows, topk, selection)
        return self.out(out.flatten(1)), selection, loss

    def dense(self, q: Tensor, q_rope: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """[n, H, head_dim]: every head's own keys and values, of all that a query sees."""
        latent, k_rope = kv.split((LATENT, ROPE), -1)
        k = torch.einsum("tc,hdc->htd", latent, self.up_key)
        k = torch.cat((k, k_rope.expand(self.heads, -1, -1)), -1)
        v = torch.einsum("tc,hcd->htd", latent, self.up_value)
        q = torch.cat((q, q_rope), -1).transpose(0, 1)
        first = rows.metadata.starts[:, None]
        keys = torch.arange(len(kv), device=kv.device)
        visible = (keys >= first) & (keys < first + rows.metadata.causal_lengths[:, None])
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], visible, scale=self.scale)
        return out[0].transpose(0, 1)

    def sparse(self, x: Tensor, q: Tensor, q_rope: Tensor, kv: Tensor, rows: Rows, topk: int,
               selection: Optional[Selection]) -> tuple[Tensor, Selection, Tensor]:
        """[n, H, head_dim] over the selected keys. The up-projection of keys moves into q, that of
        values behind the sum over keys, so that all heads attend to the latent rows themselves."""
        keys = rows.shards.start_gather(kv.bfloat16()[:, None])  # travels behind what follows
        q = torch.cat((torch.einsum("thd,hdc->thc", q, self.up_key), q_rope), -1).bfloat16()
        loss = x.new_zeros(())
        if self.indexer is not None:
            selection = self.indexer(x, rows, topk)
            target = attention_over(selection, q.to(x.dtype), keys.wait()[:, 0].to(x.dtype),
                                    self.scale)
            loss = indexer_loss(selection, target)
        out = rows.shards.sparse_attention(
            q, keys, selection.topk_indices, self.scale, selection.topk_length, invariant=True,
            threads=torch.get_num_threads())
        return torch.einsum("thc,hcd->thd", out.to(x.dtype), self.up_value), selection, loss


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate = linear(config.dim, config.mlp_dim)
        self.up = linear(config.dim, config.mlp_dim)
        self.down = linear(config.mlp_dim, config.dim, (2 * config.layers)**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: Config, selects: bool):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention = Attention(config, selects)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rows: Rows, topk: Optional[int], selection: Optional[Selection]
                ) -> tuple[Tensor, Optional[Selection], Tensor]:
        out, selection, loss = self.attention(self.attention_norm(x), rows, topk, selection)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), selection, loss


class Model(nn.Module):
    """Bytes to logits of the next byte."""

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(256, config.dim)
        self.layers = nn.ModuleList(Layer(config, number % config.layers_per_selection == 0)
                                    for number in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = linear(config.dim, 256)

    def forward(self, tokens: Tensor, rows: Rows, topk: Optional[int]) -> tuple[Tensor, Tensor]:
        """tokens int64 [n]. topk keys for every query, by FlashDSA; None: all that it sees, by
        PyTorch. Returns logits [n, 256] and the sum of the indexers' losses."""
        x, selection = self.embedding(tokens), None
        losses = []
        for layer in self.layers:
            x, selection, loss = layer(x, rows, topk, selection)
            losses.append(loss)
        return self.head(self.norm(x)), torch.stack(losses).sum()
