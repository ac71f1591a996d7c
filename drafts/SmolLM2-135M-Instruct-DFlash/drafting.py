"""The draft's side of a round: remember the target's states, fill a block, choose candidates.

Shapes: B batch, N new context tokens, K block, P proposals, L taps, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.utils import logging

from .attention import grouped_queries
from .ordering import real_first
from .processors import BlockProcessor, to_float32
from .verification import best_tokens, sample

logger = logging.get_logger(__name__)


class Drafter:
    """A draft at work on one batch of sequences.

    Args:
        draft: The draft model.
        target_embeddings: The target's input embedding module.
        target_head: The target's language-model head.
        context_length: Bound on the context that full layers keep; `None`: all of it.
    """

    def __init__(self, draft: Any, target_embeddings: Any, target_head: Any, context_length: int | None = None):
        self.draft = draft
        self.target_embeddings = target_embeddings
        self.target_head = target_head
        self.device, self.dtype = draft.device, draft.dtype
        self.cache = draft.new_cache(context_length)
        self.positions: list[int] = []  # absolute position of each row's next context token
        # Taps the draft has not read yet: (B, n, L * H) of some rounds, and how many of the n are real in each row.
        self.pending: list[tuple[torch.Tensor, list[int]]] = []
        self.states_dtype: torch.dtype | None = None
        self.has_drafted = False
        self.refine: Callable[[torch.Tensor], torch.Tensor] | None = None  # of the last block, see `choose_candidates`

    def begin(self, batch_size: int, start: int) -> None:
        """Start `batch_size` rows whose first context token is at position `start`."""
        self.positions = [start] * batch_size
        self.pending = []

    def observe(self, taps: torch.Tensor, lengths: Sequence[int]) -> None:
        """Take over the target's states (B, N, L * H) of newly accepted tokens: of row b the first `lengths[b]`."""
        self.states_dtype = taps.dtype
        self.pending.append((within_range(taps, self.dtype).to(self.device), list(lengths)))

    def block_logits(self, anchors: torch.Tensor, num_slots: int, depth: int | None = None) -> torch.Tensor:
        """Draft behind the anchors (B, 1), in a block of `num_slots`; logits (B, P, V) of up to `depth` proposals."""
        device = self.device
        masks = anchors.new_full((anchors.shape[0], num_slots - 1), self.draft.config.mask_token_id)
        embeds = self.draft.embed_block(torch.cat([anchors, masks], dim=1), self.target_embeddings)
        context, lengths = _joined(self.pending)
        position_ids = self._position_ids(lengths, num_slots, device)
        self.cache.begin_round(position_ids, lengths)
        with grouped_queries():
            outputs = self.draft(
                noise_embeds=embeds.to(device=device, dtype=self.dtype),
                context_hidden_states=context,
                position_ids=position_ids,
                cache=self.cache,
            )
        self.positions = [start + length for start, length in zip(self.positions, lengths, strict=True)]
        self.pending = []
        if self.dtype == torch.float16 and not self.has_drafted:
            warn_of_overflow(outputs.last_hidden_state)
        self.has_drafted = True
        states = outputs.last_hidden_state.to(dtype=self.states_dtype, device=embeds.device)
        if depth is not None:
            states = states[:, : depth if self.draft.config.slots_predict_next else depth + 1]
        logits = self.draft.compute_logits(states, self.target_head).to(anchors.device)
        if self.draft.config.proposes_stepwise:
            self.refine = lambda previous: self.draft.step_logits(logits, states, previous).to(anchors.device)
        return logits

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let the other rows leave; `rows` are in the order of `filled_gaps`."""
        index = torch.tensor(rows, device=self.device)
        self.cache.select_rows(rows)
        self.positions = [self.positions[row] for row in rows]
        self.pending = [(taps[index], [lengths[row] for row in rows]) for taps, lengths in self.pending]

    def _position_ids(self, lengths: Sequence[int], num_slots: int, device: torch.device) -> torch.Tensor:
        """Positions of each row's new context, then of its block right behind it: (B, N + K)."""
        num_new = max(lengths)
        if min(lengths) == num_new and len(set(self.positions)) == 1:
            first = self.positions[0]
            return torch.arange(first, first + num_new + num_slots, device=device).expand(len(lengths), -1)
        start = torch.tensor(self.positions, device=device)[:, None]
        context = start + torch.arange(num_new, device=device)
        block = start + torch.tensor(lengths, device=device)[:, None] + torch.arange(num_slots, device=device)
        return torch.cat([context, block], dim=1)


def choose_candidates(
    logits: torch.Tensor,
    processor: BlockProcessor,
    rows: Sequence[int],
    prefixes: Sequence[torch.Tensor],
    do_sample: bool,
    refine: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Candidates (B, P) and, when sampling, the distributions (B, P, V) they were drawn from.

    The draft sees the processors the target will see, wherever they may be called on tokens that can still be refused.

    Args:
        refine: For drafts that choose one after the other: from the anchor and the candidates so far, (B, i + 1), to
            the logits of the next one, (B, V). They replace those in `logits`.
    """
    applies = not (processor.is_empty or processor.is_stateful)
    if refine is None and not applies:
        return _choose(logits, do_sample)
    if refine is None and processor.is_pointwise:
        return _choose(processor.pointwise(logits), do_sample)
    tokens = [torch.cat([prefix[:, -1:] for prefix in prefixes])]  # the anchors (B, 1)
    probs: list[torch.Tensor] = []
    for step in range(logits.shape[1]):
        if refine is not None:
            logits[:, step] = refine(torch.cat(tokens, dim=1))
        scores = logits[:, step]
        if applies:
            contexts = [
                torch.cat([prefix, *[t[i : i + 1] for t in tokens[1:]]], dim=1) for i, prefix in enumerate(prefixes)
            ]
            scores = torch.cat([processor.guess(row, contexts[i], scores[i : i + 1]) for i, row in enumerate(rows)])
        token, prob = _choose(scores[:, None], do_sample)
        tokens.append(token)
        probs.append(prob)
    return torch.cat(tokens[1:], dim=1), torch.cat(probs, dim=1) if do_sample else None


def _choose(scores: torch.Tensor, do_sample: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not do_sample:
        return best_tokens(scores, is_guess=True), None
    probs = to_float32(scores).softmax(dim=-1)
    # A draft may overflow, or its own vocabulary may have no token that the processors allow; any guess is lossless.
    probs = torch.where(probs.sum(dim=-1, keepdim=True).isfinite(), probs, 1.0 / probs.shape[-1])
    return sample(probs), probs


def warn_of_overflow(states: torch.Tensor) -> None:
    """Say so, once, when a draft in float16 has left its range: its proposals are noise, and only acceptance tells."""
    if not states.isfinite().all():
        logger.warning_once(
            "The draft's states overflowed float16, so its proposals are noise and nothing will be accepted; load the "
            "draft with dtype=torch.bfloat16 or torch.float32."
        )


def within_range(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast hidden states; those of a token that would strain float16 are scaled down, which the fusion's norm undoes.

    A target's states exceed float16 at a few massive channels; the limit leaves room for the sums of `fc`.
    """
    if states.dtype == dtype:
        return states
    if dtype == torch.float16:
        largest = states.abs().amax(dim=-1, keepdim=True).clamp_min(1)
        states = states * (1024 / largest).clamp_max(1)
    return states.to(dtype)


def _joined(chunks: Sequence[tuple[torch.Tensor, list[int]]]) -> tuple[torch.Tensor, list[int]]:
    """One context (B, N, L * H) of several rounds' taps, real tokens first in every row, and their numbers."""
    lengths = [sum(parts) for parts in zip(*(own for _, own in chunks), strict=True)]
    taps = torch.cat([states for states, _ in chunks], dim=1) if len(chunks) > 1 else chunks[0][0]
    if len(chunks) > 1 and any(min(own) < states.shape[1] for states, own in chunks):
        is_real = torch.cat(
            [
                torch.arange(states.shape[1], device=taps.device) < torch.tensor(own, device=taps.device)[:, None]
                for states, own in chunks
            ],
            dim=1,
        )
        taps = real_first(taps, is_real, max(lengths))
    return taps[:, : max(lengths)], lengths


__all__ = ["Drafter", "choose_candidates", "within_range"]
