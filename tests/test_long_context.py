"""Long contexts: the draft keeps what its layers can see and no more, at absolute positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.generation.drafting import Drafter
from helpers import greedy, random_prompt, tiny_draft

WINDOW, BLOCK = 6, 4
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
ALL_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2}


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every draft cache that is made, by a draft's `new_cache`."""

    def watch(draft: Any) -> list[Any]:
        made: list[Any] = []
        original = draft.new_cache
        monkeypatch.setattr(draft, "new_cache", lambda *args: made.append(original(*args)) or made[-1])
        return made

    return watch


def columns(cache: Any) -> list[int]:
    """Columns of each layer's buffer, context and block."""
    return [keys.shape[2] for keys in cache.keys]


def test_sliding_layers_keep_their_window_and_no_more(qwen3: Any, caches: Any) -> None:
    draft = tiny_draft(qwen3, **SLIDING)
    made = caches(draft)
    prompt = random_prompt(120)
    output = qwen3.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert torch.equal(output, greedy(qwen3, prompt, 40))
    sliding, full = columns(made[0])
    assert sliding == WINDOW - 1 + BLOCK
    assert full >= 150


def test_bounded_context_holds_in_full_layers_and_never_widens_a_window(qwen3: Any, caches: Any) -> None:
    draft = tiny_draft(qwen3, **SLIDING)
    draft.generation_config.draft_context_length = 16
    made = caches(draft)
    prompt = random_prompt(120)
    output = qwen3.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert torch.equal(output, greedy(qwen3, prompt, 40))
    assert columns(made[0]) == [WINDOW - 1 + BLOCK, 16 + BLOCK]


def test_context_length_of_the_call_goes_before_the_drafts_own(qwen3: Any, caches: Any) -> None:
    draft = tiny_draft(qwen3)
    draft.generation_config.draft_context_length = 16
    made = caches(draft)
    config = qwen3.generation_config.__class__(
        max_new_tokens=8, do_sample=False, draft_context_length=12, pad_token_id=0
    )
    qwen3.generate(random_prompt(60), assistant_model=draft, generation_config=config)
    assert columns(made[0]) == [12 + BLOCK] * 2


def test_bound_far_beyond_the_text_costs_nothing(qwen3: Any, caches: Any) -> None:
    draft = tiny_draft(qwen3)
    draft.generation_config.draft_context_length = 10**9
    made = caches(draft)
    qwen3.generate(random_prompt(70), assistant_model=draft, max_new_tokens=8, do_sample=False)
    assert max(columns(made[0])) < 4 * 70


def test_window_fills_little_by_little_and_then_wraps(qwen3: Any, caches: Any) -> None:
    """The buffer doubles from 64 columns to the bound of 150, then the newest overwrites the oldest."""
    draft = tiny_draft(qwen3)
    draft.generation_config.draft_context_length = 150
    made = caches(draft)
    sizes = set()
    original = draft.forward

    def watching(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        sizes.update(columns(made[0]))
        return outputs

    draft.forward = watching
    qwen3.generate(random_prompt(3), assistant_model=draft, max_new_tokens=200, do_sample=False)
    assert sizes == {64 + BLOCK, 128 + BLOCK, 150 + BLOCK}


@pytest.mark.parametrize("value", [0, 1.5, "all", True])
def test_context_length_that_is_no_number_of_tokens_is_refused(qwen3: Any, value: Any) -> None:
    draft = tiny_draft(qwen3)
    draft.generation_config.draft_context_length = value
    with pytest.raises(ValueError, match=f"`draft_context_length` must be at least 1 token, got {value!r}"):
        qwen3.generate(random_prompt(5), assistant_model=draft, max_new_tokens=4)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, ALL_SLIDING, {**SLIDING, "is_causal": False}], ids=["full", "window", "mixed"])
@pytest.mark.parametrize("bound", [1, 5, 16, 66, 150, None])
def test_kept_context_gives_what_a_forward_over_it_gives(
    qwen3: Any, fields: dict[str, Any], bound: int | None
) -> None:
    """Rounds of different lengths through the cache, each against one forward over the last tokens without one."""
    draft = tiny_draft(qwen3, **fields)
    drafter = Drafter(draft, qwen3.get_input_embeddings(), qwen3.get_output_embeddings(), bound)
    text = random_prompt(200)
    hidden_states = qwen3(text, output_hidden_states=True).hidden_states
    taps = torch.cat([hidden_states[tap + 1] for tap in draft.config.target_layer_ids], dim=-1)
    drafter.begin(1, 0)
    seen = 0
    for count in (30, 1, 4, 2, 20, 3, 3, 1, 4, 1, 40, 3, 4, 30, 2, 4, 25, 3):
        drafter.observe(taps[:, seen : seen + count], [count])
        seen += count
        logits = drafter.block_logits(text[:, seen : seen + 1], BLOCK)
        block = torch.full((1, BLOCK), draft.config.mask_token_id)
        block[:, 0] = text[:, seen]
        first = 0 if bound is None else max(0, seen - bound)
        states = draft(
            draft.embed_block(block, qwen3.get_input_embeddings()),
            taps[:, first:seen],
            position_ids=torch.arange(first, seen + BLOCK)[None],
        ).last_hidden_state
        expected = draft.compute_logits(states, qwen3.get_output_embeddings())
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bound", [5, 16])
def test_batches_of_different_lengths_are_bounded_row_by_row(qwen3: Any, bound: int) -> None:
    """A bound as long as the shorter prompts still gives every row what it gives alone."""
    draft = tiny_draft(qwen3)
    draft.generation_config.draft_context_length = bound
    prompts = [random_prompt(length, seed=length)[0] for length in (7, 25, 60)]
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
    kwargs = {"assistant_model": draft, "max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    together = qwen3.generate(ids, attention_mask=mask, **kwargs)
    for row, prompt in enumerate(prompts):
        alone = qwen3.generate(prompt[None], **kwargs)
        assert together.acceptance_lengths[row] == alone.acceptance_lengths[0]
        assert torch.equal(together.sequences[row, width:], alone.sequences[0, len(prompt) :])
