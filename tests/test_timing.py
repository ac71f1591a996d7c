"""Prefill and decoding are told apart, and decoding by who was running: with a clock that only models move."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.evaluation.timing import Recorder
from helpers import random_prompt, tiny_target
from oracle import oracle_draft

PROMPT, NEW, BLOCK = 9, 13, 4
PREFILL, STEP, DRAFT, EMBED = 10.0, 3.0, 0.5, 0.25


class FakeClock:
    """Stands still until a model runs."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def target(clock: FakeClock) -> Any:
    """A target whose prefill takes 10 seconds and whose other forwards take 3, whatever their width."""
    target = tiny_target("qwen3")
    model = target.model

    def advance(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        clock.now += PREFILL if output.last_hidden_state.shape[1] >= PROMPT else STEP

    model.register_forward_hook(advance, with_kwargs=True)
    return target


def costly(module: Any, clock: FakeClock, seconds: float) -> None:
    def advance(*_: Any) -> None:
        clock.now += seconds

    module.register_forward_hook(advance)


def record(target: Any, clock: FakeClock, modules: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    recorder = Recorder(clock, {"target": target, **modules})
    clock.now += 7.0  # before the call: nobody's time
    with recorder:
        prompt = random_prompt(PROMPT)
        ids = target.generate(prompt, max_new_tokens=NEW, do_sample=False, streamer=recorder, **kwargs)
    clock.now += 5.0  # after it, too
    return recorder.timing(ids.shape[1] - PROMPT), recorder


def test_plain_decoding_is_one_step_for_each_token_after_the_first(target: Any, clock: FakeClock) -> None:
    timing, _ = record(target, clock, {})
    assert timing.prefill == PREFILL
    assert timing.decode == (NEW - 1) * STEP
    assert (timing.first_tokens, timing.decoded_tokens) == (1, NEW - 1)
    assert timing.tokens_per_second == pytest.approx(1 / STEP)
    assert timing.parts == {"target": (NEW - 1) * STEP, "draft": 0.0, "head": 0.0, "elsewhere": 0.0}


def test_drafting_rounds_are_split_among_draft_target_and_elsewhere(target: Any, clock: FakeClock) -> None:
    depth = 2
    draft = oracle_draft(target, random_prompt(PROMPT), NEW, depth, block_size=BLOCK)
    costly(draft.norm, clock, DRAFT)
    costly(target.get_input_embeddings(), clock, EMBED)  # in the target's forward, and once outside for the block
    clock.now = 0.0
    rounds = (NEW - 1) // (depth + 1)
    timing, recorder = record(target, clock, {"draft": draft}, assistant_model=draft)
    assert timing.prefill == PREFILL + EMBED
    assert timing.parts["target"] == rounds * (STEP + EMBED)
    assert timing.parts["draft"] == rounds * DRAFT
    assert timing.parts["elsewhere"] == rounds * EMBED
    assert timing.decode == sum(timing.parts.values())
    assert timing.tokens_per_second == pytest.approx((NEW - 1) / timing.decode)  # the bonus token is counted once
    assert [width for name, _, _, width in timing.spans if name == "target"] == [BLOCK] * (rounds - 1) + [BLOCK - 1]
    assert not recorder.handles


def test_the_head_is_the_drafts_outside_the_targets_forward_only(target: Any, clock: FakeClock) -> None:
    draft = oracle_draft(target, random_prompt(PROMPT), NEW, 0, block_size=BLOCK)
    head = target.get_output_embeddings()
    costly(head, clock, 1.0)
    clock.now = 0.0
    timing, _ = record(target, clock, {"draft": draft, "head": head}, assistant_model=draft)
    verified = sum(1 for name, *_ in timing.spans if name == "target")
    drafted = sum(1 for name, *_ in timing.spans if name == "draft")
    assert timing.parts["head"] == drafted * 1.0
    assert timing.parts["target"] == verified * (STEP + 1.0)


def test_without_a_streamer_decoding_starts_behind_the_first_forward(target: Any, clock: FakeClock) -> None:
    recorder = Recorder(clock, {"target": target})
    with recorder:
        target.generate(random_prompt(PROMPT), max_new_tokens=NEW, do_sample=False)
    timing = recorder.timing(NEW)
    assert (timing.prefill, timing.decode, timing.decoded_tokens) == (PREFILL, (NEW - 1) * STEP, NEW - 1)


def test_one_token_has_no_decoding_speed(target: Any, clock: FakeClock) -> None:
    recorder = Recorder(clock, {"target": target})
    with recorder:
        target.generate(random_prompt(PROMPT), max_new_tokens=1, do_sample=False, streamer=recorder)
    assert recorder.timing(1).tokens_per_second is None


def test_hooks_are_gone_after_an_error(target: Any, clock: FakeClock) -> None:
    before = len(target._forward_hooks) + len(target._forward_pre_hooks)
    with pytest.raises(RuntimeError, match="stop"), Recorder(clock, {"target": target}):
        raise RuntimeError("stop")
    assert len(target._forward_hooks) + len(target._forward_pre_hooks) == before


def test_nothing_generated_is_an_error(clock: FakeClock) -> None:
    recorder = Recorder(clock, {"target": torch.nn.Linear(1, 1)})
    with recorder:
        pass
    with pytest.raises(ValueError, match="nothing was generated"):
        recorder.timing(0)
