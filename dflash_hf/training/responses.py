"""The target's own answers to prompts by local batched `generate`, and what any answer must be to be trained on.

Shapes: B batch, S context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .prompts import Failure, Prompt

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Progress = Callable[[int, int], None]  # rows answered, tokens of their answers


@dataclass(frozen=True)
class Response:
    """One answered prompt: `token_ids` are the answer's alone, its end-of-sequence token included."""

    prompt: Prompt
    token_ids: list[int]
    finish_reason: str  # "stop" (the target ended it), "length" or "loop"


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn and cut.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 cut nothing off; `loop_repeats` 0 keeps loops.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    loop_ngram: int = 8
    loop_repeats: int = 4


class Responder(Protocol):
    """Answers prompts. `start` may begin at once; the function it returns waits for the answers, in order."""

    def start(self, prompts: Sequence[Prompt], seed: int) -> Callable[[], list[Response | Failure]]: ...

    def close(self) -> None: ...


def loop_start(token_ids: Sequence[int], ngram: int, repeats: int) -> int | None:
    """Where an answer has begun to loop: the end of the `repeats`-th occurrence of one n-gram, or None.

    Small targets fall into endless repetition. What comes after this point teaches a draft nothing but the loop.
    """
    if ngram < 1 or repeats < 1:
        return None
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(ngram, len(token_ids) + 1):
        gram = tuple(token_ids[end - ngram : end])
        seen[gram] += 1
        if seen[gram] >= repeats:
            return end
    return None


def finish(prompt: Prompt, token_ids: list[int], eos_ids: Sequence[int], sampling: Sampling) -> Response | Failure:
    """An answer cut at its end-of-sequence token or where it begins to loop; an empty one is a failure."""
    stop = next((i for i, token in enumerate(token_ids) if token in eos_ids), None)
    reason = "length" if stop is None else "stop"
    token_ids = token_ids if stop is None else token_ids[: stop + 1]
    loop = loop_start(token_ids, sampling.loop_ngram, sampling.loop_repeats)
    if loop is not None and loop < len(token_ids):
        token_ids, reason = token_ids[:loop], "loop"
    if not token_ids or (len(token_ids) == 1 and reason == "stop"):
        return Failure(prompt.row, "the target gave an empty response")
    return Response(prompt, token_ids, reason)


class LocalResponder:
    """Batched `generate` in segments: after each segment, rows that have ended leave the batch and its cache.

    Args:
        target: A causal language model, in evaluation mode.
        tokenizer: Its tokenizer, for the padding token.
        sampling: How answers are drawn.
        batch_size: Rows at a time, taken in the order of their prompts' length.
        segment: Tokens between two looks at which rows have ended.
        progress: Told of every finished batch.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        batch_size: int = 32,
        segment: int = 32,
        progress: Progress = lambda rows, tokens: None,
    ) -> None:
        self.target = target
        self.sampling = sampling
        self.batch_size = batch_size
        self.segment = segment if _rows_can_leave(target) else sampling.max_new_tokens
        self.progress = progress
        self.eos_ids = eos_ids_of(target.generation_config, tokenizer)
        pad = tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else (self.eos_ids[0] if self.eos_ids else 0)

    def start(self, prompts: Sequence[Prompt], seed: int) -> Callable[[], list[Response | Failure]]:
        return lambda: self.answer(prompts, seed)

    def close(self) -> None:
        """Nothing runs on behind this one."""

    def answer(self, prompts: Sequence[Prompt], seed: int) -> list[Response | Failure]:
        """The answers in the prompts' order; with a temperature, `seed` and the prompts decide them."""
        import torch

        torch.manual_seed(seed)
        by_length = sorted(prompts, key=lambda prompt: (len(prompt.token_ids), prompt.row))
        answers: dict[int, Response | Failure] = {}
        for begin in range(0, len(by_length), self.batch_size):
            batch = by_length[begin : begin + self.batch_size]
            answers |= dict(zip((prompt.row for prompt in batch), self._answer_batch(batch), strict=True))
        return [answers[prompt.row] for prompt in prompts]

    def _answer_batch(self, batch: Sequence[Prompt]) -> list[Response | Failure]:
        """Answers of one batch; one that fails (out of memory, say) is halved until the failing row stands alone."""
        try:
            generated = self._generate(batch)
        except (RuntimeError, IndexError, ValueError) as error:
            if len(batch) == 1:
                self.progress(1, 0)
                return [Failure(batch[0].row, f"{type(error).__name__}: {error}")]
            half = len(batch) // 2
            return self._answer_batch(batch[:half]) + self._answer_batch(batch[half:])
        answers = [finish(p, ids, self.eos_ids, self.sampling) for p, ids in zip(batch, generated, strict=True)]
        self.progress(len(batch), sum(len(a.token_ids) for a in answers if isinstance(a, Response)))
        return answers

    def _generate(self, batch: Sequence[Prompt]) -> list[list[int]]:
        """The new tokens of every row of a batch, with whatever follows their end."""
        import torch
        from transformers import DynamicCache

        from ..generation.compat import CACHE_KEY

        ids, mask = self._padded(batch)  # (B, S)
        prompt_length = ids.shape[1]
        limit = self.sampling.max_new_tokens
        answers: list[list[int]] = [[] for _ in batch]
        rows = list(range(len(batch)))
        cache = DynamicCache(config=self.target.config) if self.segment < limit else None
        arguments = self._generate_arguments() | ({} if cache is None else {CACHE_KEY: cache})
        while rows and (done := ids.shape[1] - prompt_length) < limit:
            step = min(self.segment, limit - done)
            ids = self.target.generate(ids, attention_mask=mask, max_new_tokens=step, **arguments)
            mask = torch.cat([mask, mask.new_ones(len(rows), ids.shape[1] - mask.shape[1])], dim=1)
            for row, answer in zip(rows, ids[:, prompt_length:].tolist(), strict=True):
                answers[row] = answer
            going = [place for place, row in enumerate(rows) if not self._ended(answers[row])]
            if 0 < len(going) < len(rows) and cache is not None:
                kept = torch.tensor(going, device=ids.device)
                ids, mask = ids[kept], mask[kept]
                cache.batch_select_indices(kept)
            rows = [rows[place] for place in going]
        return answers

    def _ended(self, answer: list[int]) -> bool:
        if any(token in self.eos_ids for token in answer):
            return True
        return loop_start(answer, self.sampling.loop_ngram, self.sampling.loop_repeats) is not None

    def _padded(self, batch: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        longest = max(len(prompt.token_ids) for prompt in batch)
        gaps = [longest - len(prompt.token_ids) for prompt in batch]
        ids = [[self.pad_id] * gap + prompt.token_ids for gap, prompt in zip(gaps, batch, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]
        device = self.target.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _generate_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"eos_token_id": self.eos_ids or None, "pad_token_id": self.pad_id}
        if self.sampling.temperature == 0:
            return arguments | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return arguments | {
            "do_sample": True,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
        }


def eos_ids_of(generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends an answer: the generation config's, else the tokenizer's one."""
    named = getattr(generation_config, "eos_token_id", None)
    named = tokenizer.eos_token_id if named is None else named
    return [] if named is None else [named] if isinstance(named, int) else list(named)


def _rows_can_leave(target: PreTrainedModel) -> bool:
    """Whether rows can be taken out of the target's cache: recurrent states and caches of a model's own may not."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if getattr(target, "_is_stateful", False):
        return False
    layers = DynamicCache(config=target.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
