"""Static caches: right up to the end of the buffer, in fixed shapes that a compiler can take.

Shapes: B batch, K block, W verified positions, N new tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import StaticCache

from comparing import shared_target
from dflash_hf.generation import decoding
from dflash_hf.generation.compat import CACHE_KEY, get_cache
from dflash_hf.generation.target_runner import TargetRunner
from helpers import greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft

FULL = ("qwen3", "llama", "gpt2", "mixtral")
PROMPT = 9


def static(target: Any, draft: Any, inputs: Any, max_new_tokens: int, **kwargs: Any) -> Any:
    inputs = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    options = {"do_sample": False, "return_dict_in_generate": True, "cache_implementation": "static"} | kwargs
    return target.generate(**inputs, **options, max_new_tokens=max_new_tokens, assistant_model=draft)


@pytest.mark.parametrize("depth", [0, 2, 3])
@pytest.mark.parametrize("max_new_tokens", [*range(1, 10), 24])
def test_text_is_right_to_the_end_of_the_buffer(max_new_tokens: int, depth: int) -> None:
    """All lengths around the block's four: the last round may not write behind the last column."""
    target, prompt = shared_target(), random_prompt(PROMPT)
    output = static(target, oracle_draft(target, prompt, max_new_tokens, depth), prompt, max_new_tokens)
    assert output.sequences.tolist() == greedy(target, prompt, max_new_tokens).tolist()
    assert all(count == depth + 1 for count in output.acceptance_lengths[0][:-1])


@pytest.mark.parametrize("family", FULL)
def test_text_of_every_family_is_its_own(family: str) -> None:
    target, prompt = shared_target(family), random_prompt(PROMPT)
    output = static(target, oracle_draft(target, prompt, 24, [2, 0, 3, 1]), prompt, 24)
    assert output.sequences.tolist() == greedy(target, prompt, 24).tolist()
    assert max(output.acceptance_lengths[0]) == 4


@pytest.mark.parametrize("room", [0, 1, 2, 3, 40])
def test_callers_own_buffer_may_be_just_long_enough(room: int) -> None:
    """The last token is never written, so one column fewer than there are tokens is enough."""
    target, prompt = shared_target(), random_prompt(PROMPT)
    cache = StaticCache(config=target.config, max_cache_len=PROMPT + 12 - 1 + room)
    draft = oracle_draft(target, prompt, 12, 3)
    options = {"cache_implementation": None, CACHE_KEY: cache}
    output = static(target, draft, prompt, 12, **options)
    assert output.sequences.tolist() == greedy(target, prompt, 12).tolist()
    assert int(get_cache(output).get_seq_length()) == PROMPT + 12 - 1
    assert set(output.acceptance_lengths[0][:-1]) == {4}


@pytest.mark.parametrize("max_new_tokens", [4, 5, 20])
def test_rows_of_a_batch_advance_level(max_new_tokens: int) -> None:
    """A static row cannot be shifted, so a round commits as much as its least lucky row accepts."""
    target = shared_target()
    inputs = left_padded([random_prompt(length, seed=length)[0] for length in (3, PROMPT, 6)])
    mask = inputs["attention_mask"]
    draft = oracle_draft(target, inputs["input_ids"], max_new_tokens, [0, 3, 1, 2, 3], attention_mask=mask)
    output = static(target, draft, inputs, max_new_tokens)
    for row, real in zip(output.sequences, mask, strict=True):
        prompt = row[:PROMPT][real.bool()]
        alone = greedy(target, prompt[None], max_new_tokens)[0, len(prompt) :]
        assert row[PROMPT:].tolist() == alone.tolist()
    assert output.acceptance_lengths[0] == output.acceptance_lengths[1] == output.acceptance_lengths[2]
    if max_new_tokens == 20:
        assert max(output.acceptance_lengths[0]) > 1


def test_batch_in_a_buffer_whose_rows_end_at_different_times() -> None:
    target = shared_target()
    inputs = left_padded([random_prompt(length, seed=length)[0] for length in (3, PROMPT, 6)])
    alone = [
        greedy(target, row[mask.bool()][None], 20)[0, mask.sum() :] for row, mask in zip(*inputs.values(), strict=True)
    ]
    end = int(alone[0][6])
    draft = oracle_draft(target, inputs["input_ids"], 20, 2, attention_mask=inputs["attention_mask"])
    output = static(target, draft, inputs, 20, eos_token_id=end, pad_token_id=0)
    for row, text in zip(output.sequences[:, PROMPT:].tolist(), alone, strict=True):
        tokens = text.tolist()
        tokens = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert row == tokens + [0] * (len(row) - len(tokens))


@pytest.mark.parametrize("place", [5, 7, 8])
def test_row_may_end_inside_a_block_while_others_go_on(place: int) -> None:
    """The rows of such a buffer stay level, so the row that stops short must not pull the others back."""
    target, prompts = shared_target(), random_prompt(PROMPT, batch_size=2)
    alone = greedy(target, prompts, 20)
    draft = oracle_draft(target, prompts, 20, 2)
    end = int(alone[0, PROMPT + place])
    expected = greedy(target, prompts, 20, eos_token_id=end)
    output = static(target, draft, prompts, 20, eos_token_id=end)
    assert output.sequences.tolist() == expected.tolist()


def test_callers_own_buffer_has_all_rows_for_the_next_call() -> None:
    """A row that ended has left the buffer on the way; reset and used again, it must hold the batch."""
    target, prompts = shared_target(), random_prompt(PROMPT, batch_size=2)
    end = int(greedy(target, prompts, 20)[0, PROMPT + 5])
    expected = greedy(target, prompts, 20, eos_token_id=end)
    cache = StaticCache(config=target.config, max_cache_len=PROMPT + 20)
    options = {"cache_implementation": None, CACHE_KEY: cache, "eos_token_id": end}
    draft = oracle_draft(target, prompts, 20, 2)
    for _ in range(2):
        assert static(target, draft, prompts, 20, **options).sequences.tolist() == expected.tolist()
        assert cache.layers[0].keys.shape[0] == 2
        cache.reset()


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_static_sliding_window_goes_without_the_draft(
    family: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It overwrites what leaves the window, so nothing can be taken back."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    target, prompt = shared_target(family), random_prompt(PROMPT)
    decoding.logger.warning_once.cache_clear()
    for _ in range(2):
        output = static(target, tiny_draft(target), prompt, 12)
        assert output.sequences.tolist() == greedy(target, prompt, 12).tolist()
        assert output.acceptance_lengths == [[]]
    warnings = [record.message for record in caplog.records if "Generating without the draft" in record.message]
    assert len(warnings) == 1
    assert "StaticSlidingWindowLayer of the target's cache cannot take tokens back" in warnings[0]


def test_tree_becomes_a_chain() -> None:
    target, prompt = shared_target(), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, 12, 3)
    draft.generation_config.draft_tree_budget = 16
    output = static(target, draft, prompt, 12)
    assert output.sequences.tolist() == greedy(target, prompt, 12).tolist()
    assert set(output.acceptance_lengths[0][:-1]) == {4}


# --- shapes, compilation ---------------------------------------------------------------------------------------------


def test_verifications_have_one_shape_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = shared_target(), random_prompt(PROMPT)
    shapes: list[tuple[Any, ...]] = []
    original = TargetRunner.verify

    def verify(runner: Any, block_ids: torch.Tensor, tree: Any = None) -> Any:
        columns = [(layer.keys.shape, layer.keys.data_ptr()) for layer in runner.cache.layers]
        shapes.append((tuple(block_ids.shape), columns))
        return original(runner, block_ids, tree)

    monkeypatch.setattr(TargetRunner, "verify", verify)
    static(target, oracle_draft(target, prompt, 40, [3, 0, 2, 1, 0]), prompt, 40)
    widths = [shape[1] for shape, _ in shapes]
    assert len(widths) > 10
    assert set(widths[:-3]) == {4}  # the last rounds are cut by what is left to generate
    assert widths == sorted(widths, reverse=True)
    assert all(columns == shapes[0][1] for _, columns in shapes), "the buffers stay where they are"


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """Every graph that Dynamo hands to its compiler; this one runs it as it is."""
    torch._dynamo.reset()
    compiled: list[Any] = []
    yield compiled
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_verification_and_draft_are_compiled_once(graphs: list[Any]) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    prompt = random_prompt(PROMPT)
    target = tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=2)
    draft = tiny_draft(target, target_layer_ids=(0, 1), num_hidden_layers=1)
    expected = static(target, draft, prompt, 10)
    target.forward = torch.compile(target.forward, backend=backend, dynamic=False)
    draft.forward = torch.compile(draft.forward, backend=backend, dynamic=False)
    counts = []
    for _ in range(3):
        output = static(target, draft, prompt, 10)
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert output.acceptance_lengths == expected.acceptance_lengths
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[1] == counts[2], "the same shapes come again"
