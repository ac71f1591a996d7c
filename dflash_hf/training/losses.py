"""The loss of a slot and the weight of its place in the block.

* Cross-entropy against the target's own text, weighted `exp(-(k - 1) / gamma)` (DFlash, section 3.3): a wrong slot
  makes all later ones worthless.
* KL divergence from the target's distribution, with the same decay.
* D-PACE (arXiv 2605.18810): weights that follow from how likely the draft is to get as far as each slot.

Every loss is a sum of `weight * loss` over slots, divided by one number that is known before the forward and added up
over micro-batches and processes.

Shapes: B batch, A anchors, K block, N slots, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from .blocks import IGNORED

LOSSES = ("ce", "kl", "dpace")
# The paper's decay per block size; sizes between are interpolated, others extended along the nearest segment.
PAPER_GAMMAS = ((8, 4.0), (10, 5.0), (16, 7.0))
MIN_GAMMA = 1.0


def default_gamma(block_size: int) -> float:
    """Decay constant for a block size: the paper's 4, 5 and 7 for 8, 10 and 16, piecewise linear elsewhere."""
    segments = list(pairwise(PAPER_GAMMAS))
    (left, low), (right, high) = next((s for s in segments if block_size <= s[1][0]), segments[-1])
    return max(MIN_GAMMA, low + (high - low) * (block_size - left) / (right - left))


def decay_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """`exp(-(k - 1) / gamma)` for the slots k = 1 .. K - 1, (K - 1,)."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / gamma)


def dpace_weights(label_probs: torch.Tensor, is_label: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE weights (..., K - 1): of slot k, the expected number of slots from k on that the draft reaches.

    Args:
        label_probs: The draft's probabilities of the labels (..., K - 1), detached.
        is_label: Slots that have a label; the others neither end a block nor count.
        alpha: 0 takes the probabilities as they are, 1 ignores them.
    """
    smooth = torch.where(is_label, (1 - alpha) * label_probs + alpha, 1.0)
    reach = smooth.cumprod(-1) * is_label
    return reach.flip(-1).cumsum(-1).flip(-1) * is_label


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    """The logits in float32, or in float64 where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Per slot (N,), from logits (N, V); 0 where the label is `IGNORED`."""
    return functional.cross_entropy(at_least_float32(logits), labels, ignore_index=IGNORED, reduction="none")


def kl_divergence(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """KL(target || draft) per slot (N,), from two times logits (N, V)."""
    log_q = at_least_float32(logits).log_softmax(-1)
    log_p = at_least_float32(target_logits).log_softmax(-1)
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


class ChunkedSum(torch.autograd.Function):
    """The sum of `terms(chunk of states)` over chunks, with memory for one chunk's logits only.

    A chunk's gradient is taken in the forward, while its logits are there. That is possible because the head is frozen
    and the terms are only ever added up and scaled.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        terms: Callable[[torch.Tensor, slice], torch.Tensor],
        chunk_size: int,
    ) -> torch.Tensor:
        total = states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))
        gradient = torch.empty_like(states) if states.requires_grad else None
        for start in range(0, len(states), chunk_size):
            chunk = slice(start, start + chunk_size)
            with torch.set_grad_enabled(gradient is not None):
                piece = states[chunk].detach().requires_grad_(gradient is not None)
                value = terms(piece, chunk)
            if gradient is not None:
                gradient[chunk] = torch.autograd.grad(value, piece)[0]
            total += value.detach()
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient * scale.to(gradient.dtype), None, None


def chunked_sum(
    states: torch.Tensor, terms: Callable[[torch.Tensor, slice], torch.Tensor], chunk_size: int
) -> torch.Tensor:
    """Sum `terms(states[chunk], chunk)`, each a scalar, over chunks of the first dimension of states (N, ...)."""
    return ChunkedSum.apply(states, terms, chunk_size)


def check_loss_arguments(loss: str, gamma: float | None, dpace_alpha: float) -> None:
    """Refuse a loss that is not there, or constants out of their range.

    Raises:
        ValueError: Names the argument, its value and the range.
    """
    if loss not in LOSSES:
        raise ValueError(f"`loss` must be one of {', '.join(LOSSES)}, got {loss!r}.")
    if gamma is not None and not (gamma > 0 and math.isfinite(gamma)):
        raise ValueError(f"`gamma` must be a positive number, got {gamma}; leave it out for the paper's constant.")
    if not 0 <= dpace_alpha <= 1:
        raise ValueError(f"`dpace_alpha` must lie between 0 and 1, got {dpace_alpha}.")
