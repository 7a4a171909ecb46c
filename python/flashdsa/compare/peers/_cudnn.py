"""cuDNN Frontend's indexer and sparse backward. https://github.com/NVIDIA/cudnn-frontend"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..library import Forward, Gradients, Library, load_name, padded_heads, round_up
from ..workloads import Problem, Selection

_CALLS = ("indexer_forward_wrapper", "indexer_top_k_wrapper", "sparse_attention_backward_wrapper")
_HEADS = 64  # the backward takes multiples of it
_INDEX_HEADS = (32, 64)
_SCRATCH_BYTES = 2 * 2**30  # of one call that selects; longer score matrices are cut into rows
_SCRATCH_PER_SCORE = 8
_ROW_ALIGNMENT = 512


class Cudnn(Library):
    """The calls of `cudnn.DSA`, in the order in which NeMo AutoModel makes them: a dense score
    matrix of every segment, a selection in no order, storage coordinates, two sorts."""

    name = "cudnn"
    operations = ("topk", "backward")

    def load(self) -> str:
        self._dsa, version = load_name("cudnn", "DSA", "nvidia-cudnn-frontend", _CALLS)
        return version

    def refusal(self, operation: str, problem: Problem) -> str:
        if problem.device.type != "cuda":
            return "needs a GPU"
        if operation == "topk" and not problem.causal:
            return f"its indexer is causal, and in {problem.workload} every row sees all keys"
        if operation == "topk" and problem.shape.index_heads not in _INDEX_HEADS:
            return f"its indexer has {_INDEX_HEADS[0]} or {_INDEX_HEADS[1]} heads"
        return ""

    def topk(self, problem: Problem, metadata: Any) -> Selection:
        keys = problem.index_k
        if metadata.key_source_indices is not None:
            keys = keys.index_select(0, metadata.key_source_indices)
        scores = self._dsa.indexer_forward_wrapper(
            problem.index_q, keys[:, None], problem.head_weights, ratio=1, sm_scale=1.0,
            cu_seqlens_q=metadata.segment_cu_q, cu_seqlens_k=metadata.segment_cu_k,
            max_seqlen_q=metadata.max_seqlen_q, max_seqlen_k=metadata.max_seqlen_k,
            q_causal_offsets=metadata.q_causal_offsets)["scores"]
        width = min(problem.shape.topk, metadata.max_seqlen_k)
        lengths = metadata.causal_lengths
        if width == metadata.max_seqlen_k:
            columns = torch.arange(width, dtype=torch.int32, device=keys.device)
            columns = columns.expand(problem.t_q, -1)
        else:
            columns = self._best_columns(scores, lengths.clamp_min(1), width)
        seen = (columns >= 0) & (columns < lengths[:, None])
        chosen = torch.where(seen, columns + metadata.starts[:, None], -1)
        chosen = torch.nn.functional.pad(chosen, (0, problem.shape.topk - width), value=-1)
        indices, counts = _sorted_prefix(chosen, problem.t_k)
        return Selection(indices[:, None], counts)

    def backward(self, problem: Problem, selection: Selection, forward: Forward) -> Gradients:
        heads = problem.shape.heads
        q, out, grad_out, lse = (
            padded_heads(tensor, round_up(heads, _HEADS))
            for tensor in (problem.q, forward.out, problem.grad_out, forward.lse))
        no_sink = torch.full((q.shape[1],), -torch.inf, device=q.device)
        result = self._dsa.sparse_attention_backward_wrapper(
            q, problem.kv[:, 0], out, grad_out, lse, no_sink,
            selection.topk_indices[:, 0].clamp_min(0), softmax_scale=problem.shape.softmax_scale,
            topk_length=selection.topk_length)
        return Gradients(result["dq"][:, :heads].contiguous(), result["dkv"][:, None])

    def _best_columns(self, scores: Tensor, lengths: Tensor, width: int) -> Tensor:
        rows = max(1, _SCRATCH_BYTES // (scores.shape[1] * _SCRATCH_PER_SCORE))
        if rows > _ROW_ALIGNMENT:
            rows -= rows % _ROW_ALIGNMENT
        return torch.cat([
            self._dsa.indexer_top_k_wrapper(part, seen, top_k=width, next_n=1,
                                            return_val=False)["indices"].int()
            for part, seen in zip(scores.split(rows), lengths.split(rows))
        ])


def _sorted_prefix(indices: Tensor, key_count: int) -> tuple[Tensor, Tensor]:
    """The valid slots of every row in front, then ascending: one sort for each."""
    columns = torch.arange(indices.shape[1], device=indices.device)
    valid = (indices >= 0) & (indices < key_count)
    lengths = valid.sum(1, dtype=torch.int32)
    front = torch.where(valid, columns, indices.shape[1]).argsort(1)
    indices = indices.gather(1, front).where(valid.gather(1, front), key_count)
    ascending = indices.gather(1, indices.argsort(1))
    return ascending.masked_fill(columns >= lengths[:, None], -1).int(), lengths
