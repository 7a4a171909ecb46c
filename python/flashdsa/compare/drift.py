"""Indexer inputs whose selections drift from row to row, by the formulae of docs/synth.md."""

from __future__ import annotations

import math
import statistics

import numpy as np
import torch

INDEX_DIM = 128
WEIGHT_DEVIATION = 0.25  # of a head weight, relative
_STEP = 2**0.25  # of visible / K, for which one correlation is solved
_ANGLES = np.linspace(0, math.pi / 2, 20001)


def query_correlations(starts: np.ndarray, visible: np.ndarray, topk: int,
                       overlap: float) -> np.ndarray:
    """Correlation of each row's queries with those of the row before it, for which neighbouring
    selections share `overlap`; 0 where a document or the batch starts."""
    steps = np.maximum(np.floor(np.log(visible / topk) / math.log(_STEP) + 1e-9), 0).astype(int)
    solved = {step: _query_correlation(overlap, _STEP**-(step + 0.5)) for step in np.unique(steps)}
    correlations = np.array([solved[step] for step in steps])
    correlations[0] = 0
    correlations[1:][starts[1:] != starts[:-1]] = 0
    return correlations


def _query_correlation(overlap: float, share: float) -> float:
    """Of rows that select the best `share` of their keys."""
    if overlap <= share:
        return 0.0
    z = statistics.NormalDist().inv_cdf(1 - share)
    middles = (_ANGLES[1:] + _ANGLES[:-1]) / 2
    density = np.exp(-z * z / (1 + np.sin(middles)))
    shared = share + np.cumsum(density) * _ANGLES[1] / (2 * math.pi * share)
    of_scores = math.sin(np.interp(overlap, np.concatenate(([share], shared)), _ANGLES))
    angle = math.pi / 2 - _ANGLES  # between the queries of two rows
    rho = np.cos(angle)
    relu = (np.sin(angle) + (math.pi - angle) * rho - 1) / (math.pi - 1)
    by_angle = relu * (1 + rho * WEIGHT_DEVIATION**2) / (1 + WEIGHT_DEVIATION**2)
    return float(np.interp(of_scores, by_angle, rho))


def drifting_queries(correlations: np.ndarray, heads: int,
                     random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """index_q bfloat16 [T_q, heads, 128] and head_weights bfloat16 [T_q, heads], on the device of
    the generator."""
    rows = torch.randn(len(correlations), heads, INDEX_DIM + 1, generator=random,
                       device=random.device)
    for row, rho in enumerate(correlations.tolist()):
        if rho > 0:
            rows[row].mul_(math.sqrt(1 - rho * rho)).add_(rows[row - 1], alpha=rho)
    weights = (1 + WEIGHT_DEVIATION * rows[..., INDEX_DIM]) * (heads * INDEX_DIM)**-0.5
    return rows[..., :INDEX_DIM].bfloat16().contiguous(), weights.bfloat16()
