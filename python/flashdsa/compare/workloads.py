"""The workloads by name, and the tensors of one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor

from .. import indexer_topk, prepare_packed_metadata
from . import drift
from .documents import draw_lengths
from .errors import CompareError, UnavailableError
from .selections import KEPT_SHARE, neighbour_overlap, select_rows
from .shapes import VALUE_DIM, Shape

INPUT_SCALE = 0.0625
SHARPENING = 8  # exact in BF16; at 16 gradients of right results cancel too far to be judged
TEXT_TOKENS = 8192
_SFT_SEED = 7


@dataclasses.dataclass(frozen=True)
class Workload:
    """docs/benchmarks.md describes each."""

    name: str
    rows: int
    keys: int
    causal: bool
    drifts: bool

    def lengths(self) -> list[int]:
        """Of the documents."""
        if self.name == "sft4k":
            return draw_lengths(self.keys, 100, 4000, _SFT_SEED)
        return [self.keys]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("random", 8192, 8192, causal=False, drifts=False),
        Workload("random32k", 32768, 32768, causal=False, drifts=False),
        Workload("drift90", 8192, 8192, causal=False, drifts=True),
        Workload("drift90-128k", 4096, 131072, causal=False, drifts=True),
        Workload("long32k", 32768, 32768, causal=True, drifts=True),
        Workload("long128k", 4096, 131072, causal=True, drifts=True),
        Workload("sft4k", 32768, 32768, causal=True, drifts=True),
        Workload("text", TEXT_TOKENS, TEXT_TOKENS, causal=True, drifts=True),
        Workload("single8k", 8192, 8192, causal=True, drifts=True),
        Workload("single32k", 32768, 32768, causal=True, drifts=True),
    )
}


class Selection(NamedTuple):
    """Keys of every row, and what a library keeps with them."""

    topk_indices: Tensor
    """int32 [T_q, 1, K]"""
    topk_length: Tensor
    """int32 [T_q]"""
    plan: Any = None


class Rows(NamedTuple):
    """Where every row finds its keys, of a batch without documents."""

    starts: Tensor
    causal_lengths: Tensor
    total_key_tokens: int


@dataclasses.dataclass
class Problem:
    """Inputs of every operation, on one device."""

    workload: str
    shape: Shape
    causal: bool
    t_q: int
    t_k: int
    starts: np.ndarray
    """[T_q], on the host"""
    visible: np.ndarray
    """[T_q], likewise"""
    cu_seqlens: Tensor
    query_indices: Optional[Tensor]
    metadata: Any
    """PackedMetadata, or Rows where the batch is not causal"""
    index_q: Tensor
    index_k: Tensor
    head_weights: Tensor
    q: Tensor
    kv: Tensor
    grad_out: Tensor
    selection: Selection

    @property
    def device(self) -> torch.device:
        return self.q.device

    @functools.cached_property
    def overlap(self) -> Optional[float]:
        return neighbour_overlap(self.selection.topk_indices.cpu().numpy(), self.starts,
                                 self.visible)

    def sharpened(self) -> Problem:
        """The problem to judge by: with q and kv times 8. Logits then deviate by 0.4 (GLM-5.2), in
        the place of 0.006, at which softmax is nearly uniform and hides faults."""
        return dataclasses.replace(self, q=self.q * SHARPENING, kv=self.kv * SHARPENING)

    def build_metadata(self) -> Any:
        """Of a causal batch."""
        return prepare_packed_metadata(self.cu_seqlens, self.t_k, query_indices=self.query_indices)


def make_problem(workload: Workload, shape: Shape, device: torch.device, *, rows: int = 0,
                 seed: int = 1, text_file: Optional[str] = None) -> Problem:
    """The last `rows` rows of a workload, 0: all."""
    text = None
    if workload.name == "text":
        text = {name: tensor.to(device) for name, tensor in read_text(text_file, shape).items()}
    boundaries = _boundaries(workload, text)
    t_k = int(boundaries[-1])
    t_q = min(workload.rows, t_k, shape.rows or t_k, rows or t_k)
    positions = np.arange(t_k - t_q, t_k)
    starts, visible = _visible_keys(workload, boundaries, positions)
    random = torch.Generator(device).manual_seed(seed)

    cu_seqlens = torch.from_numpy(boundaries).to(device)
    query_indices = None
    if t_q < t_k:
        query_indices = torch.from_numpy(positions.astype(np.int32)).to(device)
    if workload.causal:
        metadata = prepare_packed_metadata(cu_seqlens, t_k, query_indices=query_indices)
    else:
        metadata = Rows(*(torch.from_numpy(array).to(device) for array in (starts, visible)), t_k)
    if text is None:
        index_q, head_weights = drift.drifting_queries(
            drift.query_correlations(starts, visible, shape.topk,
                                     KEPT_SHARE if workload.drifts else 0), shape.index_heads,
            random)
        index_k = _normal(random, t_k, drift.INDEX_DIM)
        indices, lengths = select_rows(starts, visible, t_k, shape.topk, workload.drifts,
                                       np.random.default_rng(seed))
        selection = Selection(*(torch.from_numpy(array).to(device) for array in (indices, lengths)))
    else:
        index_q, index_k = text["index_q"][positions], text["index_k"]
        head_weights = text["head_weights"][positions].bfloat16()
        chosen = indexer_topk(index_q, index_k, head_weights, metadata, shape.topk)
        selection = Selection(chosen.topk_indices, chosen.topk_length)
    return Problem(
        workload.name, shape, workload.causal, t_q, t_k, starts, visible, cu_seqlens, query_indices,
        metadata, index_q, index_k, head_weights,
        q=_normal(random, t_q, shape.heads, shape.head_dim) * INPUT_SCALE,
        kv=_normal(random, t_k, 1, shape.head_dim) * INPUT_SCALE,
        grad_out=_normal(random, t_q, shape.heads, VALUE_DIM) * INPUT_SCALE, selection=selection)


def refusal(workload: Workload, shape: Shape) -> str:
    """Why a workload does not have a shape; empty: it does."""
    if shape.keys is None or (workload.name != "text" and workload.keys == shape.keys):
        return ""
    return f"workload {workload.name} does not have the T_k = {shape.keys} of shape {shape.name}"


def read_text(path: Optional[str], shape: Shape) -> dict[str, Tensor]:
    """The indexer's inputs of a file that `flashdsa synth --text` wrote."""
    if path is None:
        raise CompareError("workload text must come with --text-file, got none")
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise UnavailableError("workload text needs safetensors, got none: pip install "
                               "'flashdsa[compare]'") from None
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CompareError(f"--text-file must be a safetensors file, got {path}: {error}") from None
    names = ("cu_seqlens", "index_q", "index_k", "head_weights")
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CompareError(f"--text-file must hold {', '.join(names)}, got {path} without "
                           f"{', '.join(missing)}")
    _check_text(path, tensors, shape)
    return {name: tensors[name] for name in names}


def _boundaries(workload: Workload, text: Optional[dict[str, Tensor]]) -> np.ndarray:
    if text is not None:
        return text["cu_seqlens"].cpu().numpy()
    return np.concatenate(([0], np.cumsum(workload.lengths()))).astype(np.int32)


def _visible_keys(workload: Workload, boundaries: np.ndarray,
                  positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First key and number of keys that every row sees, int32."""
    if not workload.causal:
        return np.zeros(len(positions), np.int32), np.full(len(positions), boundaries[-1], np.int32)
    starts = boundaries[np.searchsorted(boundaries, positions, side="right") - 1]
    return starts, (positions + 1 - starts).astype(np.int32)


def _normal(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random, device=random.device, dtype=torch.bfloat16)


def _check_text(path: str, tensors: dict[str, Tensor], shape: Shape) -> None:
    """Raises CompareError where there are not all rows of documents without padding."""
    boundaries = tensors["cu_seqlens"]
    if (boundaries.dtype != torch.int32 or boundaries.dim() != 1 or len(boundaries) < 2
            or boundaries[0] != 0 or (boundaries.diff() <= 0).any()):
        raise CompareError("--text-file must hold cu_seqlens int32 [N+1] that ascends from 0, got "
                           f"{path} with {_form(boundaries)} {boundaries.flatten()[:4].tolist()}")
    tokens, heads = int(boundaries[-1]), shape.index_heads
    for name, wanted in {"index_q": f"bfloat16 [{tokens}, {heads}, {drift.INDEX_DIM}]",
                         "index_k": f"bfloat16 [{tokens}, {drift.INDEX_DIM}]",
                         "head_weights": f"float32 [{tokens}, {heads}]"}.items():
        if _form(tensors[name]) != wanted:
            raise CompareError(f"--text-file must hold {name} {wanted} as its documents and shape "
                               f"{shape.name} have it, got {path} with {_form(tensors[name])}")


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
