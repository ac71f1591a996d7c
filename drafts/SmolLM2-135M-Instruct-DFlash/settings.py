"""The knobs of drafting, read from the generation configs and checked."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from .costs import USUAL_COSTS
from .policy import WidthPolicy

AUTO_TREE_BUDGET = 64
LARGEST_TREE = 1024  # the mask is quadratic
SCHEDULES = ("constant", "auto", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class DraftSettings:
    """How to draft.

    Attributes:
        num_proposals: Candidates put up for verification, at most.
        confidence_threshold: A block ends behind the first candidate whose probability is lower; 0: never.
        tree_budget: Nodes of the candidate tree, at most where `is_adaptive`; 0: a chain.
        is_adaptive: Whether each round chooses how many candidates to verify (`num_assistant_tokens_schedule="auto"`
            or `draft_tree_budget="auto"`).
        costs: Of drafting and of each further position, for the choice; `None`: measured.
        schedule: As it was set; Transformers' heuristics, for drafts that run token by token, mean "constant" here.
        context_length: Context tokens the draft's full layers keep; `None`: all.
    """

    num_proposals: int
    confidence_threshold: float
    tree_budget: int
    context_length: int | None
    schedule: str = "constant"
    is_adaptive: bool = False
    costs: tuple[float, float] | None = None

    @classmethod
    def read(cls, draft: Any, generation_config: Any) -> "DraftSettings":
        """Take each knob from the `generate` call if it sets it, else from `draft.generation_config`.

        `generate` fills in Transformers' defaults (20 tokens, confidence 0.4) before we see its config, so a knob that
        has exactly that value there counts as not set.

        Raises:
            ValueError: If a knob is out of its range.
        """
        usual = GenerationConfig._get_default_generation_params()

        def knob(name: str, default: Any) -> Any:
            value = getattr(generation_config, name, None)
            if value is None or value == usual.get(name):
                value = getattr(draft.generation_config, name, None)
            return default if value is None else value

        most = draft.config.num_proposals
        tree_budget = knob("draft_tree_budget", 0)
        schedule = knob("num_assistant_tokens_schedule", "constant")
        settings = cls(
            num_proposals=knob("num_assistant_tokens", most),
            confidence_threshold=knob("assistant_confidence_threshold", 0.0),
            tree_budget=AUTO_TREE_BUDGET if tree_budget == "auto" else tree_budget,
            context_length=knob("draft_context_length", None),
            schedule=schedule,
            is_adaptive="auto" in (tree_budget, schedule),
            costs=knob("draft_costs", None),
        )
        settings._check(draft)
        return settings

    def _check(self, draft: Any) -> None:
        most = draft.config.num_proposals
        if not _is_count(self.num_proposals) or self.num_proposals > most:
            raise ValueError(
                f"`num_assistant_tokens` is {self.num_proposals!r} but the draft was trained with `block_size` "
                f"{draft.config.block_size}, which proposes at most {most} tokens; set it between 0 and {most}."
            )
        threshold = self.confidence_threshold
        if not isinstance(threshold, (int, float)) or not 0.0 <= threshold <= 1.0:
            raise ValueError(
                f"`assistant_confidence_threshold` must be a probability from 0 to 1, got {threshold!r}; 0 never cuts "
                "a block."
            )
        if not _is_count(self.tree_budget) or self.tree_budget > LARGEST_TREE:
            raise ValueError(
                f"`draft_tree_budget` must be a number of nodes from 0, for a chain, to {LARGEST_TREE}, got "
                f"{self.tree_budget!r}; 16 to 64 suits most drafts, and 'auto' chooses the number anew each round."
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"`num_assistant_tokens_schedule` must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}; "
                "'auto' chooses the number anew each round."
            )
        context_length = self.context_length
        if context_length is not None and not (_is_count(context_length) and context_length):
            raise ValueError(
                f"`draft_context_length` must be at least 1 token, got {context_length!r}; leave it out to keep the "
                "whole context."
            )
        if self.costs is not None and not _are_costs(self.costs):
            raise ValueError(
                "`draft_costs` must be two numbers, the cost of drafting a block and of each further verified "
                f"position relative to a one-token forward of the target, got {self.costs!r}; leave it out to "
                "measure them."
            )

    def policy(self, do_sample: bool) -> WidthPolicy | None:
        """A fresh policy where the width is chosen each round. It measures with a clock unless runs must repeat."""
        if not self.is_adaptive:
            return None
        must_repeat = do_sample or torch.are_deterministic_algorithms_enabled()
        return WidthPolicy(self.costs or (USUAL_COSTS if must_repeat else None))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_costs(value: Any) -> bool:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    return is_pair and all(isinstance(cost, (int, float)) and 0 <= cost < float("inf") for cost in value)


__all__ = ["DraftSettings"]
