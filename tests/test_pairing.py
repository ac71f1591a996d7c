"""A draft and a target are checked against each other before the first forward."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dflash_hf.generation import pairing
from helpers import random_prompt, tiny_draft, tiny_target


def refusal(target: Any, draft: Any, **kwargs: Any) -> str:
    """The sentence that `generate` refuses the pair with, before any forward of either."""
    forwards: list[str] = []
    for model in (target, draft):
        model.register_forward_pre_hook(lambda module, args: forwards.append(type(module).__name__))
    with pytest.raises(ValueError) as error:
        target.generate(random_prompt(5), assistant_model=draft, max_new_tokens=4, do_sample=False, **kwargs)
    assert not forwards
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_another_width_is_refused(qwen3: Any) -> None:
    sentence = refusal(qwen3, tiny_draft(tiny_target("qwen3", hidden_size=40)))
    assert "`hidden_size` is 40 in the draft but 32 in the target" in sentence


def test_tap_beyond_the_last_layer_is_refused(qwen3: Any) -> None:
    draft = tiny_draft(qwen3, target_layer_ids=(0, 9), num_target_layers=None)
    assert "`target_layer_ids` taps layer 9" in refusal(qwen3, draft)
    draft = tiny_draft(tiny_target("qwen3", num_hidden_layers=6))
    assert "`num_target_layers` is 6 in the draft but the target has `num_hidden_layers` 4" in refusal(qwen3, draft)


def test_embedding_tap_is_accepted(qwen3: Any) -> None:
    pairing.check_pair(qwen3, tiny_draft(qwen3, target_layer_ids=(-1, 3)))


def test_mask_token_that_the_target_lacks_is_refused(qwen3: Any) -> None:
    draft = tiny_draft(tiny_target("qwen3", vocab_size=80))
    assert "`mask_token_id` is 79 but the target's embedding has 64 rows" in refusal(qwen3, draft)


@pytest.mark.parametrize(
    "fields", [{"own_head": True}, {"own_embedding": True}, {"markov_rank": 4}], ids=["head", "embedding", "Markov"]
)
def test_own_tables_of_another_vocabulary_are_refused(qwen3: Any, fields: dict[str, Any]) -> None:
    draft = tiny_draft(tiny_target("qwen3", vocab_size=80), mask_token_id=3, **fields)
    assert "`vocab_size` is 80 in the draft, which has tables of its own" in refusal(qwen3, draft)
    pairing.check_pair(qwen3, tiny_draft(tiny_target("qwen3", vocab_size=80), mask_token_id=3))


def test_more_proposals_than_the_block_has_are_refused(qwen3: Any) -> None:
    assert "`num_assistant_tokens` is 4" in refusal(qwen3, tiny_draft(qwen3), num_assistant_tokens=4)
    shifted = tiny_draft(qwen3, slots_predict_next=True)
    assert "`num_assistant_tokens` is 5" in refusal(qwen3, shifted, num_assistant_tokens=5)
    qwen3.generate(random_prompt(5), assistant_model=shifted, max_new_tokens=4, num_assistant_tokens=4)


def test_window_shorter_than_the_block_is_refused(qwen3: Any) -> None:
    with pytest.raises(ValueError, match="`sliding_window` is 3 but `block_size` is 4"):
        tiny_draft(qwen3, sliding_window=3, layer_types=["sliding_attention"] * 2)


# ---------------------------------------------------------------- warnings


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What has been warned about, as text; every warning is new."""
    pairing.logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(pairing.logger, "propagate", True)
    return lambda: caplog.text


def test_unknown_thinking_mode_is_warned_about_once(qwen3: Any, warned: Any) -> None:
    draft = tiny_draft(qwen3)
    for _ in range(2):
        qwen3.generate(random_prompt(5), assistant_model=draft, max_new_tokens=3)
    assert warned().count("`trained_with_thinking`") == 1


@pytest.mark.parametrize("thinking", [True, False])
def test_known_thinking_mode_is_no_reason_to_warn(qwen3: Any, warned: Any, thinking: bool) -> None:
    draft = tiny_draft(qwen3, trained_with_thinking=thinking)
    qwen3.generate(random_prompt(5), assistant_model=draft, max_new_tokens=3)
    assert "trained_with_thinking" not in warned()


def test_target_that_cannot_think_is_no_reason_to_warn(warned: Any) -> None:
    llama = tiny_target("llama")
    llama.generate(random_prompt(5), assistant_model=tiny_draft(llama), max_new_tokens=3)
    assert "trained_with_thinking" not in warned()


def test_chat_template_tells_better_than_the_family(qwen3: Any, warned: Any) -> None:
    draft = tiny_draft(qwen3)

    class Tokenizer:
        chat_template = "{{ messages }}"

    pairing.warn_of_poor_pair(qwen3, draft, Tokenizer())
    assert not warned()
    Tokenizer.chat_template = "{% if enable_thinking %}"
    pairing.warn_of_poor_pair(tiny_target("llama"), draft, Tokenizer())
    assert "trained_with_thinking" in warned()


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"trained_length": 8}, "trained_length"), ({"max_position_embeddings": 16}, "max_position_embeddings")],
)
def test_context_far_beyond_the_training_is_warned_about(
    qwen3: Any, warned: Any, fields: dict[str, Any], name: str
) -> None:
    draft = tiny_draft(qwen3, **fields)
    qwen3.generate(random_prompt(16), assistant_model=draft, max_new_tokens=3)
    assert name not in warned()
    qwen3.generate(random_prompt(17), assistant_model=draft, max_new_tokens=3)
    assert f"`{name}`" in warned()
    assert "draft_context_length" in warned()


@pytest.mark.parametrize("remedy", ["draft_context_length", "sliding layers"])
def test_bounded_context_is_no_reason_to_warn(qwen3: Any, warned: Any, remedy: str) -> None:
    layers = {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2} if remedy == "sliding layers" else {}
    draft = tiny_draft(qwen3, trained_length=4, trained_with_thinking=False, **layers)
    if remedy == "draft_context_length":
        draft.generation_config.draft_context_length = 8
    qwen3.generate(random_prompt(30), assistant_model=draft, max_new_tokens=3)
    assert not warned()
