"""DFlashCandidateGenerator: DFlash drafting under Transformers' own assisted loop."""

from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from .compat import hidden_states_request
from .drafting import Drafter, choose_candidates
from .processors import BlockProcessor
from .settings import DraftSettings
from .target_runner import tapped_states


class DFlashCandidateGenerator(CandidateGenerator):
    """Proposes the candidates of each round to `GenerationMixin._assisted_decoding` (batch of one, a chain).

    Args:
        draft: The draft model.
        target: The model that verifies.
        generation_config: As prepared by `generate`.
        logits_processor: The processors the target's scores will pass; the draft's pass the same.
    """

    requires_model_outputs = True

    def __init__(self, draft: Any, target: Any, generation_config: Any, logits_processor: Any = None):
        self.settings = DraftSettings.read(draft, generation_config)
        self.max_length = generation_config.max_length
        self.do_sample = generation_config.do_sample
        self.processor = BlockProcessor(logits_processor, 1)
        self.target_layer_ids = draft.config.target_layer_ids
        self.target = target
        self.model_kwargs_overrides = {"output_hidden_states": hidden_states_request(self.target_layer_ids)}
        self.drafter = Drafter(
            draft, target.get_input_embeddings(), target.get_output_embeddings(), self.settings.context_length
        )

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates behind `input_ids` (1, length) and, when sampling, their scores (1, P, V).

        The first call proposes nothing: the target has not run yet, so there are no states to read.
        """
        if is_first_iteration or model_outputs is None:
            self.drafter.positions = []
            return input_ids, None
        self._observe(model_outputs, input_ids.shape[1], int(n_last_matches))
        remaining = self.max_length - input_ids.shape[1]
        num_proposals = min(self.settings.num_proposals, remaining - 1)
        if num_proposals < 1:
            return input_ids, None
        num_slots = min(self.drafter.draft.config.block_size, remaining + 1)
        logits = self.drafter.block_logits(input_ids[:, -1:], num_slots, num_proposals)
        candidates, probs = choose_candidates(
            logits, self.processor, [0], [input_ids], self.do_sample, self.drafter.refine
        )
        scores = None if probs is None else probs.log()
        return torch.cat([input_ids, candidates], dim=1), scores

    def update_candidate_strategy(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: a block is always drafted whole. Transformers 5.17 requires the method."""

    def _observe(self, outputs: Any, length: int, n_last_matches: int) -> None:
        """Take over the states of the accepted tokens of the target's last forward."""
        taps = tapped_states(self.target, outputs, self.target_layer_ids)
        if not self.drafter.positions:
            self.drafter.begin(1, length - 1 - taps.shape[1])
        else:
            taps = taps[:, : n_last_matches + 1]
        self.drafter.observe(taps, [taps.shape[1]])


__all__ = ["DFlashCandidateGenerator"]
