"""The key/value cache of rows that have ended, put back beside the others at the end.

While a batch is generated, finished rows leave the cache and the others are packed to the right. A caller who asked
for the cache, or lent one, gets every row back, each token in the column where plain `generate` has it. Columns behind
a row's end, where plain `generate` stores what it makes of padding, are zeros: the mask of a next turn hides them.

Shapes: B batch, G key/value heads, T cached columns, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

RowStates = list[tuple[torch.Tensor, torch.Tensor]]  # per layer, keys and values (G, n, D) of a row's last n tokens


class FinishedRows:
    """What the rows of one batch have in the cache, kept while they are out of it.

    Args:
        padding: Columns of left padding of each row's prompt.
    """

    def __init__(self, padding: Sequence[int]):
        self.padding = list(padding)
        self.counts = [0] * len(self.padding)  # tokens of each stored row
        self.states: dict[int, RowStates] = {}
        self.rows = list(range(len(self.padding)))  # of the batch, in the order of the cache

    @staticmethod
    def can_store(cache: Any) -> bool:
        """Whether every layer keeps plain keys and values; recurrent states of ended rows are not given back."""
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)

    def select_rows(self, cache: Any, staying: Sequence[int], counts: Sequence[int]) -> None:
        """Store the rows that leave, before they do. `counts`: tokens that each row has in the cache."""
        for index, count in enumerate(counts):
            if index not in staying:
                self._store(cache, index, count)
        self.rows = [self.rows[index] for index in staying]

    def restore(self, cache: Any, counts: Sequence[int]) -> None:
        """Give the cache all rows back, the last ones included."""
        for index, count in enumerate(counts):
            self._store(cache, index, count)
        width = max(padding + count for padding, count in zip(self.padding, self.counts, strict=True))
        for number, layer in enumerate(cache.layers):
            window = getattr(layer, "sliding_window", None)
            kept = width if window is None else min(width, window - 1)
            batch = [self.states[row][number] for row in range(len(self.padding))]
            layer.keys = self._placed([keys for keys, _ in batch], width, kept)
            layer.values = self._placed([values for _, values in batch], width, kept)
            if window is not None:
                layer.cumulative_length = width

    def _store(self, cache: Any, index: int, count: int) -> None:
        row = self.rows[index]
        self.counts[row] = count
        self.states[row] = [
            (layer.keys[index, :, -count:].clone(), layer.values[index, :, -count:].clone()) for layer in cache.layers
        ]

    def _placed(self, rows: Sequence[torch.Tensor], width: int, kept: int) -> torch.Tensor:
        """The last `kept` of `width` columns, (B, G, kept, D)."""
        heads, _, size = rows[0].shape
        placed = rows[0].new_zeros(len(rows), heads, kept, size)
        first = width - kept
        for row, states in enumerate(rows):
            end = self.padding[row] + self.counts[row]
            states = states[:, -max(0, end - first) :] if end > first else states[:, :0]
            placed[row, :, end - first - states.shape[1] : end - first] = states
        return placed


__all__ = ["FinishedRows"]
