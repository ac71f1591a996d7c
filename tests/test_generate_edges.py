"""Rare conditions, in each of which the drafted text must still be the target's own.

Shapes: B batch, S context, K block, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from comparing import assert_same_text, generate_both, shared_target
from dflash_hf.generation import recurrent
from dflash_hf.generation.compat import CACHE_KEY, get_cache
from dflash_hf.generation.rope_limits import RopeLimits
from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from helpers import VOCABULARY, greedy, left_padded, random_prompt, scramble, tiny_draft, tiny_target
from hybrid_targets import hybrid_target
from oracle import oracle_draft

PROMPT = 7


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads change all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_threads_may_share_a_target_with_recurrent_layers(family: str, hasty_threads: None) -> None:
    target = hybrid_target(family)
    draft = tiny_draft(target)
    prompts = [random_prompt(PROMPT, seed=seed) for seed in range(3)]
    expected = [greedy(target, prompt, 20).tolist() for prompt in prompts]
    found: list[list[Any]] = [[] for _ in prompts]

    def work(number: int) -> None:
        for _ in range(4):
            options = {"max_new_tokens": 20, "do_sample": False, "assistant_model": draft}
            found[number].append(target.generate(prompts[number], **options).tolist())

    threads = [Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[text] * 4 for text in expected]


# --- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "cache"),
    [
        *((family, cache) for family in ("qwen3", "gpt2") for cache in ("returned", "handed over", "static")),
        *((family, cache) for family in ("gemma3", "mistral") for cache in ("returned", "handed over")),
    ],
)
def test_second_turn_sees_the_end_token_of_a_row_that_ended_first(family: str, cache: str) -> None:
    """Plain `generate` runs that token with the next step of the other rows, and the next turn attends to it."""
    target, prompts = shared_target(family), random_prompt(6, batch_size=2, seed=2)
    first, second = greedy(target, prompts, 14)[:, 6:].tolist()
    place = max(i for i, token in enumerate(first[:8]) if token not in second and token not in first[:i])
    options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": first[place]}
    mask = torch.ones_like(prompts)
    draft = tiny_draft(target)
    lent = (
        StaticCache(config=target.config, max_cache_len=40)
        if cache == "static"
        else DynamicCache(config=target.config)
    )
    options |= {"return_dict_in_generate": True} if cache == "returned" else {CACHE_KEY: lent}
    output = target.generate(prompts, attention_mask=mask, assistant_model=draft, **options)
    sequences = output.sequences if cache == "returned" else output
    mask = torch.ones_like(sequences)
    mask[0, 6 + place + 1 :] = 0
    turn = {
        "input_ids": torch.cat([sequences, random_prompt(4, batch_size=2, seed=9)], dim=1),
        "attention_mask": torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1),
        "max_new_tokens": 8,
        "do_sample": False,
    }
    expected = target.generate(**turn)
    found = target.generate(**turn, **{CACHE_KEY: get_cache(output) if cache == "returned" else lent})
    assert found.tolist() == expected.tolist()


class Raising(StoppingCriteria):
    """Raises at its n-th call."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("enough")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class RaisingStreamer(BaseStreamer):
    """Raises at its n-th token."""

    def __init__(self, tokens: int):
        self.calls = tokens + 1  # the prompt comes first

    def put(self, value: torch.Tensor) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise RuntimeError("enough")

    def end(self) -> None:
        """Never reached."""


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("tree_budget", [0, 8])
@pytest.mark.parametrize("by", ["criterion", "streamer"])
@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 7])
def test_cache_that_was_lent_is_whole_after_an_exception(place: int, by: str, tree_budget: int, family: str) -> None:
    target, prompt = shared_target(family), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 24, [3, 1, 2])
    draft.generation_config.draft_tree_budget = tree_budget
    lengths = []
    for assistant in ({}, {"assistant_model": draft}):
        cache = DynamicCache(config=target.config)
        raising: dict[str, Any] = {"streamer": RaisingStreamer(place)}
        if by == "criterion":
            raising = {"stopping_criteria": StoppingCriteriaList([Raising(place)])}
        with pytest.raises(RuntimeError, match="enough"):
            target.generate(prompt, max_new_tokens=20, do_sample=False, **{CACHE_KEY: cache}, **raising, **assistant)
        lengths.append(cache.get_seq_length())
        text = torch.cat([greedy(target, prompt, place), random_prompt(4, seed=3)], dim=1)
        found = target.generate(text, max_new_tokens=8, do_sample=False, **{CACHE_KEY: cache})
        assert found.tolist() == greedy(target, text, 8).tolist()
    assert lengths[0] == lengths[1] == PROMPT + place - 1


def test_cache_that_keeps_more_than_its_layers_goes_undrafted() -> None:
    """MiniMax keeps the states of its linear layers beside the layers of its cache, and cannot take tokens back."""
    torch.manual_seed(0)
    config = MiniMaxConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    target = MiniMaxForCausalLM(config).to(torch.float64).eval()
    scramble(target, 0)
    target.set_experts_implementation("eager")  # the grouped product takes no float64
    for inputs in (random_prompt(9), left_padded([random_prompt(n, seed=n)[0] for n in (3, 9)])):
        assert_same_text(target, tiny_draft(target), inputs, 20)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "bamba"])
@pytest.mark.parametrize("num_tokens", [1, 3, 24])
def test_recurrent_target_with_a_static_cache(family: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of its forward takes back what it wrote, fits into the buffer, and judges later calls fairly."""
    monkeypatch.setattr(recurrent, "_continues_state", {})
    target, prompt = hybrid_target(family), random_prompt(PROMPT)
    for kind in ({"cache_implementation": "static"}, {}):
        assert_same_text(target, tiny_draft(target), prompt, num_tokens, **kind)


def test_attentions_of_a_static_cache_are_those_of_one_by_one_decoding() -> None:
    target = tiny_target("qwen3")
    target.set_attn_implementation("eager")
    prompt = random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 8, [3, 1])
    drafted, plain = generate_both(target, draft, prompt, 8, output_attentions=True, cache_implementation="static")
    for found, expected in zip(drafted.attentions, plain.attentions, strict=True):
        torch.testing.assert_close(found, expected)


# --- drafts and processors that misbehave ----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("entries", [slice(None), slice(5, 6)], ids=["whole slot", "one token"])
@pytest.mark.parametrize("tree_budget", [0, 1, 4, 16, 64])
def test_slot_that_overflows_changes_nothing(tree_budget: int, entries: slice, value: float) -> None:
    class Overflowing(Qwen3DFlashForDraft):
        def compute_logits(self, last_hidden_state: torch.Tensor, target_head: Any) -> torch.Tensor:
            logits = super().compute_logits(last_hidden_state, target_head).clone()
            logits[:, 1:2, entries] = value  # the last block of a call has one slot
            return logits

    target = shared_target()
    draft = tiny_draft(target, draft_class=Overflowing)
    draft.generation_config.draft_tree_budget = tree_budget
    assert_same_text(target, draft, random_prompt(PROMPT))


@pytest.mark.parametrize("tree_budget", [0, 8])
@pytest.mark.parametrize("prompts", [1, 2])
def test_constraint_that_knows_its_own_texts_only(prompts: int, tree_budget: int) -> None:
    """It raises on any other prefix; plain `generate` never shows it one."""
    texts = [(3, 4, 9, 2), (3, 7, 5, 2), (8, 4, 6, 2)]

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        so_far = tuple(ids[PROMPT:].tolist())
        found = [text[len(so_far)] for text in texts if text[: len(so_far)] == so_far and len(text) > len(so_far)]
        if not found and so_far[3:4] != (2,):
            raise KeyError(so_far)
        return found or [0]

    target = shared_target()
    draft = tiny_draft(target)
    draft.generation_config.draft_tree_budget = tree_budget
    batch = random_prompt(PROMPT, batch_size=prompts)
    output = assert_same_text(target, draft, batch, 10, prefix_allowed_tokens_fn=allowed, eos_token_id=2)
    assert {tuple(row[PROMPT : PROMPT + 4]) for row in output.sequences.tolist()} <= set(texts)


@pytest.mark.parametrize("tree_budget", [0, 8])
def test_constraint_that_refuses_the_text_itself_is_heard(tree_budget: int) -> None:
    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        if ids.shape[0] == PROMPT + 3:
            raise KeyError("nothing goes on from here")
        return list(range(VOCABULARY))

    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 12, 3)
    draft.generation_config.draft_tree_budget = tree_budget
    options = {"do_sample": False, "prefix_allowed_tokens_fn": allowed}
    assert_same_text(target, draft, prompt, 3, **options)
    for assistant in ({}, {"assistant_model": draft}):
        with pytest.raises(KeyError, match="nothing goes on"):
            target.generate(prompt, max_new_tokens=8, **options, **assistant)


# --- rotary embeddings that change with the length -------------------------------------------------------------------

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("length", [7, 14, 15, 16, 17, 20])
@pytest.mark.parametrize("tree_budget", [0, 8])
def test_block_does_not_reach_across_a_change_of_the_rotary_embedding(
    tree_budget: int, length: int, rope: dict[str, Any]
) -> None:
    overrides = {"max_position_embeddings": 16, "rope_parameters": rope}
    plain, target = tiny_target("llama", **overrides), tiny_target("llama", **overrides)
    draft = tiny_draft(target)
    draft.generation_config.draft_tree_budget = tree_budget
    prompt = random_prompt(length)
    found = target.generate(prompt, assistant_model=draft, max_new_tokens=30, do_sample=False)
    assert found.tolist() == greedy(plain, prompt, 30).tolist()


@pytest.mark.parametrize("rope", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("new_tokens", [9, 30])
def test_batch_that_gets_to_a_change_of_the_rotary_embedding_is_not_drafted(
    new_tokens: int, rope: dict[str, Any]
) -> None:
    """There the longest row changes it for all, so rows must be as long as in plain `generate`."""
    overrides = {"max_position_embeddings": 16, "rope_parameters": rope}
    plain, target = tiny_target("llama", **overrides), tiny_target("llama", **overrides)
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (3, 8)])
    found = target.generate(
        **batch,
        assistant_model=tiny_draft(target),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    expected = plain.generate(**batch, max_new_tokens=new_tokens, do_sample=False)
    assert found.sequences.tolist() == expected.tolist()
    assert any(found.acceptance_lengths) == (new_tokens == 9)


def test_rope_limits_of_layers_with_their_own_parameters() -> None:
    config = tiny_target("llama").config
    config.max_position_embeddings = 16
    config.rope_parameters = {"full_attention": LONG, "sliding_attention": DYNAMIC}
    assert [RopeLimits(config).width_at(position) for position in (0, 15, 16, 99)] == [16, 1, 1, 1]
    config.rope_parameters = {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}
    assert [RopeLimits(config).width_at(position) for position in (0, 15, 16, 99)] == [16, 1, None, None]
    config.rope_parameters = None
    assert RopeLimits(config).width_at(10**6) is None


# --- rows ------------------------------------------------------------------------------------------------------------


def test_token_types_stay_with_their_rows() -> None:
    target = tiny_target("gpt2")
    batch = left_padded([random_prompt(PROMPT, seed=seed)[0] for seed in range(3)])
    batch["token_type_ids"] = torch.tensor([1, 2, 3])[:, None].expand(-1, PROMPT).contiguous()
    first = target.generate(**batch, max_new_tokens=20, do_sample=False)[0, PROMPT:].tolist()
    assert_same_text(target, tiny_draft(target), batch, 20, eos_token_id=first[3])


# --- knobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value", "message"),
    [
        ("draft_tree_budget", True, "`draft_tree_budget` must be a number of nodes .* got True"),
        ("draft_tree_budget", 10**9, "`draft_tree_budget` must be a number of nodes from 0.* to 1024, got 1000000000"),
        ("num_assistant_tokens", True, "`num_assistant_tokens` is True"),
        (
            "num_assistant_tokens_schedule",
            "foo",
            "`num_assistant_tokens_schedule` must be one of constant, .* got 'foo'",
        ),
    ],
)
def test_knob_out_of_its_range_is_refused(knob: str, value: Any, message: str) -> None:
    target = shared_target()
    draft = tiny_draft(target)
    setattr(draft.generation_config, knob, value)
    with pytest.raises(ValueError, match=message):
        target.generate(random_prompt(3), assistant_model=draft, max_new_tokens=4)
