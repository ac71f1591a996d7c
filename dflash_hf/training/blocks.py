"""Random anchors and the blocks behind them: what one visit of a sequence trains (DFlash, section 3.3).

An anchor is a token of the response; its block is the anchor, clean, and K - 1 masked slots that predict the tokens
after it. Anchors are a function of a seed, the step and the sequence: drawn anew at every visit, the same whatever the
micro-batch, the process or the restart in which the visit happens.

Shapes: B batch, S context, A anchors, K block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

NO_ANCHOR = -1  # fills up rows that have fewer anchors than others of their batch
IGNORED = -100  # label of a slot behind the end of its sequence


def sample_anchors(key: Sequence[int], prompt_length: int, length: int, num_anchors: int) -> np.ndarray:
    """Positions of at most `num_anchors` different anchors, ascending.

    Args:
        key: What the draw depends on: non-negative integers.
        prompt_length: Position of the first token of the response, the first possible anchor.
        length: Tokens of the sequence. The last one has no token behind it and is no anchor.
        num_anchors: How many to draw; a shorter response gives all it has.
    """
    candidates = max(length - 1 - prompt_length, 0)
    if candidates <= num_anchors:
        return np.arange(prompt_length, prompt_length + candidates)
    drawn = np.random.default_rng(list(key)).choice(candidates, num_anchors, replace=False)
    return np.sort(drawn) + prompt_length


def batch_anchors(
    rows: torch.Tensor, prompt_lengths: torch.Tensor, lengths: torch.Tensor, num_anchors: int, key: Sequence[int]
) -> torch.Tensor:
    """Anchors of a batch, (B, A) with `NO_ANCHOR` behind the last; `rows` (B,) are the sequences' own numbers."""
    drawn = [
        sample_anchors([*key, row], prompt_length, length, num_anchors)
        for row, prompt_length, length in zip(rows.tolist(), prompt_lengths.tolist(), lengths.tolist(), strict=True)
    ]
    anchors = torch.full((len(drawn), max(1, *map(len, drawn))), NO_ANCHOR)
    for row, positions in zip(anchors, drawn, strict=True):
        row[: len(positions)] = torch.from_numpy(positions)
    return anchors


@dataclass
class Blocks:
    """All blocks of a batch of sequences.

    Attributes:
        token_ids: `[anchor, MASK, ..., MASK]` per block, (B, A, K).
        positions: Absolute positions, (B, A, K).
        labels: Tokens that the slots behind the anchor must predict, `IGNORED` where there is none, (B, A, K - 1).
        anchors: (B, A), `NO_ANCHOR` where there is no block.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    anchors: torch.Tensor


def make_blocks(
    input_ids: torch.Tensor, lengths: torch.Tensor, anchors: torch.Tensor, block_size: int, mask_token_id: int
) -> Blocks:
    """Build the blocks of sequences (B, S) at anchors (B, A). Slot k predicts token anchor + k: there is no shift."""
    is_block = anchors != NO_ANCHOR  # (B, A)
    starts = anchors.clamp_min(0)
    positions = starts[..., None] + torch.arange(block_size, device=anchors.device)  # (B, A, K)
    within = positions.clamp_max(input_ids.shape[1] - 1)
    tokens = input_ids.gather(1, within.flatten(1)).view_as(positions)
    token_ids = torch.full_like(tokens, mask_token_id)
    token_ids[..., 0] = tokens[..., 0]
    is_label = (positions < lengths[:, None, None]) & is_block[..., None]
    labels = tokens.masked_fill(~is_label, IGNORED)[..., 1:]
    return Blocks(token_ids, positions, labels, anchors)


def has_label(lengths: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Which slots behind the anchors have a token to predict, (B, A, K - 1); what `make_blocks` labels."""
    slots = torch.arange(1, block_size, device=anchors.device)
    return (anchors[..., None] + slots < lengths[:, None, None]) & (anchors != NO_ANCHOR)[..., None]
