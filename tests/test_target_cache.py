"""Layers with room: what they hold is what Transformers' own layers would hold, in buffers that are rarely copied.

Shapes: B batch, G heads, T columns in use, D head size, W new tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, MptConfig, MptForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from comparing import assert_same_text, shared_target
from dflash_hf.generation import decoding, rollback
from dflash_hf.generation.compat import CACHE_KEY, get_cache
from dflash_hf.generation.target_cache import GrowingLayer, RowEnds, align_left, can_grow, give_back, let_grow
from helpers import PAD, VOCABULARY, greedy, left_padded, random_prompt, scramble, tiny_draft, tiny_target
from hybrid_targets import hybrid_target
from oracle import OracleDraft, oracle_draft

HEADS, SIZE = 2, 3
LENGTHS = (3, 9, 6)
DEPTHS = [3, 0, 0, 2, 1]


def states(width: int, batch_size: int = 1, seed: int = 0) -> torch.Tensor:
    """Random keys or values, (B, G, W, D)."""
    return torch.randn(batch_size, HEADS, width, SIZE, generator=torch.Generator().manual_seed(seed))


def filled_cache(width: int, batch_size: int = 1) -> DynamicCache:
    cache = DynamicCache()
    cache.update(states(width, batch_size, 1), states(width, batch_size, 2), 0)
    return cache


# --- one row ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 80), st.lists(st.tuples(st.integers(1, 70), st.integers(0, 70)), max_size=8))
def test_row_is_what_a_dynamic_layer_holds(prompt: int, rounds: list[tuple[int, int]]) -> None:
    """Forwards of any width, of which any number of tokens is taken back."""
    plain, growing = filled_cache(prompt), filled_cache(prompt)
    let_grow(growing)
    assert type(growing.layers[0]) is GrowingLayer
    for seed, (width, removed) in enumerate(rounds, start=3):
        new = states(width, seed=seed), states(width, seed=-seed)
        for mine, theirs in zip(growing.update(*new, 0), plain.update(*new, 0), strict=True):
            assert torch.equal(mine, theirs)
        for cache in (plain, growing):
            rollback.crop(cache, min(removed, width))
        assert growing.get_seq_length() == plain.get_seq_length()
    give_back(growing, is_kept=True)
    assert type(growing.layers[0]) is DynamicLayer
    assert torch.equal(growing.layers[0].keys, plain.layers[0].keys)
    assert torch.equal(growing.layers[0].values, plain.layers[0].values)


def test_tokens_are_written_beside_the_context_and_not_with_it() -> None:
    cache = filled_cache(100)
    let_grow(cache)
    layer = cache.layers[0]
    cache.update(states(1), states(1), 0)
    place, copies = layer.keys.data_ptr(), 0
    for seed in range(400):
        cache.update(states(8, seed=seed), states(8, seed=seed), 0)
        rollback.crop(cache, 6)
        copies += layer.keys.data_ptr() != place
        place = layer.keys.data_ptr()
    assert 0 < copies <= 13, "800 tokens kept, with room for 64 at a time"


@pytest.mark.parametrize("replace", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave", "assignment"])
def test_contents_may_be_replaced_by_others(replace: str) -> None:
    """By `Cache`'s own methods, or by anyone who sets `keys` and `values`."""
    cache, plain = filled_cache(5, batch_size=3), filled_cache(5, batch_size=3)
    let_grow(cache)
    new = states(2, 3, 8), states(2, 3, 9)
    for each in (cache, plain):
        each.update(*new, 0)
        if replace == "reorder_cache":
            each.reorder_cache(torch.tensor([2, 0, 1]))
        elif replace == "batch_select_indices":
            each.batch_select_indices(torch.tensor([0, 2]))
        elif replace == "batch_repeat_interleave":
            each.batch_repeat_interleave(2)
        else:
            each.layers[0].keys = each.layers[0].keys.flip(0)
            each.layers[0].values = each.layers[0].values.flip(0)
    rows = len(plain.layers[0].keys)
    new = states(2, rows, 10), states(2, rows, 11)
    for mine, theirs in zip(cache.update(*new, 0), plain.update(*new, 0), strict=True):
        assert torch.equal(mine, theirs)


# --- rows that end apart ---------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rows_hold_the_tokens_that_were_kept(data: st.DataObject) -> None:
    """Against a list of tokens for each row: forwards of which each row keeps its number, trees, rows that leave."""
    padding = data.draw(st.lists(st.integers(0, 6), min_size=2, max_size=4))
    width = 7 + data.draw(st.integers(0, 60))
    cache = filled_cache(width, len(padding))
    cache.layers[0].values = -cache.layers[0].keys
    kept = [[cache.layers[0].keys[row, :, c] for c in range(pad, width)] for row, pad in enumerate(padding)]
    rows = RowEnds([len(tokens) for tokens in kept], torch.device("cpu"))
    align_left(cache, torch.tensor(padding), rows)
    layer = cache.layers[0]
    for seed in range(data.draw(st.integers(1, 6))):
        width = data.draw(st.integers(1, 40))
        new = states(width, len(kept), seed)
        keys, _ = cache.update(new, -new, 0)
        assert keys.shape[2] == max(rows.ends) + width
        order = None
        if data.draw(st.booleans()):
            order = torch.stack([torch.randperm(width) for _ in kept])
            rollback.reorder_last(cache, order, width)
        counts = data.draw(st.lists(st.integers(0, width), min_size=len(kept), max_size=len(kept)))
        for row, count in enumerate(counts):
            columns = range(width) if order is None else order[row].tolist()
            kept[row] += [new[row, :, column] for column in columns[:count]]
        rows.set([len(tokens) for tokens in kept], torch.device("cpu"))
        rollback.crop(cache, keys.shape[2] - max(rows.ends))
        if len(kept) > 1 and data.draw(st.booleans()):
            leaving = data.draw(st.integers(0, len(kept) - 1))
            del kept[leaving]
            staying = [row for row in range(len(kept) + 1) if row != leaving]
            rows.set([len(tokens) for tokens in kept], torch.device("cpu"))
            rollback.crop(cache, layer.keys.shape[2] - max(rows.ends))
            cache.reorder_cache(torch.tensor(staying))
            assert layer.buffers[0].shape[2] <= max(rows.ends) + GrowingLayer.room(max(rows.ends))
        for row, tokens in enumerate(kept):
            assert torch.equal(layer.keys[row, :, : len(tokens)], torch.stack(tokens, dim=1))
            assert torch.equal(layer.values[row, :, : len(tokens)], -torch.stack(tokens, dim=1))
    assert layer.keys.shape[2] == max(rows.ends)
    assert layer.keys.isfinite().all(), "also where nothing was ever written: a weight of zero silences numbers only"


def ragged_batch(rows: int = 3) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A target, a draft whose rows accept different numbers, and their prompts; one row has no padding."""
    target, inputs = shared_target(), left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS[-rows:]])
    draft = oracle_draft(target, inputs["input_ids"], 60, DEPTHS, attention_mask=inputs["attention_mask"])
    return target, draft, inputs


def layers_of_rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Filled with the cache's layers as every round leaves them."""
    original, seen = decoding.DecodingLoop._round, []

    def watched(loop: Any) -> None:
        original(loop)
        seen.append(list(loop.runner.cache.layers))

    monkeypatch.setattr(decoding.DecodingLoop, "_round", watched)
    return seen


@pytest.mark.parametrize("tree_budget", [0, 8])
def test_ragged_rows_stay_where_they_are(tree_budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs = ragged_batch()
    draft.generation_config.draft_tree_budget = tree_budget
    monkeypatch.setattr("dflash_hf.generation.target_runner.realign", pytest.fail)
    seen = layers_of_rounds(monkeypatch)
    output = assert_same_text(target, draft, inputs, 60)
    assert len({len(rounds) for rounds in output.acceptance_lengths}) > 1
    assert {type(layer) for layer in seen[0]} == {GrowingLayer}


def target_with_biases_by_distance() -> Any:
    """A tiny MPT: it has no positions, and takes masks of two dimensions."""
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=4, vocab_size=VOCABULARY, max_seq_len=256, eos_token_id=None)
    target = MptForCausalLM(config)
    scramble(target, 0)
    target.generation_config.pad_token_id, target.generation_config.use_cache = PAD, True
    return target.eval()  # in float64, its masks overflow


@pytest.mark.parametrize("family", ["mistral", "falcon_h1", "mpt"])
def test_rows_that_cannot_stay_are_realigned(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and recurrent states are on the right, and biases by distance know no mask of four dimensions."""
    if family == "mpt":
        target = target_with_biases_by_distance()
    else:
        target = hybrid_target(family) if family == "falcon_h1" else shared_target(family)
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS])
    draft = oracle_draft(target, inputs["input_ids"], 30, DEPTHS, attention_mask=inputs["attention_mask"])
    moved = []
    original = rollback.realign
    monkeypatch.setattr("dflash_hf.generation.target_runner.realign", lambda *args: (moved.append(1), original(*args)))
    assert_same_text(target, draft, inputs, 30)
    assert moved


def test_recorded_attentions_keep_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(attn_implementation="eager", dtype=torch.float32)  # masks of float64 overflow in a softmax
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS])
    draft = oracle_draft(target, inputs["input_ids"], 12, DEPTHS, attention_mask=inputs["attention_mask"])
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    seen = layers_of_rounds(monkeypatch)
    target.generate(**inputs, **options, assistant_model=draft)
    assert {type(layer) for layer in seen[0]} == {GrowingLayer}
    seen.clear()
    plain = target.generate(**inputs, **options, output_attentions=True)
    drafted = target.generate(**inputs, **options, output_attentions=True, assistant_model=draft)
    assert {type(layer) for layer in seen[0]} == {DynamicLayer}
    for mine, theirs in zip(drafted.attentions[5], plain.attentions[5], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_batch_whose_mask_has_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second turn of a batch has where one row's first answer was shorter."""
    target, draft, inputs = ragged_batch()
    inputs["attention_mask"][:, 5] = 0
    inputs["attention_mask"][1, 2:4] = 0
    draft = oracle_draft(target, inputs["input_ids"], 40, DEPTHS, attention_mask=inputs["attention_mask"])
    seen = layers_of_rounds(monkeypatch)
    assert_same_text(target, draft, inputs, 40)
    assert {type(layer) for layer in seen[0]} == {GrowingLayer}


class LateOracle(OracleDraft):
    """Knows its rows wherever they start, as the second turn of a padded batch starts behind the padding."""

    def _place(self, anchor: int, states: torch.Tensor, positions: torch.Tensor, block_size: int) -> tuple[int, int]:
        distance = int(positions[-block_size] - positions[0])
        for number, (row, truth) in enumerate(zip(self.rows, self.truth, strict=True)):
            for first in range(len(row) - distance):
                if row[first + distance] == anchor and torch.allclose(states[0], truth[first], rtol=1e-3, atol=1e-4):
                    return number, first + distance
        raise AssertionError(f"no told row has token {anchor} behind these states")


@pytest.mark.parametrize("rows", [1, 3])
def test_second_turn_goes_on_from_the_first_ones_cache(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft, inputs = ragged_batch(rows)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(**inputs, **options, assistant_model=draft)
    ids = torch.cat([first.sequences, random_prompt(4, batch_size=rows, seed=5)], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 24, dtype=torch.long)], dim=1)
    truth = greedy(target, ids, 24, attention_mask=mask)
    late = tiny_draft(target, block_size=4, draft_class=LateOracle)
    late.tell(target, [row[-int(real.sum()) - 24 :] for row, real in zip(truth, mask, strict=True)], DEPTHS)
    second = {"input_ids": ids, "attention_mask": mask, CACHE_KEY: get_cache(first), "assistant_model": late}
    seen = layers_of_rounds(monkeypatch)
    output = target.generate(**second, **options)
    assert output.sequences.tolist() == truth[:, :-4].tolist()
    assert len(output.acceptance_lengths[0]) < 15
    assert {type(layer) for layer in seen[0]} == {GrowingLayer}


# --- the caller's layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_caller_gets_layers_without_room(rows: int) -> None:
    """Saved or moved, a cache is no larger than what it holds."""
    target, draft, inputs = ragged_batch(rows)
    output = assert_same_text(target, draft, inputs, 40)
    for layer in get_cache(output).layers:
        assert type(layer) is DynamicLayer
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class Interrupts(StoppingCriteria):
    """Raises at a length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("rows", [1, 3])
def test_callers_own_layers_come_back_when_a_call_fails(rows: int) -> None:
    target, draft, inputs = ragged_batch(rows)
    cache = DynamicCache(config=target.config)
    layers = list(cache.layers)
    criteria = StoppingCriteriaList([Interrupts(inputs["input_ids"].shape[1] + 12)])
    with pytest.raises(KeyboardInterrupt):
        target.generate(
            **inputs, **{CACHE_KEY: cache}, stopping_criteria=criteria, assistant_model=draft, max_new_tokens=40
        )
    assert all(mine is theirs for mine, theirs in zip(cache.layers, layers, strict=True))
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}


def test_cache_that_is_offloaded_is_left_alone() -> None:
    """Its layers travel between devices, and buffers would not."""
    cache = filled_cache(4, batch_size=2)
    assert can_grow(cache)
    cache.offloading = True
    assert not can_grow(cache)
    let_grow(cache)
    assert type(cache.layers[0]) is DynamicLayer


@pytest.mark.parametrize("rows", [1, 3])
def test_compiled_target_writes_into_its_buffers(rows: int) -> None:
    """The caller's own `torch.compile`, with shapes that change."""
    target, draft, inputs = ragged_batch(rows)
    plain = greedy(target, inputs["input_ids"], 20, attention_mask=inputs["attention_mask"])
    forward = target.forward
    target.forward = torch.compile(forward, backend="eager", dynamic=True)
    try:
        drafted = target.generate(**inputs, assistant_model=draft, max_new_tokens=20, do_sample=False)
    finally:
        del target.forward
    assert drafted.tolist() == plain.tolist()
