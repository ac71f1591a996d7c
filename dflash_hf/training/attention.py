"""Attention of many blocks at once without the scores between them: what a CPU trains with.

The dense mask of a training forward is mostly false: of A * K block keys a slot sees the K of its own block. Here the
scores against the context and against the own block are two products whose results share one softmax, so time and
memory grow with A * K * (S + K) instead of A * K * (S + A * K). On a GPU flex attention skips the same products.

Shapes: B batch, N query heads, M key heads, G queries per key (N / M), S context, A anchors, K block, D head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..modeling_dflash_heads import with_sinks

BLOCKWISE = "blockwise"


def blockwise_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from all blocks to their context and themselves, as Transformers' attention functions do.

    Args:
        query: (B, N, A * K, D).
        key, value: `[context; block 0; block 1; ...]`, (B, M, S + A * K, D).
        attention_mask: What is seen of the context, (B, A, K, S), and of the own block, (B, A, K, K). Anything else is
            a single block, as in decoding, and goes to SDPA.
        scaling: Factor of the scores.
        dropout: Of the weights.
        s_aux: A sink's logit per query head, (N,).

    Returns:
        (B, A * K, N, D), and no weights.
    """
    if not isinstance(attention_mask, tuple):
        if s_aux is not None:
            key, value, attention_mask = with_sinks(key, value, attention_mask, s_aux, query.shape[2])
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling)
    sees_context, sees_block = attention_mask
    blocks, context_length = sees_block.shape[1:3], sees_context.shape[-1]
    context_key, block_key = key[:, :, :context_length], key[:, :, context_length:].unflatten(2, blocks)
    context_value, block_value = value[:, :, :context_length], value[:, :, context_length:].unflatten(2, blocks)
    # Queries that share a key are rows of one product: (B, M, G, A, K, D).
    query = (query * scaling).unflatten(1, (key.shape[1], -1)).unflatten(3, blocks)
    to_context, to_block = times_context(query, context_key.mT), times_blocks(query, block_key.mT)
    scores = [
        to_context.masked_fill_(~sees_context[:, None, None], torch.finfo(to_context.dtype).min),
        to_block.masked_fill(~sees_block[:, None, None], torch.finfo(to_block.dtype).min),
    ]
    if s_aux is not None:
        sinks = s_aux.to(to_context.dtype).view(1, key.shape[1], -1, 1, 1, 1)
        scores.append(sinks.expand(*to_context.shape[:-1], 1))
    weights = nn.functional.dropout(torch.cat(scores, -1).softmax(-1), dropout, module.training)
    end = context_length + blocks[1]
    output = times_context(weights[..., :context_length], context_value)
    output = output + times_blocks(weights[..., context_length:end], block_value)
    return output.flatten(3, 4).flatten(1, 2).transpose(1, 2), None


def times_context(rows: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """(B, M, G, A, K, Y) from rows (B, M, G, A, K, X), all of them times the context's (B, M, X, Y)."""
    return (rows.flatten(2, 4) @ context).unflatten(2, rows.shape[2:5])


def times_blocks(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """(B, M, G, A, K, Y) from rows (B, M, G, A, K, X), each times its own block's of (B, M, A, X, Y)."""
    product = rows.transpose(2, 3).flatten(3, 4) @ blocks
    return product.unflatten(3, (rows.shape[2], rows.shape[4])).transpose(2, 3)


AttentionInterface.register(BLOCKWISE, blockwise_attention)

__all__ = ["BLOCKWISE", "blockwise_attention"]
