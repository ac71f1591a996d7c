"""Where a drafted generation stops, and what a streamer sees of it: as plain `generate`, at any place of a block."""

from __future__ import annotations

import itertools
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation import stopping_criteria as criteria_module

from comparing import Recorder, forwards_of, generate_both, letter_tokenizer, shared_target
from helpers import greedy, left_padded, random_prompt, tiny_draft
from oracle import oracle_draft

BLOCK = 4
PROMPT = 7


def perfect(depth=BLOCK - 1, seed=0, num_tokens=24):
    """A target, a prompt, a draft right to a depth, and the text that follows."""
    target, prompt = shared_target(), random_prompt(PROMPT, seed=seed)
    draft = oracle_draft(target, prompt, num_tokens, depth, block_size=BLOCK)
    return target, prompt, draft, greedy(target, prompt, num_tokens)[0, PROMPT:].tolist()


def assert_same_stop(target, draft, inputs, max_new_tokens=24, make=dict, **kwargs):
    """Ids and streamer calls of both; `make` creates afresh what keeps state. Returns the new tokens."""
    outputs = []
    for assistant in (None, draft):
        streamer = Recorder()
        options = {"max_new_tokens": max_new_tokens, "do_sample": False} | kwargs | make()
        ids = target.generate(inputs, streamer=streamer, assistant_model=assistant, **options)
        outputs.append((ids.tolist(), streamer.calls))
    (plain_ids, plain_calls), (ids, calls) = outputs
    assert ids == plain_ids
    assert calls == plain_calls
    return ids[0][inputs.shape[1] :]


# --- end-of-sequence tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, BLOCK - 1])
def test_end_token_at_every_place_of_two_blocks(depth):
    """Case G01."""
    target, prompt, draft, text = perfect(depth)
    ends = set()
    for place in range(2 * BLOCK + 1):
        new = assert_same_stop(target, draft, prompt, eos_token_id=text[place])
        assert new == text[: text.index(text[place]) + 1]
        ends.add(len(new))
    assert len(ends) > BLOCK, "the text repeats too early to test every place"


def test_first_of_several_end_tokens_ends_the_text():
    target, prompt, draft, text = perfect()
    for first, second in itertools.combinations(range(2 * BLOCK + 1), 2):
        tokens = [text[second], text[first], 61]
        new = assert_same_stop(target, draft, prompt, eos_token_id=tokens)
        assert len(new) == min(text.index(token) + 1 for token in tokens if token in text)


def test_end_token_of_the_targets_own_generation_config():
    target, prompt, draft, text = perfect()
    target.generation_config.eos_token_id = [text[5], 62]
    try:
        assert assert_same_stop(target, draft, prompt) == text[: text.index(text[5]) + 1]
    finally:
        target.generation_config.eos_token_id = None


def test_end_token_in_a_sampled_block():
    target, prompt, draft, text = perfect()
    for place in (1, 3, 5):
        torch.manual_seed(0)
        ids = target.generate(
            prompt, assistant_model=draft, max_new_tokens=24, do_sample=True, top_k=1, eos_token_id=text[place]
        )
        assert ids[0, PROMPT:].tolist() == text[: text.index(text[place]) + 1]


# --- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", [1, PROMPT])
@pytest.mark.parametrize("depth", [0, BLOCK - 1])
def test_length_limit_at_every_place_of_two_blocks(depth, prompt_length):
    """Case G06."""
    target, prompt = shared_target(), random_prompt(prompt_length)
    draft = oracle_draft(target, prompt, 24, depth, block_size=BLOCK)
    for num_tokens in range(1, 2 * BLOCK + 2):
        assert len(assert_same_stop(target, draft, prompt, num_tokens)) == num_tokens
        new = assert_same_stop(target, draft, prompt, None, max_length=prompt_length + num_tokens)
        assert len(new) == num_tokens
        drafted, plain = generate_both(target, draft, prompt, num_tokens, output_scores=True)
        assert len(drafted.scores) == len(plain.scores) == num_tokens


def test_no_forward_is_wider_than_the_tokens_left():
    target, prompt, draft, _ = perfect()
    for num_tokens in range(1, 2 * BLOCK + 2):
        with forwards_of(target) as calls:
            target.generate(prompt, assistant_model=draft, max_new_tokens=num_tokens, do_sample=False)
        committed = 1
        for kwargs, _ in calls[1:]:
            width = kwargs["input_ids"].shape[1]
            assert committed + width <= num_tokens
            committed += width
        assert committed == num_tokens


def test_length_criterion_passed_by_hand():
    target, prompt, draft, text = perfect()
    for length in range(PROMPT + 1, PROMPT + BLOCK + 3):
        new = assert_same_stop(
            target, draft, prompt, make=lambda n=length: {"stopping_criteria": [MaxLengthCriteria(n)]}
        )
        assert new == text[: length - PROMPT]


@pytest.mark.parametrize("ticks", range(1, 2 * BLOCK + 2))
def test_time_limit_within_a_block(monkeypatch, ticks):
    """A clock that moves at each look makes the limit fall on a chosen token."""
    target, prompt, draft, text = perfect()
    clock = itertools.count()
    monkeypatch.setattr(criteria_module, "time", SimpleNamespace(time=lambda: next(clock)))
    new = assert_same_stop(target, draft, prompt, max_time=ticks + 0.5 - 1)
    assert new == text[:ticks]


# --- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_string_across_tokens_at_every_place(length):
    target, prompt, draft, text = perfect()
    tokenizer = letter_tokenizer()
    written = tokenizer.decode(text)
    for place in range(2 * BLOCK):
        stop = written[place : place + length]
        new = assert_same_stop(target, draft, prompt, stop_strings=["?never?", stop], tokenizer=tokenizer)
        assert new == text[: written.index(stop) + length]


# --- criteria of the caller's own ------------------------------------------------------------------------------------


class Watching(StoppingCriteria):
    """Stops when `rule(input_ids, scores)` holds; remembers what it was shown."""

    def __init__(self, rule):
        self.rule = rule
        self.seen = []

    def __call__(self, input_ids, scores, **kwargs):
        """Per row, whether the rule holds."""
        self.seen.append((input_ids.tolist(), None if scores is None else [s.tolist() for s in scores]))
        return torch.full((input_ids.shape[0],), bool(self.rule(input_ids, scores)))


def assert_same_criterion(target, prompt, draft, make_rule, **kwargs):
    """Both generations end the same and showed the criterion the same."""
    watchers = []

    def make():
        watchers.append(Watching(make_rule()))
        return {"stopping_criteria": [watchers[-1]]}

    new = assert_same_stop(target, draft, prompt, make=make, **kwargs)
    plain, drafted = watchers
    assert drafted.seen == plain.seen
    return new


@pytest.mark.parametrize("depth", [0, BLOCK - 1])
@pytest.mark.parametrize("place", range(1, 2 * BLOCK + 2))
def test_criterion_met_within_a_block(place, depth):
    target, prompt, draft, text = perfect(depth)
    new = assert_same_criterion(target, prompt, draft, lambda: lambda ids, _: ids.shape[1] >= PROMPT + place)
    assert new == text[:place]


@pytest.mark.parametrize("place", [1, 2, BLOCK, BLOCK + 1])
def test_criterion_that_counts_its_calls(place):
    def make_rule():
        calls = itertools.count(1)
        return lambda ids, _: next(calls) == place

    target, prompt, draft, text = perfect()
    assert assert_same_criterion(target, prompt, draft, make_rule) == text[:place]


def test_criterion_that_reads_the_scores():
    target, prompt, draft, _ = perfect()
    lengths = set()
    for floor in (2.0, 4.0, 5.0, 6.0, 8.0):
        new = _stopped_by_scores(target, prompt, draft, floor)
        lengths.add(len(new))
    assert len(lengths) > 2, "the floors must fall on different tokens"


def _stopped_by_scores(target, prompt, draft, floor):
    outputs = []
    for assistant in (None, draft):
        watcher = Watching(lambda ids, scores: scores[-1].max() > floor)
        out = target.generate(
            prompt,
            assistant_model=assistant,
            max_new_tokens=24,
            do_sample=False,
            stopping_criteria=[watcher],
            return_dict_in_generate=True,
            output_scores=True,
        )
        outputs.append((out.sequences.tolist(), len(out.scores), [len(scores) for _, scores in watcher.seen]))
    assert outputs[0] == outputs[1]
    return outputs[0][0][0][PROMPT:]


def test_several_criteria_are_each_asked_after_every_token():
    target, prompt, draft, text = perfect()
    seen = []
    for assistant in (None, draft):
        watchers = [Watching(lambda ids, _: False), Watching(lambda ids, _: ids.shape[1] >= PROMPT + 6)]
        criteria = StoppingCriteriaList(watchers)
        ids = target.generate(
            prompt,
            assistant_model=assistant,
            max_new_tokens=24,
            do_sample=False,
            stopping_criteria=criteria,
            eos_token_id=text[9],
        )
        seen.append((ids.tolist(), [watcher.seen for watcher in watchers]))
    assert seen[0] == seen[1]


def test_criterion_in_a_batch_stops_each_row_where_it_holds_there():
    """A criterion that looks at tokens alone; a batch with an end token lets rows leave one by one."""
    target = shared_target()
    prompts = [random_prompt(length, seed=length)[0] for length in (3, 6, 5)]
    batch = left_padded(prompts)
    draft = oracle_draft(target, batch["input_ids"], 24, 2, attention_mask=batch["attention_mask"])

    class EndsOn(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 7 == 3

    outputs = [
        target.generate(
            **batch,
            assistant_model=assistant,
            max_new_tokens=24,
            do_sample=False,
            stopping_criteria=[EndsOn()],
            eos_token_id=62,
        ).tolist()
        for assistant in (None, draft)
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("calls", [1, 3, 4, 9])
def test_criterion_in_a_batch_that_counts_its_calls(calls):
    """It is asked once a step, about all rows together, so the batch must be decoded step by step."""
    target = shared_target()
    prompts = [random_prompt(length, seed=length)[0] for length in (3, 6)]
    batch = left_padded(prompts)
    draft = oracle_draft(target, batch["input_ids"], 24, 2, attention_mask=batch["attention_mask"])
    outputs = []
    for assistant in (None, draft):
        count = itertools.count(1)
        watcher = Watching(lambda ids, _, count=count: next(count) == calls)
        ids = target.generate(
            **batch,
            assistant_model=assistant,
            max_new_tokens=24,
            do_sample=False,
            stopping_criteria=[watcher],
            eos_token_id=62,
        )
        outputs.append((ids.tolist(), watcher.seen))
    assert outputs[0] == outputs[1]


# --- streamers -------------------------------------------------------------------------------------------------------


def test_streamer_sees_the_prompt_then_every_token_then_the_end():
    """Case G08."""
    target, prompt, draft, text = perfect()
    streamer = Recorder()
    ids = target.generate(prompt, assistant_model=draft, max_new_tokens=24, do_sample=False, streamer=streamer)
    assert streamer.calls[0] == prompt.tolist()
    assert streamer.calls[-1] is None and streamer.calls.count(None) == 1
    assert [token for call in streamer.calls[1:-1] for token in call] == text == ids[0, PROMPT:].tolist()


def test_streamer_hears_of_a_block_before_the_next_one_is_drafted():
    target, prompt, draft, _ = perfect()
    heard = Recorder()
    heard_at_forward = []
    handle = target.register_forward_pre_hook(lambda *_: heard_at_forward.append(max(len(heard.calls) - 1, 0)))
    try:
        target.generate(prompt, assistant_model=draft, max_new_tokens=21, do_sample=False, streamer=heard)
    finally:
        handle.remove()
    assert heard_at_forward == [0, 1, 5, 9, 13, 17]


def test_text_iterator_streamer_yields_the_decoded_text():
    target, prompt, draft, text = perfect()
    tokenizer = letter_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"assistant_model": draft, "max_new_tokens": 24, "do_sample": False, "streamer": streamer}
    thread = Thread(target=target.generate, args=(prompt,), kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tokenizer.decode(text)


def test_random_draft_streams_the_same(family):
    target, prompt = shared_target(family), random_prompt(PROMPT)
    assert len(assert_same_stop(target, tiny_draft(target), prompt, 10)) == 10
