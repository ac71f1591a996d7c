"""The decoding loop: draft a block, verify it in one forward of the target, commit what stands.

One loop serves single sequences and batches, greedy decoding and sampling. Transformers' own assisted loop is not
used: it takes one row, checks stopping criteria once a block instead of once a token, calls stateful logits processors
on refused candidates, and feeds a cache handed over from an earlier turn from its start. `DFlashCandidateGenerator`
still works under it for who calls it directly.
"""

from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils import logging

from .drafting import Drafter, choose_candidates
from .processors import BlockProcessor
from .sequences import Sequences
from .settings import DraftSettings
from .stopping import StopRule
from .target_runner import TargetRunner
from .verification import Verdict, accept_greedy, accept_sampled, accept_stepwise

logger = logging.get_logger(__name__)


def decode(
    target: Any,
    draft: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: torch.Tensor | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate with `target`, assisted by `draft`; the arguments are those of `GenerationMixin._assisted_decoding`.

    Returns:
        Token ids (B, length), or a `DFlashGenerateOutput` under `return_dict_in_generate`.
    """
    reason = why_not_drafted(input_ids, logits_processor, stopping_criteria)
    if reason is not None:
        logger.warning_once(f"Generating without the draft: {reason}.")
        return target._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    loop = DecodingLoop(target, draft, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    return loop.run(streamer, synced_gpus)


def why_not_drafted(
    input_ids: torch.Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList
) -> str | None:
    """Why a call cannot be drafted without changing its result; `None` if it can."""
    if input_ids.shape[0] == 1:
        return None
    if BlockProcessor(logits_processor, 1).is_stateful:
        names = ", ".join(type(processor).__name__ for processor in logits_processor)
        return f"a logits processor may remember what it was shown, or tell the rows of a batch apart ({names})"
    rule = StopRule(stopping_criteria, 0)
    if rule.others and not rule.eos_token_ids:
        return "a batch without an end-of-sequence token goes on until its own stopping criterion holds for every row"
    return None


class DecodingLoop:
    """The state of one `generate` call and the steps of its rounds."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ):
        self.target = target
        self.settings = DraftSettings.read(draft, generation_config)
        self.do_sample = generation_config.do_sample
        self.processor = BlockProcessor(logits_processor, input_ids.shape[0])
        self.stop_rule = StopRule(stopping_criteria, generation_config.max_length)
        self.sequences = Sequences(input_ids, generation_config)
        capture_all = self.sequences.hidden_states is not None
        self.runner = TargetRunner(target, draft.config.target_layer_ids, generation_config, model_kwargs, capture_all)
        self.drafter = Drafter(
            draft, target.get_input_embeddings(), target.get_output_embeddings(), self.settings.context_length
        )
        self.rows = list(range(input_ids.shape[0]))  # rows still running

    def run(self, streamer: Any, synced_gpus: bool) -> Any:
        """Prefill, then rounds until every row has stopped."""
        self.streamer = streamer
        self._prefill()
        while self.target._has_unfinished_sequences(not self.rows, synced_gpus, self.sequences.buffer.device):
            if self.rows:
                self._round()
            else:
                self._keep_peers_company()
        if streamer is not None:
            streamer.end()
        return self.sequences.output(self.runner.release())

    def _prefill(self) -> None:
        """Run the prompt and commit the token that follows it; it belongs to no round."""
        ids = self.sequences.buffer
        outputs, taps, lengths, past = self.runner.prefill(ids)
        self.drafter.begin(len(self.rows), past)
        self.drafter.observe(taps, lengths)
        nothing = ids.new_empty(len(self.rows), 0)
        self._commit(outputs, outputs.logits[:, -1:], nothing, None, is_round=False)

    def _round(self) -> None:
        """Draft, verify, commit (the design's round, arXiv 2602.06036, section 3)."""
        candidates, draft_probs = self._propose()
        block = torch.cat([self.sequences.anchors(self.rows), candidates], dim=1)  # (B, P + 1)
        outputs = self.runner.verify(block)
        self._commit(outputs, outputs.logits, candidates, draft_probs, is_round=True)

    def _propose(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Candidates (B, P) and their distributions; P shrinks where fewer tokens are left to generate."""
        anchors = self.sequences.anchors(self.rows)
        remaining = self.stop_rule.max_length - min(self.sequences.lengths[row] for row in self.rows)
        config = self.drafter.draft.config
        num_slots = min(config.block_size, remaining + 1)
        silent_slots = config.block_size - config.num_proposals
        num_proposals = min(self.settings.num_proposals, num_slots - silent_slots, remaining - 1)
        if num_proposals < 1:
            return anchors[:, :0], None
        logits = self.drafter.block_logits(anchors, num_slots)[:, :num_proposals]
        prefixes = [self.sequences.prefix(row) for row in self.rows]
        candidates, probs = choose_candidates(
            logits, self.processor, self.rows, prefixes, self.do_sample, self.drafter.refine
        )
        return self._cut_unconfident(logits, candidates, probs)

    def _cut_unconfident(
        self, logits: torch.Tensor, candidates: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """End the block behind the first candidate below the confidence threshold.

        That candidate itself is verified. To drop it because of its own probability would bias sampling: the target
        would judge likely draws only, and draw the rest afresh.
        """
        if self.settings.confidence_threshold <= 0:
            return candidates, probs
        known = logits.float().softmax(dim=-1) if probs is None else probs
        confident = known.gather(-1, candidates[..., None])[..., 0] >= self.settings.confidence_threshold
        width = min(int(confident.long().cumprod(dim=1).sum(dim=1).max()) + 1, candidates.shape[1])
        return candidates[:, :width], None if probs is None else probs[:, :width]

    def _commit(
        self,
        outputs: Any,
        logits: torch.Tensor,
        candidates: torch.Tensor,
        draft_probs: torch.Tensor | None,
        is_round: bool,
    ) -> None:
        """Accept, append up to where a row stops, roll the caches back to what was kept, let stopped rows leave."""
        verdict, scores = self._accept(logits, candidates, draft_probs)
        counts, still_running = [], []
        for index, (row, tokens) in enumerate(zip(self.rows, verdict.to_host(), strict=True)):
            count, stops = self._commit_row(row, index, tokens, outputs, logits, scores, candidates)
            counts.append(count)
            if is_round:
                self.sequences.acceptance_lengths[row].append(count)
            if not stops:
                still_running.append(index)
        if is_round:
            width = candidates.shape[1] + 1
            taps = self.runner.taps(outputs)
            del outputs
            self.runner.keep(counts, width)
            self.drafter.observe(taps[:, : max(counts)], counts)
        self._leave(still_running)

    def _accept(
        self, logits: torch.Tensor, candidates: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> tuple[Verdict, torch.Tensor]:
        """The verdict, and the processed scores it was reached on (B, P + 1 or fewer, V)."""
        logits = logits.to(candidates.device)
        prefixes = [self.sequences.prefix(row) for row in self.rows]
        if self.processor.is_stateful:
            seen: list[torch.Tensor] = []

            def score_at(step: int) -> torch.Tensor:
                prefix = torch.cat([prefixes[0], candidates[:, :step]], dim=1)
                seen.append(self.processor.one(0, prefix, logits[:, step]))
                return seen[-1]

            verdict = accept_stepwise(candidates, draft_probs, score_at, self.do_sample)
            return verdict, torch.stack(seen, dim=1)
        scores = self.processor.block(self.rows, prefixes, candidates, logits)
        if self.do_sample:
            return accept_sampled(candidates, draft_probs, scores), scores
        return accept_greedy(candidates, scores), scores

    def _commit_row(
        self,
        row: int,
        index: int,
        tokens: list[int],
        outputs: Any,
        logits: torch.Tensor,
        scores: torch.Tensor,
        candidates: torch.Tensor,
    ) -> tuple[int, bool]:
        """Append a row's tokens up to where it stops; returns how many, and whether it stops."""
        sequences = self.sequences
        sequences.record_scores(row, scores[index, : len(tokens)], logits[index, : len(tokens)])
        count, stops = self.stop_rule.committed(
            sequences.lengths[row],
            tokens,
            lambda n: sequences.prefix(row, tokens[:n]),
            lambda n: sequences.scores_at(row, n),
        )
        sequences.record_states(row, index, outputs, 0, count, self.runner.cache)
        sequences.append(row, tokens[:count])
        sequences.trim_scores(row)
        if self.streamer is not None:
            for token in tokens[:count]:
                self.streamer.put(torch.tensor([token]))
        return count, stops

    def _leave(self, still_running: list[int]) -> None:
        if len(still_running) == len(self.rows):
            return
        self.rows = [self.rows[index] for index in still_running]
        if self.rows:
            self.runner.select_rows(still_running)
            self.drafter.select_rows(still_running)

    def _keep_peers_company(self) -> None:
        """Other processes still generate, and sharded weights need every process in every forward."""
        self.runner.verify(self.sequences.anchors([0]))
        self.runner.keep([0], 1)


__all__ = ["DecodingLoop", "decode"]
