"""Drafted generation beside the target alone: what the tests of `generate` compare with.

Shapes: B batch, S context, K block, V vocabulary, N new tokens.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from helpers import VOCABULARY, tiny_target
from oracle import Depth, OracleDraft


@cache
def shared_target(family: str = "qwen3", **overrides: Any) -> Any:
    """A tiny float64 target that many tests read and none changes."""
    return tiny_target(family, **overrides)


def generate_both(target: Any, draft: Any, inputs: Any, max_new_tokens: int = 24, **kwargs: Any) -> tuple[Any, Any]:
    """The outputs with and without the draft, greedy unless `kwargs` say otherwise."""
    inputs = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True} | kwargs
    plain = target.generate(**inputs, **options)
    return target.generate(**inputs, **options, assistant_model=draft), plain


def assert_same_text(target: Any, draft: Any, inputs: Any, max_new_tokens: int = 24, **kwargs: Any) -> Any:
    """Token for token what the target says alone; returns the drafted output."""
    drafted, plain = generate_both(target, draft, inputs, max_new_tokens, **kwargs)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    return drafted


class RawOracleDraft(OracleDraft):
    """An oracle that gives the target's raw logits along the true text: the processors must make tokens of them."""

    def tell(self, target: Any, rows: Any, depth: Depth) -> None:
        """As the oracle; `depth` is not used."""
        super().tell(target, rows, depth)
        with torch.no_grad():
            self.raw = [target(row[None], use_cache=False).logits[0] for row in rows]  # (S + N, V) each

    def compute_logits(self, last_hidden_state: torch.Tensor, target_head: Any) -> torch.Tensor:
        """(B, K - 1, V): what the target's head will say at these places."""
        logits = torch.zeros_like(super().compute_logits(last_hidden_state, target_head))
        for row_logits, (number, at) in zip(logits, self.places, strict=True):
            known = self.raw[number][at : at + len(row_logits)]
            row_logits[: len(known)] = known
        return logits


class Recorder(BaseStreamer):
    """Keeps every call: the values put, as nested lists, and `None` for the end."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        """Remember a value."""
        self.calls.append(value.tolist())

    def end(self) -> None:
        """Remember the end."""
        self.calls.append(None)


@contextmanager
def forwards_of(model: Any) -> Iterator[list[tuple[dict[str, Any], Any]]]:
    """Collect `(keyword arguments, output)` of every forward of a model."""
    calls: list[tuple[dict[str, Any], Any]] = []
    handle = model.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One letter or digit a token, ids 1 to 62; 0 pads and 63 is the drafts' mask."""
    letters = string.ascii_letters + string.digits
    vocabulary = {"<pad>": 0} | {letter: i for i, letter in enumerate(letters, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary | {"<mask>": VOCABULARY - 1}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", mask_token="<mask>", padding_side="left"
    )


def first_difference(target: Any, first: list[int], second: list[int]) -> tuple[int, float, float]:
    """Where two texts (token ids, prompt included) of a narrow target part, and whether rounding explains it.

    Returns:
        The place; how far the less likely of the two tokens is below the target's likeliest one, in float64 logits;
        and how far the target's narrow logits are from those.
    """
    place = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    prefix = torch.tensor([first[:place]])
    with torch.no_grad():
        exact = copy.deepcopy(target).double()(prefix).logits[0, -1]
        error = (target(prefix).logits[0, -1].double() - exact).abs().max()
    return place, float(exact.max() - exact[[first[place], second[place]]].min()), float(error)
