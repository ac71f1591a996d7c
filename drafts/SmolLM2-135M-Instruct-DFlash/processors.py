"""Applying `generate`'s logits processors to many positions at once, exactly as one-by-one decoding would.

Processors fall into three kinds. *Pointwise* ones look at the scores alone: all positions in one call. Ones that *read
the context* but remember nothing get each position's own prefix. All others may keep state from call to call
(classifier-free guidance runs the target on every prefix it is shown), so they must see accepted prefixes only, each
once and in order: the verification then walks position by position, and the draft goes without them.

A processor may raise on a prefix that will be refused: one that constrains the text may know no others than those it
allows. Such an error is kept until it is clear that one-by-one decoding would have met it.

Shapes: B batch, W positions, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from transformers.generation import logits_process as lp

POINTWISE = {
    getattr(lp, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
    if hasattr(lp, name)
}
READS_CONTEXT = {
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoRepeatNGramLogitsProcessor,
    lp.SequenceBiasLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.PrefixConstrainedLogitsProcessor,
    lp.ForcedBOSTokenLogitsProcessor,
    lp.ForcedEOSTokenLogitsProcessor,
    lp.ExponentialDecayLengthPenalty,
    lp.SuppressTokensAtBeginLogitsProcessor,
}


class BlockProcessor:
    """The logits processors of one `generate` call, applied to blocks of positions.

    Attributes:
        is_stateful: Some processor may remember earlier calls; only `one` may be used, on accepted prefixes in order.
        errors: What processors raised in the last `in_context`, by place in the batch and position.
    """

    def __init__(self, processors: Sequence[lp.LogitsProcessor] | None, batch_size: int):
        self.processors = lp.LogitsProcessorList(processors or [])
        kinds = {type(processor) for processor in self.processors}
        self.errors: dict[tuple[int, int], Exception] = {}
        self.is_empty = not kinds
        self.is_pointwise = kinds <= POINTWISE
        self.is_stateful = not kinds <= POINTWISE | READS_CONTEXT
        # Rows are shown one at a time, so what tells them apart is copied for each: a prefix constraint is told the
        # row's number, a repetition penalty skips the row's padding.
        self.by_row = [self.processors] * batch_size
        if batch_size > 1 and kinds & {lp.PrefixConstrainedLogitsProcessor, lp.RepetitionPenaltyLogitsProcessor}:
            self.by_row = [_for_row(self.processors, row) for row in range(batch_size)]

    def one(self, row: int, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Scores (1, V) of the token after `prefix` (1, n) in row `row` of the original batch, from logits (1, V)."""
        return self.by_row[row](prefix, to_float32(logits))

    def guess(self, row: int, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`one` for a draft: where a processor does not bear the prefix, the logits as they are, in float32."""
        try:
            return self.one(row, prefix, logits)
        except Exception:
            return to_float32(logits)

    def chain(
        self, rows: Sequence[int], prefixes: Sequence[torch.Tensor], candidates: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Scores of W positions of every row, each after the prefix and the candidates before it.

        Args:
            rows: Numbers of the rows in the original batch.
            prefixes: What each row has committed, (1, n_b) each.
            candidates: (B, W - 1) or more.
            logits: (B, W, V).
        """
        if self.is_empty or self.is_pointwise:
            return self.pointwise(logits)
        contexts = [
            [torch.cat([prefix, candidates[i : i + 1, :step]], dim=1) for step in range(logits.shape[1])]
            for i, prefix in enumerate(prefixes)
        ]
        return self.in_context(rows, contexts, logits)

    def pointwise(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores (B, W, V) where no processor reads the context; the logits themselves where there is none."""
        if self.is_empty:
            return logits
        no_context = torch.zeros(logits.shape[0] * logits.shape[1], 1, dtype=torch.long, device=logits.device)
        return self.processors(no_context, to_float32(logits).flatten(0, 1)).view(logits.shape)

    def in_context(
        self, rows: Sequence[int], contexts: Sequence[Sequence[torch.Tensor]], logits: torch.Tensor
    ) -> torch.Tensor:
        """Scores (B, W, V) where position w of row b stands behind the tokens `contexts[b][w]`, (1, n).

        Where a processor raises, `errors` has the error and the scores are the logits.
        """
        self.errors = {}
        scores = to_float32(logits)
        for i, row in enumerate(rows):
            for w, context in enumerate(contexts[i]):
                try:
                    scores[i, w] = self.one(row, context, logits[i, w][None])[0]
                except Exception as error:
                    self.errors[i, w] = error
        return scores

    def raise_errors(self, index: int, positions: Iterable[int]) -> None:
        """Raise what a processor raised at one of these positions, which one-by-one decoding visits."""
        for position in positions:
            if (index, position) in self.errors:
                raise self.errors[index, position]


def to_float32(logits: torch.Tensor) -> torch.Tensor:
    """A float32 copy, as `generate` makes before processors and sampling (they may write in place)."""
    return logits.to(dtype=torch.float32, copy=True)


def _for_row(processors: lp.LogitsProcessorList, row: int) -> lp.LogitsProcessorList:
    adapted = lp.LogitsProcessorList()
    for processor in processors:
        if type(processor) is lp.PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            processor = lp.PrefixConstrainedLogitsProcessor(
                lambda _, ids, allowed=allowed: allowed(row, ids), num_beams=1
            )
        elif isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
            processor = lp.RepetitionPenaltyLogitsProcessor(
                processor.penalty, processor.prompt_ignore_length[row : row + 1]
            )
        adapted.append(processor)
    return adapted


__all__ = ["BlockProcessor", "to_float32"]
