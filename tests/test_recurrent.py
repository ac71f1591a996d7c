"""Targets whose cache holds recurrent or convolution states: after a round they are those of the kept tokens.

Shapes: B batch, S context, W verified positions, V vocabulary, N new tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

from dflash_hf.generation import decoding, recurrent
from dflash_hf.generation.compat import CACHE_KEY, CACHE_KEYS, get_cache
from dflash_hf.generation.rollback import LINEAR
from dflash_hf.generation.target_runner import TargetRunner
from helpers import greedy, left_padded, random_prompt, tiny_draft
from hybrid_targets import HYBRIDS, hybrid_target
from oracle import oracle_draft

NEW_TOKENS = 20
PROMPT = 9
FAMILIES = tuple(name for name in HYBRIDS if name != "jamba")
UNEVEN = ("nemotron_h", "zamba2")  # with a floor on the step size, as they are published


def batch() -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, one shorter than a convolution's kernel."""
    return left_padded([random_prompt(length, seed=length)[0] for length in (3, PROMPT, 6)])


def ragged_draft(target: Any, inputs: dict[str, torch.Tensor]) -> Any:
    """Right to a depth that changes with the position, so rows of a batch part at once."""
    mask = inputs["attention_mask"]
    return oracle_draft(target, inputs["input_ids"], NEW_TOKENS, [0, 3, 1, 2, 3, 1, 2], attention_mask=mask)


def drafted(target: Any, draft: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True} | kwargs
    return target.generate(**inputs, **options, assistant_model=draft)


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_the_targets_own(name: str, depth: int) -> None:
    target, prompt = hybrid_target(name), random_prompt(PROMPT)
    output = drafted(target, oracle_draft(target, prompt, NEW_TOKENS, depth), {"input_ids": prompt})
    assert output.sequences.tolist() == greedy(target, prompt, NEW_TOKENS).tolist()
    assert set(output.acceptance_lengths[0][:-1]) == {depth + 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_ragged_batch_are_their_own(name: str) -> None:
    target, inputs = hybrid_target(name), batch()
    output = drafted(target, ragged_draft(target, inputs), inputs)
    for row, mask, lengths in zip(output.sequences, inputs["attention_mask"], output.acceptance_lengths, strict=True):
        prompt = row[: mask.shape[0]][mask.bool()]
        alone = greedy(target, prompt[None], NEW_TOKENS)[0, len(prompt) :]
        assert row[mask.shape[0] :].tolist() == alone.tolist()
        assert len(set(lengths)) > 2
    assert output.acceptance_lengths[0] != output.acceptance_lengths[1]


# --- states ----------------------------------------------------------------------------------------------------------


def states_of(cache: Any, index: int) -> list[tuple[str, torch.Tensor]]:
    """Every recurrent and convolution state of a row, by name."""
    found = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LINEAR):
            for kind in ("conv_states", "recurrent_states"):
                states = getattr(layer, kind).items()
                found += [(f"{number}.{kind}.{key}", state[index]) for key, state in states if state is not None]
    return found


def columns_of(cache: Any, index: int, length: int) -> list[tuple[str, torch.Tensor]]:
    """The last keys and values of a row, by name."""
    return [
        (f"{number}.{kind}", getattr(layer, kind)[index, :, -length:])
        for number, layer in enumerate(cache.layers)
        for kind in ("keys", "values")
        if getattr(layer, "keys", None) is not None
    ]


class Comparing:
    """After every round, holds each row's states against those of a prefill of the same tokens, alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slack: float):
        self.slack, self.rounds, self.worst = slack, 0, 0.0
        original = decoding.DecodingLoop._round

        def compared(loop: Any) -> None:
            original(loop)
            for index, row in enumerate(loop.rows):
                self.compare(loop, index, row)
            self.rounds += 1

        monkeypatch.setattr(decoding.DecodingLoop, "_round", compared)

    @torch.no_grad()
    def compare(self, loop: Any, index: int, row: int) -> None:
        tokens = loop.sequences.prefix(row)[:, :-1]  # the cache lags behind by the anchor
        tokens = tokens[:, int((tokens[0] != 0).long().argmax()) :]  # no prompt here holds the padding token
        fresh = get_cache(loop.target(tokens, use_cache=True))
        length = tokens.shape[1]
        wanted = states_of(fresh, 0) + columns_of(fresh, 0, length)
        found = dict(states_of(loop.runner.cache, index) + columns_of(loop.runner.cache, index, length))
        assert len(wanted) == len(found) > 0
        for name, state in wanted:
            assert found[name].shape == state.shape, name
            error = float((found[name] - state).abs().max() / state.abs().max().clamp_min(1e-3))
            self.worst = max(self.worst, error)
            assert error < self.slack, f"{name} in round {self.rounds} of row {row}: {error}"


@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_states_after_every_round_are_those_of_a_prefill(
    name: str, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-3 of the largest entry of a state: the kernels compute in float32, in other chunks than a prefill. What is
    seen is up to 1.2e-4; one token too many changes either kind by over twenty times the slack, see the next test.
    """
    target = hybrid_target(name)
    inputs = batch() if is_batch else {"input_ids": random_prompt(2), "attention_mask": torch.ones(1, 2).long()}
    draft = ragged_draft(target, inputs)
    comparing = Comparing(monkeypatch, slack=1e-3)
    drafted(target, draft, inputs)
    assert comparing.rounds > 5


@pytest.mark.parametrize("name", FAMILIES)
def test_one_token_more_changes_the_states_by_far_more(name: str) -> None:
    target, ids = hybrid_target(name), random_prompt(PROMPT)
    with torch.no_grad():
        more = states_of(get_cache(target(ids, use_cache=True)), 0)
        less = dict(states_of(get_cache(target(ids[:, :-1], use_cache=True)), 0))
    changes: dict[str, float] = {}
    for state_name, state in more:
        change = float((less[state_name] - state).abs().max() / state.abs().max())
        kind = state_name.split(".")[1]
        changes[kind] = max(change, changes.get(kind, 0.0))
    assert min(changes.values()) > 20 * 1e-3, changes


def test_comparison_notices_a_state_that_saw_a_refused_token(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = hybrid_target("qwen3_next"), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, NEW_TOKENS, 1)
    Comparing(monkeypatch, slack=1e-3)
    monkeypatch.setattr("dflash_hf.generation.recurrent.RecurrentStates.keep", lambda *_: None)
    with pytest.raises(AssertionError, match="conv_states"):
        drafted(target, draft, {"input_ids": prompt})


# --- what Transformers itself does -----------------------------------------------------------------------------------


@torch.no_grad()
def one_against_eight(target: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits (1, V) of a token behind a filled cache: alone, as the first of eight, and in a forward of everything."""
    ids = random_prompt(PROMPT + 8, seed=seed)
    keyword = next(key for key in CACHE_KEYS if key in inspect.signature(target.forward).parameters)
    logits = []
    for width in (1, 8):
        cache = get_cache(target(ids[:, :PROMPT], use_cache=True))
        positions = torch.arange(PROMPT, PROMPT + width)[None]
        block = ids[:, PROMPT : PROMPT + width]
        logits.append(target(block, position_ids=positions, use_cache=True, **{keyword: cache}).logits[:, 0])
    return logits[0], logits[1], target(ids, use_cache=False).logits[:, PROMPT]


@pytest.mark.parametrize("name", FAMILIES)
def test_several_tokens_continue_the_state(name: str) -> None:
    one, eight, whole = one_against_eight(hybrid_target(name))
    assert (one - whole).abs().max() < 3e-5 * whole.abs().max()
    assert (eight - whole).abs().max() < 3e-5 * whole.abs().max()


@pytest.mark.parametrize("name", UNEVEN)
def test_target_whose_kernels_differ_a_little_is_not_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their one-token kernels leave out the step size's floor. That is no restart: verified text follows the kernel
    for several tokens, which is the one that agrees with a forward over everything.
    """
    target = hybrid_target(name, time_step_min=0.001)
    for seed in range(6):
        one, eight, whole = one_against_eight(target, seed)
        floor_missing, rounding = (one - whole).abs().max(), (eight - whole).abs().max()
        assert 5 * rounding < floor_missing < 0.02 * whole.abs().max()
        assert rounding < 3e-5 * whole.abs().max()
        monkeypatch.setattr(recurrent, "_continues_state", {})
        prompt = random_prompt(PROMPT, seed=seed)
        with_draft = drafted(target, oracle_draft(target, prompt, 8, 3), {"input_ids": prompt}, max_new_tokens=8)
        with torch.no_grad():
            logits = target(with_draft.sequences, use_cache=False).logits[0, PROMPT - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == with_draft.sequences[0, PROMPT:].tolist()


def test_jamba_restarts_from_an_empty_state_in_transformers_itself() -> None:
    one, eight, whole = one_against_eight(hybrid_target("jamba"))
    assert (one - whole).abs().max() < 0.05
    assert (eight - whole).abs().max() > 0.5, "Transformers corrected it; this family can be drafted now"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_refusal_is_a_sentence_and_leaves_no_trace(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "_continues_state", {})
    target = hybrid_target("jamba") if dtype == torch.float64 else copy.deepcopy(hybrid_target("jamba")).to(dtype)
    for _ in range(2):  # the answer is remembered, and stays
        with pytest.raises(ValueError, match="JambaForCausalLM restarts from an empty state when it is given several"):
            drafted(target, tiny_draft(target), {"input_ids": random_prompt(PROMPT)})
    assert not any(module._forward_pre_hooks for module in target.modules())
    assert greedy(target, random_prompt(PROMPT), 3).shape == (1, PROMPT + 3)


# --- traces, cost ----------------------------------------------------------------------------------------------------


class Failing(StoppingCriteria):
    """Breaks in the middle of a round."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Fails once some tokens are there."""
        if input_ids.shape[1] > PROMPT + 6:
            raise RuntimeError("a user's criterion broke")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("criteria", [[], [Failing()]], ids=["to the end", "after an exception"])
def test_hooks_and_attributes_are_gone_afterwards(criteria: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = hybrid_target("qwen3_next"), random_prompt(PROMPT)
    cache, watched = DynamicCache(config=target.config), []
    original = TargetRunner.verify

    def counting(runner: Any, *args: Any) -> Any:
        watched.append(sum(len(module._forward_pre_hooks) for module in target.modules()))
        return original(runner, *args)

    monkeypatch.setattr(TargetRunner, "verify", counting)
    draft = oracle_draft(target, prompt, NEW_TOKENS, 1)
    options = {CACHE_KEY: cache, "stopping_criteria": criteria}
    if criteria:
        with pytest.raises(RuntimeError, match="criterion broke"):
            drafted(target, draft, {"input_ids": prompt}, **options)
    else:
        drafted(target, draft, {"input_ids": prompt}, **options)
    assert min(watched) > 0
    assert not any(module._forward_pre_hooks for module in target.modules())
    for layer in cache.layers:
        assert not {"update_conv_state", "update_recurrent_state"} & set(vars(layer))
        assert not getattr(layer, "record_past", False)


MIXERS = {"qwen3_next": "linear_attn", "falcon_h1": "mamba", "lfm2": "conv", "kimi_linear": "self_attn"}


@pytest.mark.parametrize("name", MIXERS)
def test_only_mixers_run_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = hybrid_target(name), random_prompt(PROMPT)
    draft = oracle_draft(target, prompt, NEW_TOKENS, 1)
    ran: Counter[str] = Counter()
    replaying = False
    original = TargetRunner.keep
    partial_rounds = 0

    def keep(runner: Any, counts: Any, width: int, order: Any = None) -> None:
        nonlocal replaying, partial_rounds
        partial_rounds += counts[0] < width
        replaying = True
        original(runner, counts, width, order)
        replaying = False

    monkeypatch.setattr(TargetRunner, "keep", keep)
    handles = [
        module.register_forward_hook(lambda *_, module_name=module_name: ran.update([module_name] * replaying))
        for module_name, module in target.named_modules()
    ]
    try:
        output = drafted(target, draft, {"input_ids": prompt})
    finally:
        for handle in handles:
            handle.remove()
    layers = [number for number, layer in enumerate(get_cache(output).layers) if isinstance(layer, LINEAR)]
    mixers = {f"model.layers.{number}.{MIXERS[name]}" for number in layers}
    outside = {module for module in ran if not any(module == m or module.startswith(m + ".") for m in mixers)}
    assert outside == set()
    assert partial_rounds > 5
    assert {module: ran[module] for module in mixers} == dict.fromkeys(mixers, partial_rounds)


# --- other ways to call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "lfm2"])
def test_sampling_from_one_token_is_greedy_and_a_seed_repeats(name: str) -> None:
    target, inputs = hybrid_target(name), batch()
    draft = tiny_draft(target)
    certain = drafted(target, draft, inputs, do_sample=True, top_k=1).sequences
    assert certain.tolist() == drafted(target, draft, inputs).sequences.tolist()
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(drafted(target, draft, inputs, do_sample=True, top_k=0).sequences.tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
def test_second_turn_takes_over_the_cache(name: str) -> None:
    target, prompt = hybrid_target(name), random_prompt(PROMPT)
    draft = tiny_draft(target)
    first = drafted(target, draft, {"input_ids": prompt})
    ids = torch.cat([first.sequences, random_prompt(4, seed=5)], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # a generated 0 is no padding
    second = drafted(target, draft, inputs | {CACHE_KEY: get_cache(first)})
    alone = greedy(target, ids, NEW_TOKENS, attention_mask=inputs["attention_mask"])
    assert second.sequences.tolist() == alone.tolist()
    again = drafted(target, draft, {"input_ids": prompt})
    assert again.sequences.tolist() == first.sequences.tolist()
    assert again.acceptance_lengths == first.acceptance_lengths
