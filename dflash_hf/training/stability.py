"""A step whose gradients are not finite is skipped and counted, so the parameters stay usable."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


class SkipNonFiniteSteps(TrainerCallback):
    """Drops the gradients of a step in which one of them is not finite: the optimiser then has nothing to do.

    Args:
        trainer: Whose model and log it watches.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.skipped = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the gradients just before they are used; after the reduction over processes all see the same."""
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        if not gradients:
            return
        largest = torch.stack([gradient.abs().max().float() for gradient in gradients]).max()
        if torch.isfinite(largest):
            return
        self.skipped += 1
        for parameter in self.trainer.model.parameters():
            parameter.grad = None
        logger.warning(
            f"step {state.global_step + 1}: the gradients are not finite, so it is skipped ({self.skipped} so far)"
        )
