"""The draft's key/value cache: context only; a round's block is scratch behind it.

Each round the draft projects the newly accepted positions once and keeps them. The keys are rotated to absolute
positions before they are stored, so their order in the buffer is free: context token `i` of a row lives in column
`i % R`, and where `R` is smaller than the context the oldest token is overwritten by the newest. The block is written
behind the longest row and overwritten by the next round, so nothing is cropped, concatenated or shifted:

    row 0   c c c c c c n n | b b b b        c  context kept from earlier rounds   n  context new in this round
    row 1   c c c n . . . . | b b b b        b  the block                          .  unused, masked

Shapes: B batch, N new context tokens, K block, G key/value heads, D head size, R context columns, T columns in use.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from .ordering import close_up, flat_columns, put_columns


class ColumnLayout:
    """Which column holds what, for all layers that keep the same amount of context.

    Args:
        keep: Context tokens a later query can see; `None`: all of them. The buffer grows with what is there.
    """

    def __init__(self, keep: int | None):
        self.keep = keep
        self.context_columns = 0  # R, at most `keep`
        self.lengths: list[int] = []  # context tokens seen so far, per row
        self.block_start = 0
        self.block_positions: torch.Tensor | None = None  # (B, K)
        # Where new context and block go; a tensor (B, N), where rows are ragged or wrap, is of the context alone.
        self.columns: slice | torch.Tensor = slice(0, 0)
        self._flat: dict[tuple[Any, ...], torch.Tensor] = {}  # `flat_columns` of this round, shared by keys and values
        self.valid: torch.Tensor | None = None  # (B, T), None where every column in use is real

    def plan(self, position_ids: torch.Tensor, new_lengths: Sequence[int]) -> None:
        """Choose this round's columns.

        Args:
            position_ids: Absolute positions, (B, N + K), new context first.
            new_lengths: How many of the N are real in each row; they come first.
        """
        if not self.lengths:
            self.lengths = [0] * len(new_lengths)
        num_new = max(new_lengths)
        self.block_positions = position_ids[:, num_new:]
        first, before = self.lengths[0], self.lengths
        self.lengths = [old + new for old, new in zip(before, new_lengths, strict=True)]
        limit = sys.maxsize if self.keep is None else self.keep
        needed = max(before) + num_new
        if min(needed, limit) > self.context_columns:
            self.context_columns = min(max(2 * self.context_columns, needed, 64), limit)
        in_use = [min(length, self.context_columns) for length in self.lengths]
        self.block_start = max(in_use)
        is_even = len(set(before)) == 1 and min(new_lengths) == num_new
        if is_even and first + num_new <= self.context_columns:
            self.columns = slice(first, first + position_ids.shape[1])
        else:
            self.columns = self._scattered_columns(before, new_lengths, position_ids.device)
        self._flat = {}
        self.valid = None
        if len(set(in_use)) > 1:
            column = torch.arange(self.num_columns, device=position_ids.device)
            ends = torch.tensor(in_use, device=position_ids.device)[:, None]
            self.valid = (column < ends) | (column >= self.block_start)

    @property
    def num_columns(self) -> int:
        """T, the columns in use."""
        return self.block_start + self.block_positions.shape[1]

    def positions(self) -> torch.Tensor:
        """Absolute positions (B, T) of the columns in use; those of a row are consecutive, its block's the last."""
        device = self.block_positions.device
        newest = torch.tensor(self.lengths, device=device)[:, None] - 1
        age = (newest - torch.arange(self.block_start, device=device)) % max(self.context_columns, 1)
        return torch.cat([self.block_positions[:, :1] - 1 - age, self.block_positions], dim=1)

    def _scattered_columns(
        self, before: Sequence[int], new_lengths: Sequence[int], device: torch.device
    ) -> torch.Tensor:
        """Columns of ragged or wrapping rows, (B, N). What is not to be kept goes where the block will cover it."""
        step = torch.arange(max(new_lengths), device=device)
        start, count = torch.tensor([before, new_lengths], device=device)[:, :, None]  # (B, 1) each
        is_kept = (step < count) & (step >= count - self.context_columns)
        return torch.where(is_kept, (start + step) % max(self.context_columns, 1), self.block_start)

    def write(self, buffer: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        """Write new context and block, (B, G, N + K, D), into a buffer (B, G, R + K, D), made or grown as needed."""
        batch_size, num_heads, width, head_dim = states.shape
        block_size = self.block_positions.shape[1]
        size = self.context_columns + block_size
        if buffer is None or buffer.shape[2] < size:
            larger = states.new_zeros(batch_size, num_heads, size, head_dim)
            if buffer is not None:
                larger[:, :, : buffer.shape[2]] = buffer
            buffer = larger
        if isinstance(self.columns, slice):
            buffer[:, :, self.columns] = states
            return buffer
        key = (buffer.shape[1:3], buffer.device)
        if key not in self._flat:
            self._flat[key] = flat_columns(buffer, self.columns.to(buffer.device))
        put_columns(buffer, self._flat[key], states[:, :, : width - block_size])
        buffer[:, :, self.block_start : self.num_columns] = states[:, :, width - block_size :]
        return buffer

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        if self.lengths:  # empty until the first round; a row may end with the prompt's first token
            self.lengths = [self.lengths[row] for row in rows]


class DraftCache:
    """Context keys and values of every draft layer, rotated, with one column layout per amount of kept context.

    Args:
        keep_per_layer: For each layer, the context tokens a later query can see; `None`: all.
    """

    def __init__(self, keep_per_layer: Sequence[int | None]):
        layouts = {keep: ColumnLayout(keep) for keep in keep_per_layer}
        self.layouts = list(layouts.values())
        self.layer_layouts = [layouts[keep] for keep in keep_per_layer]
        self.keys: list[torch.Tensor | None] = [None] * len(keep_per_layer)
        self.values: list[torch.Tensor | None] = [None] * len(keep_per_layer)

    def begin_round(self, position_ids: torch.Tensor, new_lengths: Sequence[int]) -> None:
        """Announce a round before the draft's forward.

        Args:
            position_ids: Absolute positions of new context and block, (B, N + K), N = `max(new_lengths)`.
            new_lengths: New context tokens of each row; rows shorter than N are padded at their end.
        """
        for layout in self.layouts:
            layout.plan(position_ids, new_lengths)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's rotated keys and its values, (B, G, N + K, D); returns all of them, (B, G, T, D) each."""
        layout = self.layer_layouts[layer_idx]
        self.keys[layer_idx] = layout.write(self.keys[layer_idx], keys)
        self.values[layer_idx] = layout.write(self.values[layer_idx], values)
        return self.keys[layer_idx][:, :, : layout.num_columns], self.values[layer_idx][:, :, : layout.num_columns]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Context tokens the longest row has seen, whether kept or not."""
        lengths = self.layer_layouts[layer_idx].lengths
        return max(lengths) if lengths else 0

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the batch, which are in the order of `filled_gaps`."""
        for layout in self.layouts:
            layout.select_rows(rows)
        for states in (self.keys, self.values):
            for number, (layout, buffer) in enumerate(zip(self.layer_layouts, states, strict=True)):
                states[number] = None if buffer is None else close_up(buffer, rows, layout.block_start)


__all__ = ["DraftCache"]
