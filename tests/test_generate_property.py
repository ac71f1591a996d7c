"""Greedy decoding with a draft gives the target's own tokens, whatever the draft, the shape of the batch and the tree.

One property over everything that decides which code runs: family, window, ragged left-padded rows, block size, tree
budget, how deep the draft is right, where rows end. `--hypothesis-profile explore` draws new cases every time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import FAMILIES, greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import OracleDraft

LENGTHS = (1, 2, 3, 5, 8, 11)
NEW_TOKENS = 14
WINDOWED = ("mistral", "gemma3", "gpt_oss")


@cache
def cached_target(family: str, window: int | None) -> Any:
    return tiny_target(family, **({"sliding_window": window} if window else {}))


@cache
def continuation(family: str, window: int | None, length: int) -> torch.Tensor:
    """A prompt and what the target alone says after it, past the end of every test: (length + N,)."""
    target = cached_target(family, window)
    return greedy(target, random_prompt(length, seed=length), NEW_TOKENS + 8, eos_token_id=None)[0]


def expected_row(row: torch.Tensor, length: int, num_new: int, eos: set[int]) -> list[int]:
    """The first `num_new` tokens after the prompt, up to the first end-of-sequence token."""
    tokens = row[length : length + num_new].tolist()
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


@settings(max_examples=2000)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    window=st.sampled_from([3, 6, 16]),
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    block_size=st.integers(2, 7),
    tree_budget=st.sampled_from([0, 0, 1, 4, 16, 64]),
    depths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    num_new=st.integers(1, NEW_TOKENS),
    eos_at=st.lists(st.integers(0, NEW_TOKENS), max_size=2),
)
@example("mistral", 3, [11, 1, 5], 7, 64, [6, 0], NEW_TOKENS, [4])
def test_drafted_text_is_the_targets_own(
    family: str,
    window: int,
    lengths: list[int],
    block_size: int,
    tree_budget: int,
    depths: list[int],
    num_new: int,
    eos_at: list[int],
) -> None:
    used_window = window if family in WINDOWED else None
    target = cached_target(family, used_window)
    rows = [continuation(family, used_window, length) for length in lengths]
    # Tokens that really come, so that rows end in the middle of a block, each at a place of its own.
    eos = {int(rows[0][lengths[0] + place]) for place in eos_at}
    draft = tiny_draft(target, block_size=block_size, draft_class=OracleDraft)
    draft.tell(target, rows, depths)
    draft.generation_config.draft_tree_budget = tree_budget
    inputs = left_padded([row[:length] for row, length in zip(rows, lengths, strict=True)])
    output = target.generate(
        **inputs,
        assistant_model=draft,
        do_sample=False,
        max_new_tokens=num_new,
        eos_token_id=sorted(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    width = inputs["input_ids"].shape[1]
    wanted = [expected_row(row, length, num_new, eos) for row, length in zip(rows, lengths, strict=True)]
    longest = max(map(len, wanted))
    assert output.sequences[:, width:].tolist() == [tokens + [0] * (longest - len(tokens)) for tokens in wanted]
    for tokens, accepted in zip(wanted, output.acceptance_lengths, strict=True):
        assert sum(accepted) == len(tokens) - 1  # the prefill's token belongs to no round
