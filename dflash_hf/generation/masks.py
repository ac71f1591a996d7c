"""Who sees whom: visibility of keys, and the mask each attention implementation wants for it.

Shapes: B batch, Q queries, T keys, S cached columns, W verified positions.
"""

from typing import Any

import torch


def visible_keys(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None,
    is_causal: bool,
    window_from_anchor: bool = False,
) -> torch.Tensor | None:
    """Which keys queries may see, (..., Q, T) booleans, from positions (..., Q) and (..., T); `None`: all.

    A window of w shows keys at a distance below w, on both sides unless causal; causal hides later positions. The
    distance is each query's own, or with `window_from_anchor` that of the block's first query.
    """
    if window is None and not is_causal:
        return None
    distance = query_positions[..., :, None] - key_positions[..., None, :]  # (..., Q, T)
    if window is None:
        return distance >= 0
    reach = distance[..., :1, :] if window_from_anchor else distance
    visible = (reach.abs() < window).expand_as(distance)
    return visible & (distance >= 0) if is_causal else visible


def to_attention_mask(visible: torch.Tensor | None, implementation: str | None, dtype: torch.dtype) -> Any:
    """Turn visibility (B, Q, T) into what an attention implementation takes: booleans, floats or a `BlockMask`."""
    if visible is None:
        return None
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        batch_size, query_length, key_length = visible.shape
        return create_block_mask(
            lambda b, h, q, k: visible[b, q, k], batch_size, None, query_length, key_length, device=visible.device
        )
    visible = visible[:, None]  # (B, 1, Q, T)
    if implementation == "sdpa":
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def tree_visibility(
    ancestors: torch.Tensor,
    depths: torch.Tensor,
    cached: torch.Tensor | None,
    num_cached: int,
    window: int | None,
) -> torch.Tensor:
    """Which keys the nodes of a tree see: the context within the window, and their own ancestors; (B, W, T).

    Args:
        ancestors: (B, W, W), row a node, true for its ancestors and itself.
        depths: (B, W), the root's is 0.
        cached: 1 for real, 0 for padded columns of the whole cache, (B, S); `None`: all real.
        num_cached: S, the columns of the whole cache; a sliding layer shows the last `window - 1` of them.
        window: The sliding window, `None` in full layers.
    """
    batch_size, width = depths.shape
    columns = num_cached if window is None else min(num_cached, window - 1)
    context = torch.ones(batch_size, width, columns, dtype=torch.bool, device=depths.device)
    if window is not None:
        behind = torch.arange(columns, 0, -1, device=depths.device)  # distance of each column from the root
        context &= depths[:, :, None] + behind < window
        ancestors = ancestors & (depths[:, :, None] - depths[:, None, :] < window)
    if cached is not None:
        context &= cached[:, None, cached.shape[1] - columns :].bool()
    return torch.cat([context, ancestors], dim=2)


def left_visibility(
    columns: torch.Tensor, num_cached: int, ancestors: torch.Tensor | None, cached: torch.Tensor | None
) -> torch.Tensor:
    """Which keys the tokens of a verification see where every row starts in column 0; (B, W, S + W).

    Args:
        columns: Those of each row's tokens of the verification, (B, W).
        num_cached: S, the columns before it of the longest row.
        ancestors: Of a tree, (B, W, W), row a node, true for its ancestors and itself; `None`: a chain.
        cached: Which of the first columns are real, (B, P) booleans; `None`: all.
    """
    width = columns.shape[1]
    key = torch.arange(num_cached + width, device=columns.device)
    if ancestors is None:
        visible = key <= columns[:, :, None]
    else:
        visible = (key < columns[:, :1, None]).repeat(1, width, 1)
        visible.scatter_(2, columns[:, None].expand(-1, width, -1), ancestors.to(columns.device))
    if cached is not None:
        reach = min(cached.shape[1], visible.shape[2])  # the prompt that reached further may have left
        visible[:, :, :reach] &= cached[:, None, :reach].to(columns.device)
    return visible


__all__ = ["left_visibility", "to_attention_mask", "tree_visibility", "visible_keys"]
