"""The target's full-attention layers while a call drafts: buffers with room, into which a forward writes.

Transformers' dynamic layers concatenate what they hold with what a forward adds, a copy of the whole context in every
layer and every round. Here a forward writes into the room behind the context, and taking tokens back is counting. In
a batch, every row starts in column 0 and ends where it ends, so rows that accept different numbers are never moved:

    row 0   c c c c c c n n        c  context        n  new in this forward
    row 1   c c c n n . . .        .  unused, masked

Keys are rotated to their positions before they are stored, so a row may lie anywhere; a 4-D mask says what is whose.
The caller's layers come back when the call ends.

Shapes: B batch, W new tokens, G key/value heads, D head size, T columns in use, C columns there is room for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from .ordering import close_up, flat_columns, put_columns, take_columns


class RowEnds:
    """Where the rows of a cache end, shared by its layers.

    Args:
        ends: Columns in use of each row, which starts in column 0.
        device: Where they are needed.
    """

    def __init__(self, ends: Sequence[int], device: torch.device):
        self.device = device
        self.set(ends)

    def set(self, ends: Sequence[int]) -> None:
        """Move the ends; what lies behind them is free."""
        self.ends = list(ends)
        self.column = torch.tensor(self.ends, device=self.device)[:, None]  # (B, 1)
        self._flat: dict[tuple[Any, ...], torch.Tensor] = {}

    def next_columns(self, width: int) -> torch.Tensor:
        """The next `width` columns of every row, (B, W)."""
        return self.column + torch.arange(width, device=self.column.device)

    def next_flat_columns(self, buffer: torch.Tensor, width: int) -> torch.Tensor:
        """Where they are among all columns of a buffer (B, G, C, D), (B * G * W,); layers of a kind share it."""
        key = (buffer.shape[1:3], width, buffer.device)
        if key not in self._flat:
            self._flat[key] = flat_columns(buffer, self.next_columns(width).to(buffer.device))
        return self._flat[key]


class GrowingLayer(DynamicLayer):
    """A dynamic layer whose keys and values (B, G, T, D) are the front of buffers (B, G, C, D).

    Whatever replaces `keys` and `values` by other tensors, as `Cache`'s own methods do, need not know: the next
    `update` makes buffers of them.

    Args:
        layer: The caller's, whose contents this layer takes over until `give_back`.

    Attributes:
        rows: Where each row ends, once `align_left` has been called; `None`: all where `keys` does.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self.__dict__.update(vars(layer))
        self.original = layer
        layer.keys = layer.values = None  # or it would keep what the buffers replace
        self.rows: RowEnds | None = None
        self.buffers: list[torch.Tensor] = []

    @staticmethod
    def room(columns: int) -> int:
        """Columns to add to those in use when a buffer is made, so that copies are rare and memory is little."""
        return max(64, columns // 16)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a forward's keys and values, (B, G, W, D) each; returns all in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start, width = self.keys.shape[-2], key_states.shape[-2]
        self.make_room(start + width)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            if self.rows is None:
                buffer.narrow(2, start, width).copy_(new)
            else:
                put_columns(buffer, self.rows.next_flat_columns(buffer, width), new)
        self.keys, self.values = (buffer.narrow(2, 0, start + width) for buffer in self.buffers)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last columns in use, whose number is given as a negative one, as `DynamicLayer.crop` takes it."""
        if tokens_to_remove and self.is_initialized:
            in_use = self.keys.shape[-2] - abs(tokens_to_remove)
            self.keys, self.values = self.keys.narrow(2, 0, in_use), self.values.narrow(2, 0, in_use)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep these rows of the batch, which are in the order of `filled_gaps`.

        Those that stay in their place are not copied. What the others held is free once the buffers are outgrown.
        """
        in_use = self.keys.shape[-2]
        if self._is_in_buffers():
            self.buffers = [close_up(buffer, rows, in_use) for buffer in self.buffers]
            self.keys, self.values = (buffer.narrow(2, 0, in_use) for buffer in self.buffers)
        else:
            self.reorder_cache(torch.tensor(rows))

    def reorder_last(self, order: torch.Tensor) -> None:
        """Of the last tokens of rows that end apart, let those in `order` (B, n) stand first."""
        source = (self.rows.column + order.to(self.rows.column.device)).to(self.keys.device)
        for buffer in self.buffers:
            put_columns(buffer, self.rows.next_flat_columns(buffer, order.shape[1]), take_columns(buffer, source))

    def give_back(self, is_kept: bool) -> DynamicLayer:
        """The caller's layer with everything in it; without room to spare if it `is_kept`."""
        own = ("original", "rows", "buffers")
        self.original.__dict__.update({name: value for name, value in vars(self).items() if name not in own})
        if is_kept and self._is_in_buffers():
            self.original.keys, self.original.values = self.keys.clone(), self.values.clone()
        return self.original

    def make_room(self, columns: int) -> None:
        """See that the buffers hold what is in use and have room for as many columns, and for some more."""
        if self._is_in_buffers() and columns <= self.buffers[0].shape[2]:
            return
        buffers = []
        for states in (self.keys, self.values):
            batch_size, num_heads, in_use, head_dim = states.shape
            buffer = states.new_empty(batch_size, num_heads, columns + self.room(columns), head_dim)
            buffer[:, :, :in_use] = states
            if batch_size > 1:
                buffer[:, :, in_use:] = 0  # a masked column has weight zero, which would not silence what is no number
            buffers.append(buffer)
        self.buffers = buffers
        self.keys, self.values = (buffer[:, :, :in_use] for buffer in buffers)

    def _is_in_buffers(self) -> bool:
        if not self.buffers:
            return False
        keys, buffer = self.keys, self.buffers[0]
        return (
            keys.data_ptr() == buffer.data_ptr()
            and keys.stride() == buffer.stride()
            and keys.shape[:2] == buffer.shape[:2]
        )


def can_grow(cache: Any) -> bool:
    """Whether all layers with columns are ones that only grow, and stay where they are."""
    is_offloaded = getattr(cache, "offloading", False)
    return not is_offloaded and all(type(layer) in (DynamicLayer, GrowingLayer) for layer in cache.layers)


def let_grow(cache: Any) -> None:
    """Give the dynamic layers of a cache room; those that are empty get it with their first tokens."""
    if not getattr(cache, "offloading", False):
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[number] = GrowingLayer(layer)


def align_left(cache: Any, padding: torch.Tensor, rows: RowEnds) -> None:
    """Let every row of a batch start in column 0.

    Args:
        cache: One that `can_grow`, and has been let.
        padding: Columns of each row to drop on its left, (B,).
        rows: Where each row ends then.
    """
    width = max(rows.ends)
    is_aligned = min(rows.ends) == width == cache.get_seq_length()
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        layer.rows = rows
        layer.make_room(width + 1)  # at once, so that no more than one layer is held twice
        if not is_aligned:
            device = layer.keys.device
            columns = torch.arange(width, device=device) + padding[:, None].to(device)
            columns = columns.clamp_max(layer.keys.shape[-2] - 1)
            for buffer in layer.buffers:
                buffer[:, :, :width] = take_columns(buffer, columns)
            layer.crop(width - layer.keys.shape[-2])


def select_rows(cache: Any, rows: Sequence[int]) -> None:
    """Let the other rows leave a cache whose layers are aligned on the left; `rows` as `filled_gaps` orders them."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.select_rows(rows)


def give_back(cache: Any, is_kept: bool) -> None:
    """Put the caller's layers back into the cache, which outlives the call if it `is_kept`."""
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, GrowingLayer):
            cache.layers[number] = layer.give_back(is_kept)


__all__ = ["GrowingLayer", "RowEnds", "align_left", "can_grow", "give_back", "let_grow", "select_rows"]
