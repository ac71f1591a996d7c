"""What the caches hold in a long run of a batch: the tokens that were kept, never the tokens that were tried.

Shapes: B batch, W verified positions, N new tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comparing import shared_target
from dflash_hf.generation import decoding
from dflash_hf.generation.target_cache import GrowingLayer
from helpers import left_padded, random_prompt
from hybrid_targets import hybrid_target
from oracle import oracle_draft

NEW_TOKENS = 120
LENGTHS = (3, 12, 7, 5)


def numbers_in(cache: Any) -> int:
    """Elements of all keys, values and recurrent states."""
    held = 0
    for layer in cache.layers:
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None)]
        for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
            tensors += [] if states is None else states.values()
        held += sum(0 if tensor is None else tensor.numel() for tensor in tensors)
    return held


@pytest.mark.parametrize("tree_budget", [0, 32])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "falcon_h1"])
def test_caches_hold_what_plain_decoding_would(family: str, tree_budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rounds: as wide as the longest row still running, the target's to the column with little room behind it,
    the draft's within the doubling of a buffer that grows."""
    target = hybrid_target(family) if family == "falcon_h1" else shared_target(family)
    inputs = left_padded([random_prompt(length, seed=length)[0] for length in LENGTHS])
    mask = inputs["attention_mask"]
    draft = oracle_draft(target, inputs["input_ids"], NEW_TOKENS, [3, 0, 0, 2, 1, 0, 0], attention_mask=mask)
    draft.generation_config.draft_tree_budget = tree_budget
    original = decoding.DecodingLoop._round
    loops, peaks, tried = [], [], 0

    def measured(loop: Any) -> None:
        nonlocal tried
        loops.append(loop)
        before = len(loop.rows)
        original(loop)
        tried += before * (loop.drafter.draft.config.block_size if not loop.tree_budget else tree_budget + 1)
        if not loop.rows:
            return
        longest = max(loop.sequences.lengths[row] - (12 - LENGTHS[row]) for row in loop.rows) - 1
        for layer in loop.runner.cache.layers:
            if getattr(layer, "keys", None) is not None:
                window = getattr(layer, "sliding_window", None)
                assert layer.keys.shape[0] == len(loop.rows)
                assert layer.keys.shape[2] == (longest if window is None else min(longest, window - 1))
            for buffer in getattr(layer, "buffers", ()):
                width = max(tree_budget + 1, loop.drafter.draft.config.block_size)
                columns = longest + width + GrowingLayer.room(longest + width)
                fresh = len(loop.rows) * buffer.shape[1] * columns * buffer.shape[3]
                assert buffer.untyped_storage().nbytes() <= 2 * fresh * buffer.element_size()
        for keys in loop.drafter.cache.keys:
            assert keys.shape[0] == len(loop.rows)
            assert keys.shape[2] <= max(64, 2 * longest) + loop.drafter.draft.config.block_size
        peaks.append((longest, len(loop.rows), numbers_in(loop.runner.cache)))

    monkeypatch.setattr(decoding.DecodingLoop, "_round", measured)
    output = target.generate(
        **inputs, assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True
    )
    assert loops[0].tree_budget == (0 if family == "falcon_h1" else tree_budget)
    kept = sum(sum(row) for row in output.acceptance_lengths)
    assert kept < tried / 1.5, "far more was tried than kept"
    with torch.no_grad():  # what a prefill of as many tokens takes
        longest, rows, held = max(peaks, key=lambda peak: peak[2])
        fresh = target(random_prompt(longest, batch_size=rows), use_cache=True)
    from dflash_hf.generation.compat import get_cache

    assert held == numbers_in(get_cache(fresh))
