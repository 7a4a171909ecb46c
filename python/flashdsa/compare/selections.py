"""Selections that drift from row to row."""

from __future__ import annotations

import numpy as np

KEPT_SHARE = 0.9  # of the predecessor's keys; K = 2048 keeps 1843


class DriftingSelection:
    """The keys of one row after the other."""

    def __init__(self, total_keys: int, topk: int, random: np.random.Generator):
        self._topk = topk
        self._kept = int(KEPT_SHARE * topk)
        self._random = random
        self._chosen = np.zeros(total_keys, bool)
        self._keys = np.empty(0, np.int64)  # in no order

    def take_all(self, start: int, visible: int) -> np.ndarray:
        """All visible keys, of which there must be at most K."""
        return self._become(np.arange(start, start + visible))

    def redraw(self, start: int, visible: int) -> np.ndarray:
        """K visible keys, independent of the row before. Ascending, as all results."""
        return self._become(start + self._random.choice(visible, self._topk, replace=False))

    def drift(self, start: int, visible: int) -> np.ndarray:
        """K visible keys: some of the row before, the others from those that did not stay."""
        keys = self._random.permutation(self._keys)[:self._kept]
        self._become(keys)
        while (missing := self._topk - len(self._keys)) > 0:
            drawn = np.unique(start + self._random.integers(visible, size=2 * missing))
            fresh = self._random.permutation(drawn[~self._chosen[drawn]])[:missing]
            self._chosen[fresh] = True
            self._keys = np.concatenate((self._keys, fresh))
        return np.sort(self._keys)

    def _become(self, keys: np.ndarray) -> np.ndarray:
        self._chosen[self._keys] = False
        self._chosen[keys] = True
        self._keys = keys
        return np.sort(keys)


def select_rows(starts: np.ndarray, visible: np.ndarray, total_keys: int, topk: int, drifts: bool,
                random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T_q, 1, K], ascending and -1 behind, and lengths int32 [T_q], of consecutive rows."""
    selection = DriftingSelection(total_keys, topk, random)
    indices = np.full((len(starts), 1, topk), -1, np.int32)
    lengths = np.minimum(visible, topk).astype(np.int32)
    for row, (start, count) in enumerate(zip(starts.tolist(), visible.tolist())):
        goes_on = row > 0 and starts[row - 1] == start and visible[row - 1] >= topk
        if count <= topk:
            keys = selection.take_all(start, count)
        elif drifts and goes_on:
            keys = selection.drift(start, count)
        else:
            keys = selection.redraw(start, count)
        indices[row, 0, :len(keys)] = keys
    return indices, lengths


def neighbour_overlap(indices: np.ndarray, starts: np.ndarray, visible: np.ndarray,
                      pairs: int = 512) -> float | None:
    """Share of a row's keys that the row before it selected too, averaged over up to `pairs`
    neighbouring rows of a document that see more than K keys; None when there are none."""
    topk = indices.shape[-1]
    rows = 1 + np.flatnonzero((starts[1:] == starts[:-1]) & (visible[:-1] > topk))
    if len(rows) == 0:
        return None
    rows = rows[np.linspace(0, len(rows) - 1, min(pairs, len(rows))).astype(int)]
    shared = sum(len(np.intersect1d(indices[row], indices[row - 1], assume_unique=True))
                 for row in rows)
    return shared / (len(rows) * topk)
