"""Where the rows of a batch lie in the target's cache, and the masks that say so.

Prompts come aligned on the right, behind their padding, and Transformers' masks and caches expect them so. Rows that
keep different numbers of tokens are then moved, all but the longest, in every round:

    row 0   c c c c c c c c          c  context        p  padding
    row 1   p p c c c c c c

Where the cache only grows and the target takes 4-D masks, rows start in column 0 instead and are never moved:

    row 0   c c c c c c c c
    row 1   c c c c c c . .          .  unused, masked; the row's next tokens are written there

Shapes: B batch, S cached columns, W verified tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .masks import left_visibility, to_attention_mask, tree_visibility
from .rollback import can_realign, crop, realign
from .target_cache import RowEnds, align_left, select_rows
from .tree import Tree


class RowLayout:
    """What both layouts have in common.

    Attributes:
        length: Columns of the cache.
        attention_mask: As `generate` keeps it, (B, S), or what a layout needs of it; `None`: nothing is masked.
    """

    def __init__(self, target: Any, cache: Any, length: int, attention_mask: torch.Tensor | None):
        self.target = target
        self.cache = cache
        self.length = length
        self.attention_mask = attention_mask
        self._form = target.config.get_text_config(decoder=True)._attn_implementation, target.dtype

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let the other rows leave, in the cache, too; `rows` are in the order of `filled_gaps`."""
        if self.attention_mask is not None:
            self.attention_mask = self.attention_mask[torch.tensor(rows, device=self.attention_mask.device)]

    def _in_the_targets_form(self, visible: torch.Tensor) -> Any:
        return to_attention_mask(visible, *self._form)


class RightAligned(RowLayout):
    """Rows that end in the same column.

    Args:
        target: The target.
        cache: Its cache, which holds the prompts.
        length: Columns of the cache.
        attention_mask: Of the prompts, (B, S); `None`: nothing is padded.
        batch_size: B.

    Attributes:
        padding: Columns of each row that are not its own.
    """

    def __init__(self, target: Any, cache: Any, length: int, attention_mask: torch.Tensor | None, batch_size: int):
        super().__init__(target, cache, length, attention_mask)
        self.padding = [0] * batch_size if attention_mask is None else attention_mask.bool().long().argmax(1).tolist()

    @property
    def counts(self) -> list[int]:
        """Tokens of every row in the cache."""
        return [self.length - padding for padding in self.padding]

    @property
    def spans(self) -> list[slice]:
        """The columns that each row is in."""
        return [slice(-count, None) for count in self.counts]

    @property
    def next_column(self) -> list[slice]:
        """Where each row's next token goes, once it has been run."""
        return [slice(-1, None)] * len(self.padding)

    def mask(self, width: int, tree: Tree | None) -> Any:
        """The mask of a verification: of two dimensions, or a tree's, or one for each type of layer."""
        if tree is None:
            return self._extended_mask(width)
        windows = {getattr(layer, "sliding_window", None) for layer in self.cache.layers}
        masks = {
            "full_attention" if window is None else "sliding_attention": self._in_the_targets_form(
                tree_visibility(tree.ancestors, tree.depths, self.attention_mask, self.length, window)
            )
            for window in windows
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def keep(self, counts: Sequence[int], width: int) -> None:
        """Of the `width` tokens that a verification has written, keep the first `counts[b]` of row b."""
        most = max(counts)
        if min(counts) == most:
            crop(self.cache, width - most)
            self.length += most - width
            if self.attention_mask is not None:
                self.attention_mask = self._extended_mask(most)
            return
        removed = [width - count for count in counts]
        self.padding = [pad + most - count for pad, count in zip(self.padding, counts, strict=True)]
        self.attention_mask = self._extended_mask(width, required=True)
        self._realign(removed, self.length - min(removed) - min(self.padding))

    def select_rows(self, rows: Sequence[int]) -> None:
        super().select_rows(rows)
        self.padding = [self.padding[row] for row in rows]
        self.cache.reorder_cache(torch.tensor(rows, device=self.target.device))
        spare = min(self.padding)
        if spare and can_realign(self.cache):
            self._realign([0] * len(rows), self.length - spare)

    def _realign(self, removed: list[int], new_length: int) -> None:
        """Move every row to the right edge of `new_length` columns, in the cache and in the mask."""
        offset = torch.tensor(removed, device=self.target.device)
        realign(self.cache, offset, new_length)
        columns = self.attention_mask.shape[1]
        device = self.attention_mask.device
        index = torch.arange(columns - new_length, columns, device=device) - offset[:, None].to(device)
        self.attention_mask = self.attention_mask.gather(1, index.clamp_min(0)) * (index >= 0)
        spare = min(self.padding)
        self.padding = [pad - spare for pad in self.padding]
        self.length = new_length

    def _extended_mask(self, width: int, required: bool = False) -> torch.Tensor | None:
        """The mask (B, S + W) once `width` more tokens are there; `None` where nothing is masked."""
        mask = self.attention_mask
        if mask is None:
            if not required:
                return None
            return torch.ones(len(self.padding), self.length, dtype=torch.long, device=self.target.device)
        return torch.cat([mask, mask.new_ones(mask.shape[0], width)], dim=1)


class LeftAligned(RowLayout):
    """Rows that start in column 0, of a cache that `can_grow`.

    Args:
        rows: The same rows behind their padding, which they leave behind.
    """

    def __init__(self, rows: "RightAligned | LeftAligned"):
        super().__init__(rows.target, rows.cache, rows.length, None)
        self.ends = RowEnds(rows.counts, self.target.device)
        padding = torch.tensor([rows.length - count for count in rows.counts], device=self.target.device)
        if rows.attention_mask is not None:
            self.attention_mask = _holes(rows.attention_mask, padding, self.counts)
        align_left(self.cache, padding, self.ends)
        self.length = max(self.counts)

    @property
    def counts(self) -> list[int]:
        """Tokens of every row in the cache."""
        return self.ends.ends

    @property
    def spans(self) -> list[slice]:
        """The columns that each row is in."""
        return [slice(count) for count in self.counts]

    @property
    def next_column(self) -> list[slice]:
        """Where each row's next token goes."""
        return [slice(end, end + 1) for end in self.counts]

    def mask(self, width: int, tree: Tree | None) -> Any:
        """The mask of a verification, a chain's or a tree's."""
        ancestors = None if tree is None else tree.ancestors
        visible = left_visibility(self.ends.next_columns(width), self.length, ancestors, self.attention_mask)
        return self._in_the_targets_form(visible)

    def keep(self, counts: Sequence[int], width: int) -> None:
        """Of the `width` tokens that a verification has written, keep the first `counts[b]` of row b."""
        self._end_at([end + count for end, count in zip(self.counts, counts, strict=True)])

    def select_rows(self, rows: Sequence[int]) -> None:
        super().select_rows(rows)
        self._end_at([self.counts[row] for row in rows])  # first, so that no more is copied than is needed
        select_rows(self.cache, rows)

    def _end_at(self, ends: Sequence[int]) -> None:
        self.ends.set(ends)
        crop(self.cache, self.length - max(ends))
        self.length = max(ends)


def _holes(mask: torch.Tensor, padding: torch.Tensor, ends: Sequence[int]) -> torch.Tensor | None:
    """A mask (B, S) without each row's left padding, (B, max(ends)) booleans; `None` if it hides no more than that."""
    columns = torch.arange(max(ends), device=mask.device) + padding[:, None].to(mask.device)
    is_real = mask.bool().gather(1, columns.clamp_max(mask.shape[1] - 1)) | (columns >= mask.shape[1])
    return None if bool(is_real.all()) else is_real


__all__ = ["LeftAligned", "RightAligned"]
