"""What the blocks of a training sequence see, all in one forward (DFlash, section 3.3).

A block sees the context strictly before its anchor and itself, never another block. On top of that the rules of
inference hold, window and causality, by the very function that decides them there. Keys are laid out as
`[context of the sequence; block 0; block 1; ...]`.

Shapes: B batch, S context, A anchors, K block.
"""

from __future__ import annotations

from typing import Any

import torch

from ..configuration_dflash import DFlashConfig
from ..modeling_dflash import to_attention_mask, visible_keys
from .attention import BLOCKWISE
from .blocks import NO_ANCHOR


def training_masks(
    config: DFlashConfig, anchors: torch.Tensor, context_length: int, implementation: str | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Masks of a draft's forward by layer type, from anchors (B, A).

    BlockMasks for flex attention, what is seen of context and own block for blockwise attention, else dense ones.
    """
    masks = {}
    for layer_type in dict.fromkeys(config.layer_types):
        rules = layer_rules(config, layer_type)
        if implementation == "flex_attention":
            masks[layer_type] = block_mask(anchors, context_length, config.block_size, **rules)
        elif implementation == BLOCKWISE:
            masks[layer_type] = block_visibility(anchors, context_length, config.block_size, **rules)
        else:
            visible = dense_visibility(anchors, context_length, config.block_size, **rules)
            masks[layer_type] = to_attention_mask(visible, implementation, dtype)
    return masks


def layer_rules(config: DFlashConfig, layer_type: str) -> dict[str, Any]:
    """Window and causality of the layers of a type, as arguments of `visible_keys`."""
    return {
        "window": config.sliding_window if layer_type == "sliding_attention" else None,
        "is_causal": config.layer_is_causal(config.layer_types.index(layer_type)),
        "window_from_anchor": config.window_from_anchor,
    }


def block_visibility(
    anchors: torch.Tensor,
    context_length: int,
    block_size: int,
    window: int | None,
    is_causal: bool,
    window_from_anchor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each slot sees of the context, (B, A, K, S), and of its own block, (B, A, K, K), as booleans.

    The slots of absent blocks see their own block, so that no row is all masked.
    """
    batch_size, num_blocks = anchors.shape
    device = anchors.device
    positions = anchors.clamp_min(0)[..., None] + torch.arange(block_size, device=device)  # (B, A, K)
    context = torch.arange(context_length, device=device).expand(batch_size, num_blocks, -1)  # (B, A, S)
    rules = (window, is_causal, window_from_anchor)
    sees_context = (context < anchors[..., None])[:, :, None, :].expand(-1, -1, block_size, -1)
    if (allowed := visible_keys(positions, context, *rules)) is not None:
        sees_context = sees_context & allowed
    sees_block = visible_keys(positions, positions, *rules)
    if sees_block is None:
        sees_block = torch.ones(batch_size, num_blocks, block_size, block_size, dtype=torch.bool, device=device)
    return sees_context, sees_block


def dense_visibility(anchors: torch.Tensor, context_length: int, block_size: int, **rules: Any) -> torch.Tensor:
    """The same with all blocks as keys, (B, A * K, S + A * K); `rules` as there."""
    sees_context, sees_block = block_visibility(anchors, context_length, block_size, **rules)
    num_blocks = anchors.shape[1]
    is_own = torch.eye(num_blocks, dtype=torch.bool, device=anchors.device)[:, None, :, None]  # (A, 1, A, 1)
    blocks = (sees_block[:, :, :, None, :] & is_own).flatten(3)  # (B, A, K, A * K)
    return torch.cat([sees_context, blocks], dim=-1).flatten(1, 2)


def block_mask(
    anchors: torch.Tensor,
    context_length: int,
    block_size: int,
    window: int | None,
    is_causal: bool,
    window_from_anchor: bool = False,
) -> Any:
    """The same as a `BlockMask` of flex attention, which never materialises the (A * K) x (S + A * K) booleans."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch_size, num_blocks = anchors.shape

    def is_visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        anchor = anchors[b, query // block_size]
        column = key - context_length
        is_context = column < 0
        key_block = column.clamp_min(0) // block_size
        key_position = torch.where(is_context, key, anchors[b, key_block].clamp_min(0) + column % block_size)
        visible = torch.where(is_context, key < anchor, key_block == query // block_size)
        query_position = anchor.clamp_min(0) + query % block_size
        reference = anchor.clamp_min(0) if window_from_anchor else query_position
        for position, reach, causal in ((reference, window, False), (query_position, None, is_causal)):
            allowed = visible_keys(position[None], key_position[None], reach, causal)
            if allowed is not None:
                visible = visible & allowed[0, 0]
        return visible

    return create_block_mask(
        is_visible,
        batch_size,
        None,
        num_blocks * block_size,
        context_length + num_blocks * block_size,
        device=anchors.device,
    )


__all__ = ["NO_ANCHOR", "block_mask", "block_visibility", "dense_visibility", "layer_rules", "training_masks"]
