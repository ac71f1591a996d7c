"""Verification's attention: the same results as Transformers' own, without repeated keys, and for nobody else.

Shapes: B batch, W verified tokens, S context, G key/value heads, D head size.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.generation.streamers import BaseStreamer
from transformers.integrations import sdpa_attention

from comparing import assert_same_text, shared_target
from dflash_hf.generation import attention, install_hook, remove_hook
from dflash_hf.generation.attention import grouped_queries
from helpers import greedy, left_padded, random_prompt, tiny_draft, tiny_target
from oracle import oracle_draft


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """The shapes of keys and values that Transformers repeated for the heads of their group."""
    seen: list[torch.Size] = []
    original = sdpa_attention.repeat_kv

    def repeat_kv(states: torch.Tensor, count: int) -> torch.Tensor:
        seen.append(states.shape)
        return original(states, count)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat_kv)
    yield seen


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """What a target's layer gets from the attention that is registered."""
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
    return AttentionInterface()["sdpa"](module, query, key, value, mask, scaling=0.3)[0]


@settings(max_examples=60, deadline=None)
@given(
    batch_size=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    width=st.integers(1, 6),
    context=st.integers(0, 9),
    masking=st.sampled_from(["bool", "float", "by head", "one row", "none"]),
    seed=st.integers(0, 9),
)
def test_result_is_that_of_transformers(
    batch_size: int, kv_heads: int, groups: int, width: int, context: int, masking: str, seed: int
) -> None:
    torch.manual_seed(seed)
    query = torch.randn(batch_size, kv_heads * groups, width, 4, dtype=torch.float64)
    key, value = torch.randn(2, batch_size, kv_heads, context + width, 4, dtype=torch.float64)
    heads = kv_heads * groups if masking == "by head" else 1
    rows = 1 if masking == "one row" else width
    mask = torch.rand(batch_size, heads, rows, context + width) < 0.7
    mask[..., -1] = True
    if masking == "float":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    used = None if masking == "none" else mask
    expected, _ = sdpa_attention.sdpa_attention_forward(module, query, key, value, used, scaling=0.3)
    with grouped_queries():
        found = attend(query, key, value, used)
    assert found.shape == expected.shape
    assert found.is_contiguous() == expected.is_contiguous()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tree_budget", [0, 8])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_verifications_repeat_no_keys(family: str, tree_budget: int, repeats: list[torch.Size]) -> None:
    target = shared_target(family)
    batch = left_padded([random_prompt(length, seed=length)[0] for length in (4, 9)])
    mask = batch["attention_mask"]
    draft = oracle_draft(target, batch["input_ids"], 24, [0, 3, 1], attention_mask=mask, target_layer_ids=(0, 1))
    draft.generation_config.draft_tree_budget = tree_budget
    repeats.clear()
    target.generate(**batch, max_new_tokens=1, do_sample=False)
    prefill = len(repeats)
    assert prefill == 2 * target.config.num_hidden_layers, "without this the test would say nothing"
    target.generate(**batch, assistant_model=draft, max_new_tokens=24, do_sample=False)
    assert len(repeats) == 2 * prefill
    assert_same_text(target, draft, batch)


def test_other_forwards_and_threads_keep_the_attention_of_transformers(repeats: list[torch.Size]) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 3, 4), torch.randn(1, 2, 5, 4)
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    with grouped_queries():
        attend(query, key, key, mask)
        assert not repeats
        thread = threading.Thread(target=attend, args=(query, key, key, mask))
        thread.start()
        thread.join()
        assert len(repeats) == 2, "another thread"
    attend(query, key, key, mask)
    assert len(repeats) == 4, "after the verification"


def test_attention_that_the_caller_registered_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def own(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query.shape)
        return sdpa_attention.sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    target, prompt = tiny_target("qwen3"), random_prompt(7)
    assert_same_text(target, tiny_draft(target), prompt, 8)
    assert AttentionInterface()["sdpa"] is own
    assert any(shape[1] == 4 and shape[2] == 4 for shape in calls), "a verification of a block"


def test_exception_ends_it(repeats: list[torch.Size]) -> None:
    with pytest.raises(KeyError), grouped_queries():
        raise KeyError
    key = torch.randn(1, 2, 5, 4)
    attend(torch.randn(1, 4, 3, 4), key, key, torch.ones(1, 1, 3, 5, dtype=torch.bool))
    assert len(repeats) == 2


class RemovesTheHook(BaseStreamer):
    """A caller who has had enough in the middle of a generation."""

    def put(self, value: torch.Tensor) -> None:
        """Remove it."""
        remove_hook()

    def end(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("in_mid_run", [False, True])
def test_hook_that_is_removed_leaves_the_attention_of_transformers(in_mid_run: bool) -> None:
    target, prompt = shared_target(), random_prompt(7)
    assert AttentionInterface()["sdpa"] is not sdpa_attention.sdpa_attention_forward
    try:
        if in_mid_run:
            draft, expected = tiny_draft(target), greedy(target, prompt, 12)
            found = target.generate(
                prompt, assistant_model=draft, streamer=RemovesTheHook(), max_new_tokens=12, do_sample=False
            )
            assert torch.equal(found, expected)
        else:
            remove_hook()
        assert AttentionInterface()["sdpa"] is sdpa_attention.sdpa_attention_forward
    finally:
        install_hook()


def test_result_may_lie_in_memory_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's memory-efficient kernel returns tokens before heads, transposed."""
    original = torch.nn.functional.scaled_dot_product_attention

    def transposed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return original(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    target = shared_target()
    assert_same_text(target, tiny_draft(target), random_prompt(7))


def test_grouping_goes_on_behind_one_within(repeats: list[torch.Size]) -> None:
    key = torch.randn(1, 2, 5, 4)
    with grouped_queries():
        with grouped_queries():
            pass
        attend(torch.randn(1, 4, 3, 4), key, key, torch.ones(1, 1, 3, 5, dtype=torch.bool))
    assert not repeats


def test_copies_of_the_code_share_one_replacement(repeats: list[torch.Size]) -> None:
    """Drafts from the Hub bring their own copy; the one that came first serves all."""
    spec = importlib.util.spec_from_file_location("another_copy", attention.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    with grouped_queries():
        pass
    key = torch.randn(1, 2, 5, 4)
    with other.grouped_queries():
        attend(torch.randn(1, 4, 3, 4), key, key, torch.ones(1, 1, 3, 5, dtype=torch.bool))
    assert not repeats
