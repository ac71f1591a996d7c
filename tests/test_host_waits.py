"""How often a round makes the host wait for the device: once, for the tokens that stand, however many there are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comparing import shared_target
from dflash_hf.generation import decoding
from helpers import as_on_accelerator, greedy, left_padded, random_prompt
from oracle import oracle_draft

WAITS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counter]]:
    """For each round, what this package's own code has called that waits for a device, by place."""
    rounds: list[Counter] = []
    in_round = False

    def watched(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            if in_round and "/dflash_hf/" in caller.f_code.co_filename:
                rounds[-1][f"{name} in {caller.f_code.co_qualname}"] += 1
            return original(tensor, *args, **kwargs)

        return wrapper

    for name in WAITS:
        monkeypatch.setattr(torch.Tensor, name, watched(name))
    original_round = decoding.DecodingLoop._round

    def one_round(loop: Any) -> None:
        nonlocal in_round
        rounds.append(Counter())
        in_round = True
        try:
            original_round(loop)
        finally:
            in_round = False

    monkeypatch.setattr(decoding.DecodingLoop, "_round", one_round)
    with as_on_accelerator():
        yield rounds


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_host_waits_once_a_round(family: str, budget: int, rows: int, waits: list[Counter]) -> None:
    """For chains and trees, rows that stay where they are and rows that are moved."""
    target = shared_target(family)
    inputs = left_padded([random_prompt(n, seed=n)[0] for n in (3, 9, 6)[-rows:]])
    draft = oracle_draft(target, inputs["input_ids"], 40, [3, 0, 0, 2, 1], attention_mask=inputs["attention_mask"])
    draft.generation_config.draft_tree_budget = budget
    expected = greedy(target, **inputs, max_new_tokens=40)
    found = target.generate(**inputs, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert torch.equal(found, expected)
    assert len(waits) > 10
    for found in waits[1:]:  # in the first, what was asked of a target is remembered
        own = {place: count for place, count in found.items() if "OracleDraft" not in place}
        assert own == {"tolist in Verdict.to_host": 1}


def test_width_chosen_by_its_chances_costs_a_second_wait(waits: list[Counter]) -> None:
    target, prompt = shared_target(), random_prompt(6)
    draft = oracle_draft(target, prompt, 40, [3, 0, 0, 2, 1])
    draft.generation_config.num_assistant_tokens_schedule = "auto"
    draft.generation_config.draft_costs = (0.1, 0.01)
    target.generate(prompt, assistant_model=draft, max_new_tokens=40, do_sample=False)
    assert {sum(found.values()) for found in waits} <= {1, 2}
