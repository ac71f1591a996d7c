"""Has a text fallen into a loop? Loops are easy to draft, so averaging them in would flatter every method."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_TOKENS = 24  # shorter repeats are lists, tables and refrains
LEAST_SHARE = 0.3


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest stretch that repeats with some period, at least three times over."""
    import numpy as np

    values = np.asarray(tokens)
    longest = 0
    for period in range(1, len(values) // 3 + 1):
        differs = np.flatnonzero(values[period:] != values[:-period])
        edges = np.concatenate(([-1], differs, [len(values) - period]))
        run = int(np.diff(edges).max()) - 1  # tokens in a row that equal the one a period before
        if run >= 2 * period:
            longest = max(longest, run + period)
    return longest


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether a loop of at least 24 tokens makes up at least three tenths of a text."""
    return longest_repeat(tokens) >= max(LEAST_TOKENS, LEAST_SHARE * len(tokens))


__all__ = ["is_repetitive", "longest_repeat"]
