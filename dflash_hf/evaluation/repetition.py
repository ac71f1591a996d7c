"""Has a text fallen into a loop? Loops are easy to draft, so averaging them in would flatter every method."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 64
LEAST_TOKENS = 24  # shorter repeats are lists, tables and refrains
LEAST_SHARE = 0.3


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest stretch that repeats with a period of at most 64 tokens, at least three times over."""
    longest = 0
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // 3) + 1):
        run = 0  # tokens in a row that equal the one a period before
        for i in range(period, len(tokens)):
            run = run + 1 if tokens[i] == tokens[i - period] else 0
            if run >= 2 * period:
                longest = max(longest, run + period)
    return longest


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether a loop of at least 24 tokens makes up at least three tenths of a text."""
    return longest_repeat(tokens) >= max(LEAST_TOKENS, LEAST_SHARE * len(tokens))


__all__ = ["is_repetitive", "longest_repeat"]
