"""Batches: every row's text is that of its own batch-of-one run, whatever its neighbours accept and wherever they end.

Shapes: B batch, S context, K block, N new tokens.
"""

from __future__ import annotations

import logging
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TextStreamer

from comparing import Recorder, assert_same_text, forwards_of, letter_tokenizer, shared_target
from dflash_hf.generation import decoding
from dflash_hf.generation.compat import CACHE_KEY
from helpers import PAD, greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import OracleDraft, oracle_draft


def ragged(lengths, seed=0):
    return left_padded([random_prompt(length, seed=seed + 7 * i)[0] for i, length in enumerate(lengths)])


def alone(target, batch, row, num_tokens, **kwargs):
    """The new tokens of one row's own batch-of-one run, unpadded."""
    ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
    return greedy(target, ids, num_tokens, **kwargs)[0, ids.shape[1] :].tolist()


def assert_rows_are_their_own(target, batch, draft, num_tokens, eos_token_id=None):
    """Each row: its own text, then padding; returns the output."""
    out = target.generate(
        **batch,
        assistant_model=draft,
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        eos_token_id=eos_token_id,
    )
    width = batch["input_ids"].shape[1]
    assert torch.equal(out.sequences[:, :width], batch["input_ids"])
    texts = [alone(target, batch, row, num_tokens, eos_token_id=eos_token_id) for row in range(len(out.sequences))]
    assert out.sequences.shape[1] - width == max(len(text) for text in texts)
    for row, text in zip(out.sequences[:, width:].tolist(), texts, strict=True):
        assert row == text + [PAD] * (len(row) - len(text))
    for lengths, text in zip(out.acceptance_lengths, texts, strict=True):
        assert sum(lengths) == len(text) - 1
    return out


# --- ragged batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
def test_rows_of_a_ragged_batch_are_their_own(batch_size):
    target, batch = shared_target(), ragged([3, 9, 1, 5, 7, 2, 9, 12][:batch_size])
    draft = oracle_draft(target, batch["input_ids"], 24, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    out = assert_rows_are_their_own(target, batch, draft, 24)
    assert all(4 in lengths and len(set(lengths)) > 1 for lengths in out.acceptance_lengths)


def test_rows_of_every_family_are_their_own(family):
    target, batch = shared_target(family), ragged([3, 9, 1, 5])
    draft = oracle_draft(target, batch["input_ids"], 20, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    assert_rows_are_their_own(target, batch, draft, 20)
    assert_rows_are_their_own(target, batch, tiny_draft(target), 8)


@pytest.mark.parametrize("window", [2, 3, 5, 8, 20])
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_rows_behind_a_sliding_window_are_their_own(family, window):
    target, batch = shared_target(family, sliding_window=window), ragged([3, 11, 1])
    draft = oracle_draft(target, batch["input_ids"], 30, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    assert_rows_are_their_own(target, batch, draft, 30)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_under_each_attention_implementation_are_their_own(attention):
    target, batch = tiny_target(dtype=torch.float32), ragged([3, 9, 1, 5])
    target.set_attn_implementation(attention)
    draft = oracle_draft(target, batch["input_ids"], 20, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    draft.set_attn_implementation(attention)
    assert_rows_are_their_own(target, batch, draft, 20)


def test_equal_prompts_stay_equal_rows():
    target, prompt = shared_target(), random_prompt(6)
    batch = left_padded([prompt[0]] * 4)
    draft = oracle_draft(target, batch["input_ids"], 20, [2, 0, 3, 1])
    out = assert_rows_are_their_own(target, batch, draft, 20)
    assert len({tuple(lengths) for lengths in out.acceptance_lengths}) == 1


def test_batch_without_a_mask_is_masked_by_its_padding():
    """As plain `generate` infers it."""
    target, batch = shared_target(), ragged([3, 9, 5])
    draft = oracle_draft(target, batch["input_ids"], 16, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    assert_same_text(target, draft, batch["input_ids"], 16)


def test_padding_token_that_is_the_end_token():
    """Common for models that have no padding token."""
    target, batch = shared_target(), ragged([3, 9, 5])
    end = alone(target, batch, 1, 8)[5]
    draft = oracle_draft(target, batch["input_ids"], 16, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    out = assert_same_text(target, draft, batch, 16, eos_token_id=end, pad_token_id=end)
    assert (out.sequences[1] == end).sum() > 1


def test_content_of_the_padding_changes_nothing():
    """Case B04: neither the tokens nor what the draft reads and proposes."""
    target, batch = shared_target(), ragged([3, 9, 5])
    results = []
    for seed in range(3):
        ids = torch.where(
            batch["attention_mask"].bool(), batch["input_ids"], random_prompt(9, batch_size=3, seed=seed)
        )
        draft = tiny_draft(target)
        proposals = []
        original = draft.compute_logits
        draft.compute_logits = lambda *args, o=original, p=proposals: (p.append(o(*args)), p[-1])[1]
        out = target.generate(
            ids, attention_mask=batch["attention_mask"], assistant_model=draft, max_new_tokens=12, do_sample=False
        )
        results.append((out[:, 9:].tolist(), torch.cat([p.flatten() for p in proposals])))
    for text, proposals in results[1:]:
        assert text == results[0][0]
        torch.testing.assert_close(proposals, results[0][1], rtol=1e-4, atol=1e-4)


def test_left_padding_does_not_change_the_drafts():
    """Case B04: a single padded prompt gets the proposals of the unpadded one."""
    target, prompt = shared_target(), random_prompt(6)
    padded = torch.cat([torch.full((1, 4), PAD), prompt], dim=1)
    mask = (torch.arange(10) >= 4).long()[None]
    proposals = []
    for ids, attention_mask in ((prompt, torch.ones_like(prompt)), (padded, mask)):
        draft = tiny_draft(target)
        seen = []
        original = draft.compute_logits
        draft.compute_logits = lambda *args, o=original, s=seen: (s.append(o(*args)), s[-1])[1]
        target.generate(ids, attention_mask=attention_mask, assistant_model=draft, max_new_tokens=12, do_sample=False)
        proposals.append(torch.cat([s.flatten() for s in seen]))
    torch.testing.assert_close(*proposals, rtol=1e-4, atol=1e-4)


# --- rows that end ---------------------------------------------------------------------------------------------------


def test_finished_rows_are_neither_verified_nor_written():
    """Case B02: row 0 ends with the first token, row 2 with the ninth."""
    target = shared_target()
    for seed in range(20):  # a text in which these tokens come up nowhere else
        batch = ragged([3, 9, 5], seed)
        ends = [alone(target, batch, 0, 1)[0], alone(target, batch, 2, 9)[8]]
        texts = [alone(target, batch, row, 24, eos_token_id=ends) for row in range(3)]
        if [len(text) for text in texts[::2]] == [1, 9] and len(texts[1]) > 15:
            break
    else:
        raise AssertionError("no such text")
    draft = oracle_draft(target, batch["input_ids"], 24, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    with forwards_of(target) as calls, forwards_of(draft) as drafts:
        found = target.generate(**batch, assistant_model=draft, max_new_tokens=24, do_sample=False, eos_token_id=ends)
    rounds = [kwargs["input_ids"].shape[0] for kwargs, _ in calls]
    drafted = [kwargs["noise_embeds"].shape[0] for kwargs, _ in drafts]
    assert [row[9 : 9 + len(text)] for row, text in zip(found.tolist(), texts, strict=True)] == texts
    assert set(drafted) == {2, 1} and drafted == sorted(drafted, reverse=True)
    assert rounds[0] == 3, "the prompt"
    assert rounds[1:] == drafted, "row 0 must have left before the first verification"


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 8, 11])
def test_one_row_ends_at_every_place(place):
    target, batch = shared_target(), ragged([3, 9, 5])
    end = alone(target, batch, place % 3, 12)[place]
    draft = oracle_draft(target, batch["input_ids"], 20, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    assert_rows_are_their_own(target, batch, draft, 20, eos_token_id=end)


def test_all_rows_end_with_the_first_token():
    target, batch = shared_target(), ragged([3, 9, 5])
    ends = [alone(target, batch, row, 1)[0] for row in range(3)]
    out = assert_rows_are_their_own(target, batch, tiny_draft(target), 20, eos_token_id=ends)
    assert out.sequences.shape == (3, 10) and out.acceptance_lengths == [[], [], []]


def test_rows_reach_the_length_limit_in_different_rounds():
    """The fastest row must not push the slowest beyond it."""
    target, batch = shared_target(), ragged([3, 9])
    for num_tokens in (1, 2, 4, 5, 9):
        calls = iter([3, 0, 1] * 100)
        draft = oracle_draft(
            target, batch["input_ids"], 14, lambda at, c=calls: next(c), attention_mask=batch["attention_mask"]
        )
        assert_rows_are_their_own(target, batch, draft, num_tokens)


# --- caches ----------------------------------------------------------------------------------------------------------


def widths_of(target, batch, draft, num_tokens):
    """Rows and tokens of every verification."""
    target.generate(**batch, assistant_model=draft, max_new_tokens=2, do_sample=False)  # tries what it takes, once
    shapes = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        assert_rows_are_their_own(target, batch, draft, num_tokens)
    finally:
        handle.remove()
    return [shape for shape in shapes[1:] if shape[1] <= draft.config.block_size]


def test_row_near_its_end_does_not_narrow_the_others():
    """One row accepts everything and ends early; until it leaves, the blocks of the others stay whole."""
    target, batch = shared_target(), ragged([30, 3, 5])
    mask = batch["attention_mask"]
    draft = oracle_draft(target, batch["input_ids"], 24, lambda at: 3 if at >= 30 else 0, attention_mask=mask)
    shapes = [shape for shape in widths_of(target, batch, draft, 24) if shape[0] == 3]
    assert len(shapes) == 6, "of 24 tokens, the first comes with the prompt"
    assert {width for _, width in shapes} == {4}


def test_candidates_stay_within_a_table_of_positions():
    """A row that is to end at the last position cannot be verified beyond it, whatever the others still need."""
    target, batch = shared_target("gpt2", n_positions=24), ragged([9, 4])
    draft = oracle_draft(target, batch["input_ids"], 11, [3, 0, 1], attention_mask=batch["attention_mask"])
    assert_rows_are_their_own(target, batch, draft, 15)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_caches_are_as_wide_as_the_longest_row(family):
    """Memory grows with the tokens kept, not with the tokens tried."""
    target, batch = shared_target(family), ragged([3, 9, 5])
    draft = oracle_draft(target, batch["input_ids"], 80, [3, 0, 0, 2, 1, 0], attention_mask=batch["attention_mask"])
    target.generate(**batch, assistant_model=draft, max_new_tokens=2, do_sample=False)  # tries what it takes, once
    widths = []

    def spy(module, args, kwargs):
        layers = kwargs[CACHE_KEY].layers
        widths.append((kwargs["input_ids"].shape, [layer.keys.shape for layer in layers if layer.is_initialized]))

    handle = target.register_forward_pre_hook(spy, with_kwargs=True)
    padding = (batch["attention_mask"] == 0).sum(dim=1).tolist()
    original, longest = decoding.DecodingLoop._round, []

    def record(loop):
        longest.append(max(loop.sequences.lengths[row] - padding[row] for row in loop.rows) - 1)
        return original(loop)

    decoding.DecodingLoop._round = record
    try:
        target.generate(**batch, assistant_model=draft, max_new_tokens=80, do_sample=False)
    finally:
        handle.remove()
        decoding.DecodingLoop._round = original
    rounds = [shapes for ids, shapes in widths[1:]]
    assert len(rounds) == len(longest) > 20
    for shapes, length in zip(rounds, longest, strict=True):
        for shape in shapes:
            limit = length if family == "qwen3" else min(length, 5 + 3)  # window 6 and the block's other tokens
            assert shape[2] <= limit


def test_draft_keeps_a_window_of_context_and_no_more():
    """Case K08: sliding layers hold the window and the block, bounded full layers what the bound says."""
    target, prompt = shared_target(), random_prompt(9)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    draft = oracle_draft(target, prompt, 120, [2, 0, 3, 1], **layers)
    caches = []
    with forwards_of(draft) as calls:
        assert_same_text(target, draft, prompt, 100)
        caches = [kwargs["cache"] for kwargs, _ in calls]
    sliding, full = caches[-1].keys
    assert sliding.shape[2] <= 6 + 4
    assert 100 <= full.shape[2] <= 2 * 108 + 4
    draft.generation_config.draft_context_length = 10
    with forwards_of(draft) as calls:
        assert_same_text(target, draft, prompt, 100)
    sliding, full = calls[-1][0]["cache"].keys
    assert sliding.shape[2] <= 6 + 4 and full.shape[2] <= 10 + 4


# --- sampling, streamers ---------------------------------------------------------------------------------------------


def test_several_sequences_of_several_prompts():
    target, batch = shared_target(), ragged([3, 9])
    torch.manual_seed(0)
    out = target.generate(
        **batch,
        assistant_model=tiny_draft(target),
        max_new_tokens=10,
        do_sample=True,
        num_return_sequences=3,
        return_dict_in_generate=True,
    )
    assert out.sequences.shape == (6, 19) and len(out.acceptance_lengths) == 6
    assert torch.equal(out.sequences[:, :9], batch["input_ids"].repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out.sequences[:3].tolist()}) == 3


def test_several_sequences_with_one_token_to_sample_from():
    target, batch = shared_target(), ragged([3, 9])
    draft = oracle_draft(target, batch["input_ids"], 12, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    out = target.generate(
        **batch, assistant_model=draft, max_new_tokens=12, do_sample=True, top_k=1, num_return_sequences=3
    )
    for index, row in enumerate(out[:, 9:].tolist()):
        assert row == alone(target, batch, index // 3, 12)


def test_several_greedy_sequences_are_refused():
    target = shared_target()
    with pytest.raises(ValueError, match="num_return_sequences"):
        target.generate(
            random_prompt(5),
            assistant_model=tiny_draft(target),
            max_new_tokens=4,
            do_sample=False,
            num_return_sequences=2,
        )


def test_text_streamer_refuses_a_batch_as_without_a_draft():
    target, batch = shared_target(), ragged([3, 9])
    messages = []
    for draft in (None, tiny_draft(target)):
        with pytest.raises(ValueError) as error:
            target.generate(
                **batch,
                assistant_model=draft,
                max_new_tokens=4,
                do_sample=False,
                streamer=TextStreamer(letter_tokenizer()),
            )
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_streamer_of_the_callers_own_sees_a_batch_as_without_a_draft():
    target, batch = shared_target(), ragged([3, 9])
    draft = oracle_draft(target, batch["input_ids"], 12, [2, 0, 3, 1], attention_mask=batch["attention_mask"])
    end = alone(target, batch, 0, 6)[5]
    seen = []
    for assistant in (None, draft):
        streamer = Recorder()
        target.generate(
            **batch,
            assistant_model=assistant,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=end,
            streamer=streamer,
        )
        seen.append(streamer.calls)
    assert seen[0] == seen[1]


def test_batch_without_an_end_token_but_with_a_stop_string_warns_and_is_right(caplog, monkeypatch):
    decoding.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(decoding.logger, "propagate", True)
    target, batch, tokenizer = shared_target(), ragged([3, 9]), letter_tokenizer()
    stop = tokenizer.decode(alone(target, batch, 0, 12)[4:6])
    with caplog.at_level(logging.WARNING):
        assert_same_text(target, tiny_draft(target), batch, 12, stop_strings=[stop], tokenizer=tokenizer)
    assert sum("without the draft" in record.message for record in caplog.records) == 1


# --- the property ----------------------------------------------------------------------------------------------------

LENGTHS = (1, 2, 4, 7)
WINDOWS = {"qwen3": (None,), "mistral": (2, 4, 9), "gemma3": (3, 9)}
LIMIT = 14


@cache
def pool(family, window):
    """A target, and for prompts of several lengths their own continuation and the states along it."""
    overrides = {} if window is None else {"sliding_window": window}
    if family == "gemma3":
        overrides["layer_types"] = ["sliding_attention", "full_attention"]
    target = tiny_target(family, num_hidden_layers=2, **overrides)
    draft = tiny_draft(target, draft_class=OracleDraft, target_layer_ids=[0, 1], num_hidden_layers=1)
    prompts = [random_prompt(length, seed=10 * length + i)[0] for length in LENGTHS for i in range(2)]
    rows = [greedy(target, prompt[None], LIMIT + 8)[0] for prompt in prompts]
    draft.tell(target, rows, 0)
    return target, prompts, rows, draft.truth


@cache
def cheap_draft(family, window, block_size):
    target = pool(family, window)[0]
    return tiny_draft(
        target, draft_class=OracleDraft, block_size=block_size, target_layer_ids=[0, 1], num_hidden_layers=1
    )


@st.composite
def cases(draw):
    family = draw(st.sampled_from(sorted(WINDOWS)))
    return {
        "family": family,
        "window": draw(st.sampled_from(WINDOWS[family])),
        "block_size": draw(st.integers(2, 6)),
        "prompts": draw(st.lists(st.integers(0, 2 * len(LENGTHS) - 1), min_size=1, max_size=4)),
        "depths": draw(st.lists(st.integers(0, 5), min_size=1, max_size=6)),
        "num_tokens": draw(st.integers(1, LIMIT)),
        "end": draw(st.none() | st.tuples(st.integers(0, 3), st.integers(0, LIMIT - 1))),
        "num_proposals": draw(st.none() | st.integers(0, 5)),
    }


@settings(max_examples=300)
@given(case=cases())
def test_every_row_of_every_batch_is_its_own(case):
    """Families, windows, block sizes, ragged prompts, depths, ends, lengths, numbers of candidates: at random."""
    key = case["family"], case["window"]
    target, prompts, rows, truth = pool(*key)
    draft = cheap_draft(*key, case["block_size"])
    chosen = case["prompts"]
    draft.rows, draft.truth = [rows[i].tolist() for i in chosen], [truth[i] for i in chosen]
    draft.depth_at = lambda position: case["depths"][position % len(case["depths"])]
    most = case["block_size"] - 1
    draft.generation_config.num_assistant_tokens = (
        most if case["num_proposals"] is None else min(most, case["num_proposals"])
    )
    batch = left_padded([prompts[i] for i in chosen])
    width = batch["input_ids"].shape[1]
    texts = [rows[i][len(prompts[i]) :].tolist()[: case["num_tokens"]] for i in chosen]
    end = None
    if case["end"] is not None:
        row, place = case["end"]
        end = texts[row % len(texts)][place % case["num_tokens"]]
        texts = [text[: text.index(end) + 1] if end in text else text for text in texts]
    out = target.generate(
        **batch,
        assistant_model=draft,
        max_new_tokens=case["num_tokens"],
        do_sample=False,
        eos_token_id=end,
        return_dict_in_generate=True,
    )
    longest = max(map(len, texts))
    assert out.sequences[:, width:].tolist() == [text + [PAD] * (longest - len(text)) for text in texts]
    assert [sum(lengths) for lengths in out.acceptance_lengths] == [len(text) - 1 for text in texts]
