"""Taking back what a verification wrote to the target's cache beyond the accepted tokens.

One row, or rows that accept the same number, crop. Ragged rows are realigned to the right, which leaves an ordinary
left-padded batch: sliding windows, masks and every attention implementation keep their meaning, and the cache is as
wide as its longest row.

Shapes: B batch, G key/value heads, T cached columns, D head size.
"""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def can_realign(cache: Any) -> bool:
    """Whether every layer keeps plain (B, G, T, D) keys and values, all columns or those of a sliding window."""
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def realign(cache: Any, removed: torch.Tensor, width: int) -> None:
    """Drop the last `removed[b]` columns of row b and move what is left to the right edge.

    Args:
        removed: Columns to drop per row, (B,), at most what the last forward wrote.
        width: Columns of the longest row afterwards; shorter rows are padded on the left with stale columns, which
            the attention mask must hide.
    """
    for layer in cache.layers:
        if not layer.is_initialized:
            continue
        is_sliding = isinstance(layer, DynamicSlidingWindowLayer)
        kept = min(width, layer.sliding_window - 1) if is_sliding else width
        columns = layer.keys.shape[-2]
        index = torch.arange(columns - kept, columns, device=layer.keys.device) - removed[:, None].to(
            layer.keys.device
        )
        layer.keys = _take_columns(layer.keys, index.clamp_min(0))
        layer.values = _take_columns(layer.values, index.clamp_min(0))
        if is_sliding:
            layer.cumulative_length = width


def _take_columns(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Columns `index` (B, n) of states (B, G, T, D)."""
    index = index[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


__all__ = ["can_realign", "realign"]
