"""The rows being generated: their tokens, what the caller asked to have recorded, and the final output.

Shapes: B rows, n tokens committed in a round, W verified positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .compat import CACHE_KEY


@dataclass
class DFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """[`~transformers.generation.GenerateDecoderOnlyOutput`] plus how the drafting went.

    Attributes:
        acceptance_lengths: Per row, the tokens each round committed: accepted candidates and the target's own one.
    """

    acceptance_lengths: list[list[int]] | None = None


class Sequences:
    """Token ids of every row in a buffer (B, capacity); rows have lengths of their own and may have finished.

    Args:
        input_ids: The prompt, (B, prompt length), left padding included.
        generation_config: As prepared by `generate`; its output flags say what is recorded.
    """

    def __init__(self, input_ids: torch.Tensor, generation_config: Any):
        self.batch_size, self.prompt_length = input_ids.shape
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.pad_token_id = 0 if pad is None else int(pad)
        self.buffer = input_ids
        self.lengths = [self.prompt_length] * self.batch_size
        self.acceptance_lengths: list[list[int]] = [[] for _ in range(self.batch_size)]
        wants = generation_config.return_dict_in_generate
        self.returns_dict = wants
        self.scores = self._record(wants and generation_config.output_scores)
        self.logits = self._record(wants and generation_config.output_logits)
        self.hidden_states = self._record(wants and generation_config.output_hidden_states)
        self.attentions = self._record(wants and generation_config.output_attentions)

    def _record(self, is_wanted: bool | None) -> list[list[Any]] | None:
        """One list of per-token records for each row, or `None` if the record is not wanted."""
        return [[] for _ in range(self.batch_size)] if is_wanted else None

    def prefix(self, row: int, extra: Sequence[int] = ()) -> torch.Tensor:
        """Ids of a row (1, length), prompt padding included, followed by `extra` tokens not yet committed."""
        ids = self.buffer[row : row + 1, : self.lengths[row]]
        return torch.cat([ids, ids.new_tensor([list(extra)])], dim=1) if extra else ids

    def append(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], is_round: bool = True) -> None:
        """Commit each row's tokens, all in one write; those of the prefill belong to no round."""
        ends = [self.lengths[row] + len(own) for row, own in zip(rows, tokens, strict=True)]
        if max(ends) > self.buffer.shape[1]:
            room = max(*ends, 2 * self.buffer.shape[1]) - self.buffer.shape[1]
            self.buffer = torch.nn.functional.pad(self.buffer, (0, room), value=self.pad_token_id)
        entries = [
            (row, column, token)
            for row, own in zip(rows, tokens, strict=True)
            for column, token in enumerate(own, start=self.lengths[row])
        ]
        row_index, columns, new = self.buffer.new_tensor(entries).unbind(1)
        self.buffer[row_index, columns] = new
        for row, end, own in zip(rows, ends, tokens, strict=True):
            self.lengths[row] = end
            if is_round:
                self.acceptance_lengths[row].append(len(own))

    def anchors(self, rows: Sequence[int]) -> torch.Tensor:
        """The last committed token of each row, (len(rows), 1)."""
        return torch.stack([self.buffer[row, self.lengths[row] - 1 : self.lengths[row]] for row in rows])

    @property
    def records_tensors(self) -> bool:
        """Whether the output will hold any tensors but ids and the cache."""
        records = (self.scores, self.logits, self.hidden_states, self.attentions)
        return any(record is not None for record in records)

    @property
    def keeps_scores(self) -> bool:
        """Whether `record_scores` has anything to do."""
        return self.scores is not None or self.logits is not None

    def record_scores(self, row: int, scores: torch.Tensor, logits: torch.Tensor) -> None:
        """Keep the processed scores and raw logits (n, V) of tokens about to be committed, where wanted."""
        if self.scores is not None:
            self.scores[row].extend(scores.float().unbind())
        if self.logits is not None:
            self.logits[row].extend(logits.float().unbind())

    def scores_at(self, row: int, count: int) -> tuple[torch.Tensor, ...] | None:
        """`generate`'s `scores` once `count` tokens of this round are there; they have been recorded already."""
        if self.scores is None:
            return None
        return tuple(score[None] for score in self.scores[row][: self.lengths[row] - self.prompt_length + count])

    def trim_scores(self, row: int, count: int) -> None:
        """Of the tokens recorded for this round, keep `count`: a stopping criterion cut off the others."""
        kept = self.lengths[row] - self.prompt_length + count
        for record in (self.scores, self.logits):
            if record is not None:
                del record[row][kept:]

    @property
    def records_states(self) -> bool:
        """Whether `record_states` has anything to do."""
        return self.hidden_states is not None or self.attentions is not None

    def record_states(self, row: int, index: int, outputs: Any, positions: Sequence[int], cache: Any) -> None:
        """Keep hidden states and attentions of some verified positions, one record a token.

        `row` is the row of the batch, `index` its place in `outputs`. The prompt is one record, as in `generate`.
        """
        if not self.records_states:
            return
        is_prompt = self.lengths[row] == self.prompt_length
        steps = [slice(0, None)] if is_prompt else [slice(i, i + 1) for i in positions]
        if self.hidden_states is not None:
            for step in steps:
                self.hidden_states[row].append(tuple(s[index : index + 1, step] for s in outputs.hidden_states))
        if self.attentions is not None:
            for i, step in enumerate(steps):
                self.attentions[row].append(self._attention_step(row, index, outputs, step, i, is_prompt, cache))

    def _attention_step(
        self, row: int, index: int, outputs: Any, step: slice, offset: int, is_prompt: bool, cache: Any
    ) -> tuple[torch.Tensor, ...]:
        """Attention weights (1, heads, 1, keys) of one token, cut to the keys that one-by-one decoding would show."""
        layers = outputs.attentions
        if is_prompt:
            return tuple(layer[index : index + 1] for layer in layers)
        result = []
        for number, layer in enumerate(layers):
            cache_layer = cache.layers[number] if number < len(cache.layers) else None
            if isinstance(cache_layer, StaticLayer):  # all columns of the buffer, as in `generate`
                result.append(layer[index : index + 1, :, step])
                continue
            end = layer.shape[-1] - layer.shape[-2] + step.start + 1
            window = getattr(cache_layer, "sliding_window", None)
            keys = self.lengths[row] + offset if window is None else min(self.lengths[row] + offset, window)
            part = layer[index : index + 1, :, step, max(0, end - keys) : end]
            result.append(torch.nn.functional.pad(part, (keys - part.shape[-1], 0)))
        return tuple(result)

    def output(self, cache: Any) -> torch.Tensor | DFlashGenerateOutput:
        """What `generate` returns: (B, longest row), finished rows padded; with every record that was asked for."""
        end = max(self.lengths)
        column = torch.arange(end, device=self.buffer.device)
        limit = torch.tensor(self.lengths, device=self.buffer.device)[:, None]
        ids = self.buffer[:, :end]
        if min(self.lengths) < end:
            ids = torch.where(column < limit, ids, self.pad_token_id)
        elif ids.is_inference():  # made in a private call, which has ended
            ids = ids.clone()
        if not self.returns_dict:
            return ids
        return DFlashGenerateOutput(
            sequences=ids,
            scores=self._by_step(self.scores),
            logits=self._by_step(self.logits),
            attentions=self._states_by_step(self.attentions),
            hidden_states=self._states_by_step(self.hidden_states),
            acceptance_lengths=self.acceptance_lengths,
            **{CACHE_KEY: cache},
        )

    def _by_step(self, record: list[list[torch.Tensor]] | None) -> tuple[torch.Tensor, ...] | None:
        """Scores as one (B, V) tensor a step; zeros behind the end of a finished row."""
        if record is None:
            return None
        steps = max(len(row) for row in record)
        return tuple(
            torch.stack([row[i] if i < len(row) else torch.zeros_like(row[0]) for row in record]) for i in range(steps)
        )

    def _states_by_step(self, record: list[list[tuple[torch.Tensor, ...]]] | None) -> tuple[Any, ...] | None:
        if record is None:
            return None
        steps = []
        for i in range(max(len(row) for row in record)):
            model = next(row[i] for row in record if i < len(row))
            rows = [row[i] if i < len(row) else tuple(torch.zeros_like(part) for part in model) for row in record]
            steps.append(tuple(torch.cat(layer) for layer in zip(*rows, strict=True)))
        return tuple(steps)


__all__ = ["DFlashGenerateOutput", "Sequences"]
