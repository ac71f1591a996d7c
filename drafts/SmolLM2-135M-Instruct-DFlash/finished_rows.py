"""The key/value cache of rows that have ended, put back beside the others at the end.

While a batch is generated, finished rows leave the cache and the others are packed to the right. A caller who asked
for the cache, or lent one, gets every row back, each token in the column where plain `generate` has it. A row's last
token is there, too, if another row goes further: it is run once, apart, as the row leaves. Columns behind a row's end,
where plain `generate` stores what it makes of padding, are zeros: the mask of a next turn hides them. For the same
reason a row's recurrent states are those behind its own last token. Static layers keep every row level and every
column in place, so their rows are stored whole.

Shapes: B batch, G key/value heads, T cached columns, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from .rollback import LINEAR, REALIGNABLE, has_columns

STATES = ("conv_states", "recurrent_states")


@dataclass
class LayerRow:
    """What a row has in one cache layer.

    Attributes:
        columns: Keys and values, (G, n, D) each, of its last n tokens; all columns of a static layer, `None` where
            the layer has none.
        states: By the names in `STATES`, the states of a recurrent layer by their number there.
    """

    columns: tuple[torch.Tensor, torch.Tensor] | None
    states: dict[str, dict[int, torch.Tensor]]

    @classmethod
    def of(cls, layer: Any, index: int, span: slice) -> "LayerRow":
        """A copy of row `index`, whose tokens are in the columns `span`."""
        columns = None
        if has_columns(layer):
            if isinstance(layer, StaticLayer):
                span = slice(None)
            columns = (layer.keys[index, :, span].clone(), layer.values[index, :, span].clone())
        if not isinstance(layer, LINEAR):
            return cls(columns, {})
        states = {
            name: {key: state[index].clone() for key, state in getattr(layer, name).items() if state is not None}
            for name in STATES
        }
        return cls(columns, states)

    def followed_by(self, last: "LayerRow", is_whole: bool) -> "LayerRow":
        """The row with its last token, of which `last` has the columns, all of them if `is_whole`, and the states."""
        if self.columns is None or last.columns is None or is_whole:
            return last
        keys, values = (torch.cat(pair, dim=1) for pair in zip(self.columns, last.columns, strict=True))
        return LayerRow((keys, values), last.states)


class FinishedRows:
    """What the rows of one batch have in the cache, kept while they are out of it.

    Args:
        padding: Columns of left padding of each row's prompt.
    """

    def __init__(self, padding: Sequence[int]):
        self.padding = list(padding)
        self.counts = [0] * len(self.padding)  # tokens of each stored row
        self.states: dict[int, list[LayerRow]] = {}
        self.last: dict[int, list[LayerRow]] = {}  # of rows whose last token has been run
        self.rows = list(range(len(self.padding)))  # of the batch, in the order of the cache

    @staticmethod
    def can_store(cache: Any) -> bool:
        """Whether the rows of every layer of this cache can be told apart."""
        return all(type(layer) in REALIGNABLE or type(layer) is StaticLayer for layer in cache.layers)

    def store(self, cache: Any, leaving: Sequence[int], spans: Sequence[slice], counts: Sequence[int]) -> None:
        """Store rows before they leave: of each row in the cache, the columns of its tokens and how many they are."""
        for index in leaving:
            row = self.rows[index]
            self.counts[row] = counts[index]
            self.states[row] = [LayerRow.of(layer, index, spans[index]) for layer in cache.layers]

    def store_last(self, cache: Any, leaving: Sequence[int], spans: Sequence[slice]) -> None:
        """Store what the column of a row's last token adds to the rows that `store` has stored."""
        for index in leaving:
            self.last[self.rows[index]] = [LayerRow.of(layer, index, spans[index]) for layer in cache.layers]

    def select_rows(self, staying: Sequence[int]) -> None:
        """Note which rows the cache goes on with."""
        self.rows = [self.rows[index] for index in staying]

    def restore(self, cache: Any, spans: Sequence[slice], counts: Sequence[int]) -> None:
        """Give the cache all rows back, the last ones included, which `store` would be told of thus."""
        self.store(cache, range(len(counts)), spans, counts)
        width = max(padding + count for padding, count in zip(self.padding, self.counts, strict=True))
        for row, last in self.last.items():
            if self.padding[row] + self.counts[row] < width:
                self._append(row, last, cache)
        for number, layer in enumerate(cache.layers):
            rows = [self.states[row][number] for row in range(len(self.padding))]
            if has_columns(layer):
                self._restore_columns(layer, [row.columns for row in rows if row.columns is not None], width)
            for name in rows[0].states:
                for key in rows[0].states[name]:
                    getattr(layer, name)[key] = torch.stack([row.states[name][key] for row in rows])

    def _append(self, row: int, last: list[LayerRow], cache: Any) -> None:
        self.states[row] = [
            before.followed_by(after, isinstance(layer, StaticLayer))
            for before, after, layer in zip(self.states[row], last, cache.layers, strict=True)
        ]
        self.counts[row] += 1

    def _restore_columns(self, layer: Any, rows: Sequence[tuple[torch.Tensor, torch.Tensor]], width: int) -> None:
        keys, values = zip(*rows, strict=True)
        if isinstance(layer, StaticLayer):
            layer.keys, layer.values = torch.stack(keys), torch.stack(values)
            return
        window = getattr(layer, "sliding_window", None)
        kept = width if window is None else min(width, window - 1)
        layer.keys, layer.values = self._placed(keys, width, kept), self._placed(values, width, kept)
        if window is not None:
            layer.cumulative_length = width

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
