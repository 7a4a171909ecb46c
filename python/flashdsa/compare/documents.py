"""Lengths of packed documents, the same numbers that `flashdsa bench` draws."""

from __future__ import annotations

import math

_WORD = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_DOCUMENTS = 1  # the stream's number


def draw_lengths(tokens: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Log-uniform in shortest..longest until `tokens` are filled; the last one is cut."""
    key = _mix_bits(_mix_bits(seed) + _DOCUMENTS)
    log_ratio = math.log(longest / shortest)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        bits = _mix_bits(key + (len(lengths) + 1) * _GOLDEN_GAMMA)
        uniform = (bits >> 11) * 2.0**-53
        lengths.append(min(left, int(shortest * math.exp(uniform * log_ratio))))
    return lengths


def _mix_bits(word: int) -> int:
    """SplitMix64's finaliser."""
    word &= _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
