"""Layers with room: what they hold is what Transformers' own layers would hold, in buffers that are rarely copied.

Shapes: B batch, G heads, T columns in use, D head size, W new tokens.
"""

from __future__ import annotations

import weakref
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MptConfig,
    MptForCausalLM,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from comparing import assert_same_text, shared_target
from dflash_hf.generation import decoding, rollback, tree_support
from dflash_hf.generation.compat import CACHE_KEY, get_cache
from dflash_hf.generation.ordering import filled_gaps
from dflash_hf.generation.target_cache import (
    GrowingLayer,
    RowEnds,
    align_left,
    can_grow,
    give_back,
    let_grow,
    select_rows,
)
from dflash_hf.generation.target_runner import TargetRunner
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
    let_grow(cache)
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
        rows.set([len(tokens) for tokens in kept])
        rollback.crop(cache, keys.shape[2] - max(rows.ends))
        if len(kept) > 1 and data.draw(st.booleans()):
            leaving = data.draw(st.integers(0, len(kept) - 1))
            staying = filled_gaps([row for row in range(len(kept)) if row != leaving])
            kept = [kept[row] for row in staying]
            rows.set([len(tokens) for tokens in kept])
            rollback.crop(cache, layer.keys.shape[2] - max(rows.ends))
            select_rows(cache, staying)
        for row, tokens in enumerate(kept):
            assert torch.equal(layer.keys[row, :, : len(tokens)], torch.stack(tokens, dim=1))
            assert torch.equal(layer.values[row, :, : len(tokens)], -torch.stack(tokens, dim=1))
    assert layer.keys.shape[2] == max(rows.ends)
    assert layer.keys.isfinite().all(), "also where nothing was ever written: a weight of zero silences numbers only"


@pytest.mark.parametrize("total", range(1, 7))
def test_last_rows_fill_the_gaps_of_those_that_leave(total: int) -> None:
    for staying in (list(c) for n in range(1, total + 1) for c in combinations(range(total), n)):
        order = filled_gaps(staying)
        assert sorted(order) == staying
        assert all(order[row] == row for row in staying if row < len(staying))


def test_rows_that_stay_in_their_place_are_not_copied() -> None:
    cache = filled_cache(20, batch_size=4)
    let_grow(cache)
    rows = RowEnds([20] * 4, torch.device("cpu"))
    align_left(cache, torch.zeros(4, dtype=torch.long), rows)
    cache.update(states(2, 4), states(2, 4), 0)
    layer = cache.layers[0]
    place, keys = layer.keys.data_ptr(), layer.keys.clone()
    rows.set([22, 21, 22])
    select_rows(cache, [0, 3, 2])
    assert layer.keys.data_ptr() == place
    assert torch.equal(layer.keys, keys[[0, 3, 2]])


def test_what_left_is_free_once_the_others_outgrow_the_buffers() -> None:
    cache = filled_cache(20, batch_size=4)
    let_grow(cache)
    rows = RowEnds([20] * 4, torch.device("cpu"))
    align_left(cache, torch.zeros(4, dtype=torch.long), rows)
    rows.set([20])
    select_rows(cache, [2])
    cache.update(states(80), states(80), 0)
    buffer = cache.layers[0].buffers[0]
    assert buffer.shape == (1, HEADS, 100 + GrowingLayer.room(100), SIZE)
    assert buffer.untyped_storage().nbytes() == buffer.numel() * buffer.element_size()


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
    monkeypatch.setattr("dflash_hf.generation.row_layout.realign", pytest.fail)
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
    monkeypatch.setattr("dflash_hf.generation.row_layout.realign", lambda *args: (moved.append(1), original(*args)))
    assert_same_text(target, draft, inputs, 30)
    assert moved


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windows_that_a_cache_does_not_show_are_the_models_own(family: str, rows: int) -> None:
    """A cache made without a config keeps every column; the window is in the model's own mask alone."""
    target = tiny_target(family, sliding_window=24)
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS[-rows:]])
    draft = oracle_draft(target, inputs["input_ids"], 60, DEPTHS, attention_mask=inputs["attention_mask"])
    for budget in (0, 8):
        draft.generation_config.draft_tree_budget = budget
        ordinary = target.generate(**inputs, assistant_model=draft, max_new_tokens=60, do_sample=False)
        own = DynamicCache()
        drafted = target.generate(
            **inputs, **{CACHE_KEY: own}, assistant_model=draft, max_new_tokens=60, do_sample=False
        )
        plain = target.generate(**inputs, max_new_tokens=60, do_sample=False)
        assert drafted.tolist() == ordinary.tolist() == plain.tolist()


def test_local_attention_that_counts_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-Neo's window is in its modules: neither a cache nor a short trial shows it."""
    fields = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "window_size": 16}
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD}
    config = GPTNeoConfig(**fields, **ids, attention_types=[[["global", "local"], 2]], max_position_embeddings=512)
    target = GPTNeoForCausalLM(config)
    scramble(target, 0)
    target.generation_config.pad_token_id = PAD
    target.eval()  # in float32, see above
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS])
    draft = oracle_draft(target, inputs["input_ids"], 60, DEPTHS, attention_mask=inputs["attention_mask"])
    for budget in (0, 8):
        draft.generation_config.draft_tree_budget = budget
        assert_same_text(target, draft, inputs, 60)


def test_what_one_target_takes_is_not_what_another_of_its_class_takes() -> None:
    """Falcon has models with rotations and models with biases by distance."""
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS])
    for has_biases in (False, True):
        config = FalconConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, alibi=has_biases,
            bos_token_id=1, eos_token_id=None, pad_token_id=PAD,
        )  # fmt: skip
        target = FalconForCausalLM(config)
        scramble(target, 0)
        target.generation_config.pad_token_id = PAD
        target.eval()
        draft = oracle_draft(target, inputs["input_ids"], 40, DEPTHS, attention_mask=inputs["attention_mask"])
        assert_same_text(target, draft, inputs, 40)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, None])
def test_trial_that_shows_nothing_is_not_remembered(failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory now, or logits that are no numbers, say nothing of the target."""
    target = tiny_target()
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS])
    draft = oracle_draft(target, inputs["input_ids"], 30, DEPTHS, attention_mask=inputs["attention_mask"])
    original = TargetRunner.verify

    def failing(runner: Any, block_ids: torch.Tensor, tree: Any = None) -> Any:
        if tree is not None and failure is not None:
            raise failure
        outputs = original(runner, block_ids, tree)
        if tree is not None:
            outputs.logits = outputs.logits * torch.nan
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(TargetRunner, "verify", failing)
        assert_same_text(target, draft, inputs, 30)
    assert tree_support._answers.get(target, {}) == {}
    assert_same_text(target, draft, inputs, 30)
    assert tree_support._answers[target] == {"sdpa": None}


def test_no_trial_where_the_positions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a position behind the end of a table is an error that nothing can be done about."""
    target = tiny_target("gpt2", n_positions=12)
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in (4, 11)])
    monkeypatch.setattr(tree_support, "_try", pytest.fail)
    assert_same_text(target, tiny_draft(target), inputs, 1)


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
    assert {layer.rows for layer in seen[0]} == {None}
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


@pytest.mark.parametrize(("row", "column"), [(0, 17), (0, 39), (1, 37), (1, 39)])
def test_prompts_with_holes_that_reach_further_than_the_rows_that_go_on(row: int, column: int) -> None:
    """The longest row ends first."""
    target = shared_target()
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in (40, 6)])
    inputs["attention_mask"][row, column] = 0
    draft = tiny_draft(target)
    plain = greedy(target, inputs["input_ids"], 20, attention_mask=inputs["attention_mask"])
    end = int(plain[0, 42])
    assert end not in plain[1, 40:50]
    for budget in (0, 8):
        draft.generation_config.draft_tree_budget = budget
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": end}
        plain = target.generate(**inputs, **options)
        assert target.generate(**inputs, **options, assistant_model=draft).tolist() == plain.tolist()


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
@pytest.mark.parametrize("heads", [2, 1])
def test_caller_gets_layers_without_room(rows: int, heads: int) -> None:
    """Saved or moved, a cache is no larger than what it holds."""
    target = tiny_target(num_key_value_heads=heads)
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in LENGTHS[-rows:]])
    draft = oracle_draft(target, inputs["input_ids"], 40, DEPTHS, attention_mask=inputs["attention_mask"])
    cache = DynamicCache(config=target.config)
    output = assert_same_text(target, draft, inputs, 40)
    target.generate(**inputs, **{CACHE_KEY: cache}, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert cache.get_seq_length() == get_cache(output).get_seq_length()
    for layer in get_cache(output).layers + cache.layers:
        assert type(layer) is DynamicLayer
        for tensor in (layer.keys, layer.values):
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("rows", [1, 3])
def test_prompt_is_held_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has been copied into a buffer, nothing keeps what the prefill made."""
    target, draft, inputs = ragged_batch(rows)
    original, kept = decoding.DecodingLoop._round, []

    def watched(loop: Any) -> None:
        before = [weakref.ref(tensor) for layer in loop.runner.cache.layers for tensor in (layer.keys, layer.values)]
        places = [layer.keys.data_ptr() for layer in loop.runner.cache.layers]
        original(loop)
        kept.append(sum(tensor() is not None for tensor in before))
        if len(kept) == 1:
            assert places == [layer.keys.data_ptr() for layer in loop.runner.cache.layers], (
                "it had room from the first"
            )

    monkeypatch.setattr(decoding.DecodingLoop, "_round", watched)
    target.generate(**inputs, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert kept[0] == 0


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


def test_empty_cache_is_filled_as_without_a_draft() -> None:
    target, draft, inputs = ragged_batch(1)
    mine, theirs = DynamicCache(config=target.config), DynamicCache(config=target.config)
    options = {"max_new_tokens": 20, "do_sample": False}
    target.generate(**inputs, **{CACHE_KEY: mine}, **options, assistant_model=draft)
    target.generate(**inputs, **{CACHE_KEY: theirs}, **options)
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert vars(layer).keys() == vars(other).keys()
        assert layer.is_initialized and layer.device == other.device
        assert torch.allclose(layer.keys, other.keys) and torch.allclose(layer.values, other.values)


def test_prefill_that_fails_gives_the_layers_back() -> None:
    target, draft, inputs = ragged_batch(1)
    cache = DynamicCache(config=target.config)
    layers = list(cache.layers)

    def fail(module: Any, args: Any) -> None:
        raise MemoryError

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(MemoryError):
            target.generate(**inputs, **{CACHE_KEY: cache}, assistant_model=draft, max_new_tokens=8)
    finally:
        handle.remove()
    assert all(mine is theirs for mine, theirs in zip(cache.layers, layers, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
def test_forward_that_fails_leaves_what_was_committed(rows: int) -> None:
    """Out of memory, say, in the middle of a verification: the caller's cache stands for the tokens before."""
    target, draft, inputs = ragged_batch(rows)
    width, cache, calls = inputs["input_ids"].shape[1], DynamicCache(config=target.config), []

    def fail(module: Any, args: Any) -> None:
        calls.append(1)
        if len(calls) == 8:
            raise MemoryError

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(MemoryError):
            target.generate(**inputs, **{CACHE_KEY: cache}, assistant_model=draft, max_new_tokens=40, do_sample=False)
    finally:
        handle.remove()
    assert len({layer.keys.shape for layer in cache.layers}) == 1
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    kept = cache.get_seq_length() - width
    assert kept > 0
    ids = greedy(target, **inputs, max_new_tokens=kept)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, kept), value=1)
    fresh = get_cache(target(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=True))
    for mine, theirs in zip(cache.layers, fresh.layers, strict=True):
        for row in range(rows):
            held = mine.keys[row].abs().sum(dim=(0, 2)) > 0  # rows that were behind end in zeros
            held &= mask[row].bool()
            assert held[:width].tolist() == mask[row, :width].bool().tolist() and held[width:].sum() > 0
            assert torch.allclose(mine.keys[row][:, held], theirs.keys[row][:, held])
            assert torch.allclose(mine.values[row][:, held], theirs.values[row][:, held])


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
