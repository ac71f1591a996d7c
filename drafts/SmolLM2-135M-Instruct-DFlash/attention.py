"""Attention of several tokens behind a cache, without a copy of its keys and values for every query head.

Where query heads share keys, Transformers' SDPA repeats the keys and values of the whole context before a masked
forward of several tokens, in every layer: a copy that a forward of one token is spared, and that grows with context
and batch. The queries of a group can stand side by side instead, each with its row of the mask.

SDPA is looked up by name, so the function of that name is replaced by one that does the same for everyone, but for
forwards within `grouped_queries()`, on that thread. `remove_hook` puts Transformers' own back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class _Verifying(local):
    """What a thread keeps while it verifies."""

    masks: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None  # by their identity: each, and its copy by group


_verifying = _Verifying()
_MARKER = "dflash_verifying"


@contextmanager
def grouped_queries() -> Iterator[None]:
    """Let the forwards within run SDPA on grouped queries wherever keys would be repeated."""
    # Of this or of another copy of this module; an attention of the caller's own has none, and is left alone.
    verifying = getattr(AttentionInterface()["sdpa"], _MARKER, _verifying)
    before, verifying.masks = verifying.masks, {}
    try:
        yield
    finally:
        verifying.masks = before


def install_attention() -> None:
    """Replace Transformers' own SDPA, unless this or another copy of this module, or the caller, has done so."""
    if AttentionInterface()["sdpa"] is sdpa_attention_forward:
        AttentionInterface.register("sdpa", _sdpa)


def remove_attention() -> None:
    """Put Transformers' own SDPA back."""
    if hasattr(AttentionInterface()["sdpa"], _MARKER):
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def _sdpa(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' SDPA of queries (B, Q, W, D) and keys (B, G, T, D); returns (B, W, Q, D)."""
    groups = getattr(module, "num_key_value_groups", 1)
    if (
        torch.compiler.is_compiling()
        or _verifying.masks is None
        or not _is_grouped(groups, query, attention_mask, kwargs)
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    batch_size, num_heads, width, head_dim = query.shape
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch_size, num_heads // groups, groups * width, head_dim),
        key,
        value,
        attn_mask=_mask_of_groups(attention_mask, groups),
        dropout_p=dropout,
        scale=scaling,
    )
    return output.reshape(batch_size, num_heads, width, -1).transpose(1, 2).contiguous(), None


setattr(_sdpa, _MARKER, _verifying)


def _is_grouped(groups: int, query: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether keys would be repeated, and nothing else is asked for than a mask that all heads share."""
    return (
        groups > 1
        and mask is not None
        and mask.shape[1:3] == (1, query.shape[2])
        and query.device.type in ("cpu", "cuda")
        and all(kwargs.get(name) is None for name in ("softcap", "position_bias", "s_aux"))
    )


def _mask_of_groups(mask: torch.Tensor, groups: int) -> torch.Tensor:
    """The mask (B, 1, groups * W, T); layers share one."""
    known = _verifying.masks.get(id(mask))
    if known is None:
        known = _verifying.masks[id(mask)] = mask, mask.repeat(1, 1, groups, 1)
    return known[1]


__all__ = ["grouped_queries", "install_attention", "remove_attention"]
