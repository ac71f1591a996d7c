"""The decoding loop: draft a block, verify it in one forward of the target, commit what stands.

One loop serves single sequences and batches, chains and trees, dense and recurrent targets, greedy decoding and
sampling. Transformers' own assisted loop is not used: it takes one row and one chain, refuses caches that cannot be
cropped, checks stopping criteria once a block instead of once a token, calls stateful logits processors on refused
candidates, and reads a cache handed over from an earlier turn from its start. `DFlashCandidateGenerator` still works
under it for who calls it directly.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.utils import logging

from .adapters import why_not_with_adapters
from .compat import get_cache
from .drafting import Drafter
from .inference import inference_mode_if_private, make_ordinary, ordinary_tensors
from .ordering import filled_gaps, in_order
from .processors import BlockProcessor
from .proposals import Proposal, Proposer
from .rollback import why_not_croppable
from .rope_limits import RopeLimits
from .sequences import DFlashGenerateOutput, Sequences
from .settings import DraftSettings
from .stopping import StopRule
from .target_cache import can_grow
from .target_runner import TargetRunner
from .tree import node_contexts, walk
from .tree_support import why_no_tree
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
    cache = get_cache(model_kwargs)
    reason = why_not_drafted(input_ids, logits_processor, stopping_criteria, cache, streamer)
    reason = reason or why_not_with_adapters(target, input_ids.shape[0])
    if input_ids.shape[0] > 1:
        reason = reason or RopeLimits.of(target).why_not_in_a_batch(generation_config.max_length)
    if reason is not None:
        logger.warning_once(f"Generating without the draft: {reason}.")
        output = target._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
        if isinstance(output, torch.Tensor):
            return output
        return DFlashGenerateOutput(**output, acceptance_lengths=[[] for _ in output.sequences])
    loop = DecodingLoop(target, draft, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    return loop.run(streamer, synced_gpus)


def why_not_drafted(
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    cache: Any,
    streamer: Any = None,
) -> str | None:
    """Why a call cannot be drafted without changing its result; `None` if it can."""
    if cache is None:
        return "the target makes a cache of its own kind, from which tokens may not be taken back"
    if reason := why_not_croppable(cache):
        return reason
    if input_ids.shape[0] == 1:
        return None
    if streamer is not None:
        return "a streamer hears of all rows of a batch step by step, and drafted rows do not keep step"
    if BlockProcessor(logits_processor, 1).is_stateful:
        names = ", ".join(type(processor).__name__ for processor in logits_processor)
        return f"a logits processor may remember what it was shown, or tell the rows of a batch apart ({names})"
    rule = StopRule(stopping_criteria, 0)
    if not rule.is_rowwise:
        names = ", ".join(type(criterion).__name__ for criterion in rule.others)
        return f"a stopping criterion may judge the rows of a batch together, or count its calls ({names})"
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
        self.do_sample = generation_config.do_sample
        self.settings = DraftSettings.read(draft, generation_config)
        self.processor = BlockProcessor(logits_processor, input_ids.shape[0])
        self.stop_rule = StopRule(stopping_criteria, generation_config.max_length)
        self.sequences = Sequences(input_ids, generation_config)
        capture_all = self.sequences.hidden_states is not None
        self.runner = TargetRunner(target, draft.config.target_layer_ids, generation_config, model_kwargs, capture_all)
        self.drafter = Drafter(
            draft, target.get_input_embeddings(), target.get_output_embeddings(), self.settings.context_length
        )
        self.proposer = Proposer(self.drafter, self.processor, self.settings, self.do_sample)
        self.tree_budget = 0  # decided after the prefill
        self.rows = list(range(input_ids.shape[0]))  # rows still running
        self.num_shown = 1  # of a round's tokens, what the caller's code has been shown

    def run(self, streamer: Any, synced_gpus: bool) -> Any:
        """Generate until every row has stopped, and return what `generate` does."""
        self.streamer = streamer
        with inference_mode_if_private(
            self.target,
            self.drafter.draft,
            self.runner.cache,
            self.sequences,
            self.processor,
            self.stop_rule,
            synced_gpus,
        ):
            self._generate(synced_gpus)
        if streamer is not None:
            streamer.end()
        if self.sequences.returns_dict:
            make_ordinary(self.runner.cache)
        return self.sequences.output(self.runner.cache)

    def _generate(self, synced_gpus: bool) -> None:
        """Prefill, then rounds until every row has stopped."""
        try:
            self._prefill(synced_gpus)
            device = self.sequences.buffer.device
            with self.target._optimize_model_for_decode():
                while self.target._has_unfinished_sequences(not self.rows, synced_gpus, device):
                    if self.rows:
                        self._round()
                    else:
                        self._keep_peers_company()
        finally:
            self.runner.close()
            self.runner.restore_rows()

    def _prefill(self, synced_gpus: bool) -> None:
        """Run the prompt and commit the token that follows it; it belongs to no round."""
        ids = self.sequences.buffer
        outputs, taps, lengths, past = self.runner.prefill(ids)
        self.drafter.begin(len(self.rows), past)
        self.drafter.observe(taps, lengths)
        logits = outputs.logits[:, -1:].to(ids.device)
        self._commit(outputs, logits, self._prefixes(), Proposal(ids.new_empty(len(self.rows), 0)), is_round=False)
        if self.rows:
            anchors = self.sequences.anchors(self.rows)
            self.runner.check_continues(anchors)
            self.tree_budget = self._usable_tree_budget(anchors)
            if not synced_gpus and self._can_align_left(anchors):  # peers may not try a tree just now
                self.runner.align_left()

    def _can_align_left(self, anchors: torch.Tensor) -> bool:
        """Whether the rows of a batch may start in one column: each is masked apart, as the branches of a tree are."""
        is_batch = len(self.rows) > 1 and self.sequences.attentions is None
        return is_batch and can_grow(self.runner.cache) and why_no_tree(self.runner, anchors) is None

    def _usable_tree_budget(self, anchors: torch.Tensor) -> int:
        """The tree budget that was set, or 0 with one warning where this call can verify chains only."""
        if not self.settings.tree_budget:
            return 0
        if self.processor.is_stateful:
            reason: str | None = "a logits processor may remember what it was shown, so it must see one path only"
        elif self.sequences.attentions is not None:
            reason = "`output_attentions` describes one path only"
        else:
            reason = why_no_tree(self.runner, anchors)
        if reason is not None:
            logger.warning_once(f"Drafting a chain instead of a tree: {reason}.")
            return 0
        return self.settings.tree_budget

    def _round(self) -> None:
        """Draft, verify, commit (the design's round, arXiv 2602.06036, section 3)."""
        anchors = self.sequences.anchors(self.rows)
        remaining = self._remaining()
        prefixes = self._prefixes()
        proposal = self.proposer.propose(self.rows, prefixes, anchors, remaining, self.tree_budget)
        outputs = self.runner.verify(torch.cat([anchors, proposal.tokens], dim=1), proposal.tree)
        self._commit(outputs, outputs.logits.to(anchors.device), prefixes, proposal, is_round=True)

    def _prefixes(self) -> list[torch.Tensor]:
        """What each row has committed, (1, n_b) each."""
        return [self.sequences.prefix(row) for row in self.rows]

    def _remaining(self) -> int:
        """Tokens that this round may hold: what the row furthest behind may get; the others are cut at their end.

        The candidates of the longest row must leave neither a static buffer nor a table of positions, though.
        """
        lengths = [self.sequences.lengths[row] for row in self.rows]
        remaining = self.stop_rule.max_length - max(lengths)
        if self.runner.can_be_ragged:
            behind = self.stop_rule.max_length - min(lengths)
            remaining = max(remaining, min(behind, self.runner.free_positions()))
        most = self.runner.most_tokens()
        return remaining if most is None else min(remaining, most)

    def _commit(
        self,
        outputs: Any,
        logits: torch.Tensor,
        prefixes: Sequence[torch.Tensor],
        proposal: Proposal,
        is_round: bool,
    ) -> None:
        """Accept, append up to where a row stops, roll the caches back to what was kept, let stopped rows leave."""
        verdict = None
        self.num_shown = 1
        try:
            verdict, scores = self._accept(logits, prefixes, proposal)
            counts, still_running = self._commit_rows(outputs, logits, scores, verdict, is_round)
        except BaseException:
            if is_round:
                self._abandon(proposal, verdict)
            raise
        if is_round:
            taps = self.runner.taps(outputs, max(counts), verdict.order)
            del outputs
            # A row that stops short leaves; where rows cannot be ragged, the cache keeps it level with the others.
            kept = counts if self.runner.can_be_ragged else [max(counts)] * len(counts)
            self.runner.keep(kept, proposal.width, verdict.order)
            self.drafter.observe(taps, counts)
            self.proposer.learn(proposal, counts)
        self._leave(still_running)

    def _commit_rows(
        self, outputs: Any, logits: torch.Tensor, scores: torch.Tensor, verdict: Verdict, is_round: bool
    ) -> tuple[list[int], list[int]]:
        """Append what was accepted; returns how many tokens each row got, and which rows go on."""
        if verdict.order is not None and self.sequences.keeps_scores:
            logits, scores = in_order(logits, verdict.order), in_order(scores, verdict.order)
        committed = verdict.to_host()
        if is_round and not self.runner.can_be_ragged:  # rows of a cache that keeps them level advance together
            level = min(len(tokens) for tokens in committed)
            committed = [tokens[:level] for tokens in committed]
        counts, still_running = [], []
        for index, tokens in enumerate(committed):
            count, stops = self._judge_row(index, tokens, outputs, logits, scores, verdict.order)
            counts.append(count)
            if not stops:
                still_running.append(index)
        committed = [tokens[:count] for tokens, count in zip(committed, counts, strict=True)]
        self.sequences.append(self.rows, committed, is_round)
        if self.streamer is not None:
            self._stream(committed[0])
        return counts, still_running

    def _abandon(self, proposal: Proposal, verdict: Verdict | None) -> None:
        """The caller's code has raised: leave the cache as one-by-one decoding would have left it there.

        It then stands for all tokens but the last that was shown; in a batch, for those before this round.
        """
        kept = [self.num_shown if len(self.rows) == 1 else 1] * len(self.rows)
        self.runner.keep(kept, proposal.width, None if verdict is None else verdict.order)

    def _accept(
        self, logits: torch.Tensor, prefixes: Sequence[torch.Tensor], proposal: Proposal
    ) -> tuple[Verdict, torch.Tensor]:
        """The verdict, and the processed scores (B, W or fewer, V) that it was reached on."""
        if self.processor.is_stateful:
            return self._accept_stepwise(logits, proposal, prefixes[0])
        if proposal.tree is not None:
            if self.processor.is_empty or self.processor.is_pointwise:
                scores = self.processor.pointwise(logits)
            else:
                scores = self.processor.in_context(self.rows, node_contexts(proposal.tree, prefixes), logits)
            return walk(proposal.tree, scores, self.do_sample), scores
        scores = self.processor.chain(self.rows, prefixes, proposal.tokens, logits)
        if self.do_sample:
            return accept_sampled(proposal.tokens, proposal.probs, scores), scores
        return accept_greedy(proposal.tokens, scores), scores

    def _accept_stepwise(
        self, logits: torch.Tensor, proposal: Proposal, prefix: torch.Tensor
    ) -> tuple[Verdict, torch.Tensor]:
        """Accept one row's chain while showing the processors accepted prefixes only, each once and in order."""
        seen: list[torch.Tensor] = []

        def score_at(step: int) -> torch.Tensor:
            self.num_shown = step + 1
            context = torch.cat([prefix, proposal.tokens[:, :step]], dim=1)
            seen.append(self.processor.one(0, context, logits[:, step]))
            return seen[-1]

        ends = self.stop_rule.eos_token_ids
        verdict = accept_stepwise(proposal.tokens, proposal.probs, score_at, self.do_sample, ends)
        return verdict, torch.stack(seen, dim=1)

    def _judge_row(
        self,
        index: int,
        tokens: Sequence[int],
        outputs: Any,
        logits: torch.Tensor,
        scores: torch.Tensor,
        order: torch.Tensor | None,
    ) -> tuple[int, bool]:
        """How many of the accepted tokens a row gets before it stops, and whether it stops; keeps their records."""
        row, sequences = self.rows[index], self.sequences
        sequences.record_scores(row, scores[index, : len(tokens)], logits[index, : len(tokens)])
        count, stops = self.stop_rule.committed(
            sequences.lengths[row],
            tokens,
            lambda n: self._shown(row, tokens[:n]),
            lambda n: sequences.scores_at(row, n),
        )
        positions: Sequence[int] = range(count)
        if order is not None and (self.processor.errors or sequences.records_states):
            positions = order[index, :count].tolist()
        self.processor.raise_errors(index, positions)
        sequences.trim_scores(row, count)
        sequences.record_states(row, index, outputs, positions, self.runner.cache)
        return count, stops

    def _stream(self, tokens: Sequence[int]) -> None:
        """Hand a single row's tokens to the streamer, one by one."""
        with ordinary_tensors():
            for number, token in enumerate(tokens, start=1):
                self.num_shown = number
                self.streamer.put(torch.tensor([token]))

    def _shown(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """The ids (1, length) that a criterion judges after some of this round's tokens."""
        self.num_shown = len(tokens)
        return self.sequences.prefix(row, tokens)

    def _leave(self, still_running: list[int]) -> None:
        """Let stopped rows go: they are neither drafted for, nor verified, nor stored from now on."""
        if len(still_running) == len(self.rows):
            return
        still_running = filled_gaps(still_running)
        self.last_rows = self.rows
        self.rows = [self.rows[index] for index in still_running]
        lengths = self.sequences.lengths
        end = self.stop_rule.max_length if self.rows else max(lengths)
        ends_early = any(lengths[row] < end for row in self.last_rows if row not in self.rows)
        anchors = self.sequences.anchors(self.last_rows) if ends_early else None
        if self.rows:
            self.runner.select_rows(still_running, anchors)
            self.drafter.select_rows(still_running)
        elif anchors is not None:
            self.runner.store_last_tokens(range(len(self.last_rows)), anchors)

    def _keep_peers_company(self) -> None:
        """Other processes still generate, and sharded weights need every process in every forward."""
        self.runner.verify(self.sequences.anchors(self.last_rows))
        self.runner.keep([0] * len(self.last_rows), 1)


__all__ = ["DecodingLoop", "decode"]
