"""Taking back what a verification wrote to the target's cache beyond the accepted tokens.

One row, or rows that accept the same number, crop. So do ragged rows that are aligned on the left (`target_cache`).
Others, those of sliding and of recurrent layers and of attentions that take no 4-D mask, are realigned to the right,
which leaves an ordinary left-padded batch: windows, masks and every attention implementation keep their meaning, and
the cache is as wide as its longest row. Recurrent layers have no columns to crop; `recurrent` restores them.

Shapes: B batch, G key/value heads, T cached columns, W verified positions, D head size.
"""

import sys
from typing import Any

import torch
from transformers import cache_utils as cu

from .ordering import take_columns
from .target_cache import GrowingLayer

LINEAR = cu.LinearAttentionCacheLayerMixin
REALIGNABLE = {
    getattr(cu, name)
    for name in (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    )
    if hasattr(cu, name)
} | {GrowingLayer}


def has_columns(layer: Any) -> bool:
    """Whether a cache layer keeps keys and values (B, G, T, D) that have been written."""
    return isinstance(layer, cu.CacheLayerMixin) and layer.is_initialized


def can_realign(cache: Any) -> bool:
    """Whether rows of this cache can keep different numbers of tokens."""
    return all(type(layer) in REALIGNABLE for layer in cache.layers)


def free_columns(cache: Any) -> int:
    """How many more tokens fit into a cache; static layers end somewhere."""
    static = [layer for layer in cache.layers if isinstance(layer, cu.StaticLayer) and has_columns(layer)]
    return min((layer.max_cache_len - int(layer.cumulative_length) for layer in static), default=sys.maxsize)


def why_not_croppable(cache: Any) -> str | None:
    """Why tokens cannot be taken back from this cache; `None` if they can."""
    if vars(type(cache)).get("is_croppable") is False:  # it keeps more than its layers do
        return f"a {type(cache).__name__} cannot take tokens back"
    for layer in cache.layers:
        if type(layer) in REALIGNABLE or type(layer) is cu.StaticLayer:
            continue
        if isinstance(layer, LINEAR) and not isinstance(layer, cu.CacheLayerMixin):
            continue
        if not getattr(layer, "is_croppable", False) or not hasattr(layer, "crop"):
            return f"a {type(layer).__name__} of the target's cache cannot take tokens back"
    return None


def record_past(cache: Any) -> None:
    """Make sliding layers keep what a verification pushes out of their window, until it is cropped."""
    for layer in cache.layers:
        if isinstance(layer, cu.DynamicSlidingWindowLayer):
            layer.record_past = True


def crop(cache: Any, count: int) -> None:
    """Drop the last `count` columns of every layer that has columns; with 0, sliding layers only shrink back."""
    for layer in cache.layers:
        if not has_columns(layer):
            continue
        if isinstance(layer, cu.StaticLayer):
            layer.cumulative_length.sub_(count)  # 5.17 has no `crop` here
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int -= count
        elif isinstance(layer, cu.DynamicSlidingWindowLayer):
            cu.DynamicSlidingWindowLayer.crop(layer, -count)
        elif isinstance(layer, LINEAR):
            cu.DynamicLayer.crop(layer, -count)
        else:
            layer.crop(-count)


def realign(cache: Any, removed: torch.Tensor, width: int) -> None:
    """Drop the last `removed[b]` columns of row b and move what is left to the right edge.

    Args:
        removed: Columns to drop per row, (B,), at most what the last forward wrote.
        width: Columns of the longest row afterwards; shorter rows are padded on the left with stale columns, which
            the attention mask must hide.
    """
    for layer in cache.layers:
        if not has_columns(layer):
            continue
        is_sliding = isinstance(layer, cu.DynamicSlidingWindowLayer)
        kept = min(width, layer.sliding_window - 1) if is_sliding else width
        columns = layer.keys.shape[-2]
        index = torch.arange(columns - kept, columns, device=layer.keys.device) - removed[:, None].to(
            layer.keys.device
        )
        layer.keys = take_columns(layer.keys, index.clamp_min(0))
        layer.values = take_columns(layer.values, index.clamp_min(0))
        if is_sliding:
            layer.cumulative_length = width


def reorder_last(cache: Any, order: torch.Tensor, width: int) -> None:
    """Let the columns `order` (B, n) of the last `width` stand first among those, such as a tree's kept path."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer) and layer.rows is not None:
            layer.reorder_last(order)
        elif has_columns(layer):
            index = order.to(layer.keys.device)
            for states in (layer.keys, layer.values):
                written = states[:, :, -width:]
                written[:, :, : index.shape[1]] = take_columns(written, index)


class ColumnSnapshot:
    """The columns of a cache as they stand.

    Forwards replace the tensors of dynamic layers, or write behind what is there. So they do in static layers, which
    count in place.
    """

    ATTRIBUTES = ("keys", "values", "cumulative_length", "cumulative_length_int")

    def __init__(self, cache: Any):
        self.saved = [
            (layer, {name: vars(layer)[name] for name in self.ATTRIBUTES if name in vars(layer)}, self._count(layer))
            for layer in cache.layers
            if has_columns(layer)
        ]

    @staticmethod
    def _count(layer: Any) -> torch.Tensor | None:
        count = getattr(layer, "cumulative_length", None)
        return count.clone() if isinstance(count, torch.Tensor) else None

    def restore(self) -> None:
        """Put the columns back."""
        for layer, attributes, count in self.saved:
            vars(layer).update(attributes)
            if count is not None:
                layer.cumulative_length.copy_(count)


__all__ = [
    "LINEAR",
    "REALIGNABLE",
    "ColumnSnapshot",
    "can_realign",
    "crop",
    "free_columns",
    "has_columns",
    "realign",
    "record_past",
    "reorder_last",
    "why_not_croppable",
]
