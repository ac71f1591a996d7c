"""Adaptive width: each round verifies what pays, drafting pauses where nothing does, and no clock where runs repeat.

Shapes: B batch, K block, V vocabulary, N new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparing import assert_same_text, generate_both, shared_target
from dflash_hf.generation import costs as costs_module
from dflash_hf.generation.costs import USUAL_COSTS
from dflash_hf.generation.drafting import Drafter
from dflash_hf.generation.policy import FIRST_PAUSE, LONGEST_PAUSE, SPARE, WidthPolicy, chain_chances
from dflash_hf.generation.target_runner import TargetRunner
from helpers import greedy, left_padded, random_prompt, tiny_draft
from oracle import oracle_draft
from test_generate_sampling import exact_distribution, p_value, sampled, tiny_pair

FREE = (0.0, 0.0)


def automatic(draft: Any, mode: str, costs: tuple[float, float] | None = None) -> Any:
    """The draft, set to choose its width in each round."""
    if mode == "chain":
        draft.generation_config.num_assistant_tokens_schedule = "auto"
    else:
        draft.generation_config.draft_tree_budget = "auto"
    draft.generation_config.draft_costs = costs
    return draft


# --- the policy, alone -----------------------------------------------------------------------------------------------


def played(policy: WidthPolicy, kinds: list[list[float]], rounds: int) -> list[list[int]]:
    """The widths chosen for each kind of block, in turn; what is promised is what stands."""
    widths: list[list[int]] = [[] for _ in kinds]
    for number in range(rounds):
        chances = kinds[number % len(kinds)]
        width = policy.choose(chances) if policy.wants_draft() else None
        if width is not None:
            widths[number % len(kinds)].append(width)
        policy.learn(chances[: width or 0], sum(chances[: width or 0]), (width or 0) + 1)
    return widths


descending = st.lists(st.floats(0, 1), min_size=1, max_size=6).map(lambda values: sorted(values, reverse=True))


@settings(max_examples=200)
@given(kinds=st.lists(descending, min_size=1, max_size=3), draft_cost=st.floats(0, 1), step_cost=st.floats(0, 1))
def test_widths_are_the_best_of_all_widths(kinds: list[list[float]], draft_cost: float, step_cost: float) -> None:
    """Brute force over a width for every kind of block: the most tokens for their cost, or no drafting at all."""
    policy = WidthPolicy((draft_cost, step_cost))
    chosen = [widths[-1] for widths in played(policy, kinds, 120) if widths]

    def rate(widths: Sequence[int]) -> float:
        tokens = sum(1 + sum(chances[:width]) for chances, width in zip(kinds, widths, strict=True))
        return tokens / sum(1 + draft_cost + step_cost * width for width in widths)

    best = max(rate(widths) for widths in product(*(range(len(chances) + 1) for chances in kinds)))
    if best > 1.05 and policy.pause == 0:
        assert rate(chosen) > 0.97 * best
    if best < 0.95:
        assert policy.next_pause > FIRST_PAUSE, "drafting does not pay"


def test_width_has_its_closed_form() -> None:
    """Chances p^k: candidate k pays while p^k > r c, at the rate r of the best width."""
    chances = [0.5**k for k in range(1, 9)]
    for cost in (0.01, 0.05, 0.1, 0.15):
        rate = max((2 - 0.5**width) / (1 + cost * width) for width in range(9))
        width = sum(chance > rate * cost for chance in chances)
        assert played(WidthPolicy((0.0, cost)), [chances], 120)[0][-1] == width > 0
    assert WidthPolicy((0.0, 0.6)).choose(chances) == 0
    assert WidthPolicy(FREE).choose(chances) == 8


def test_one_weak_block_is_no_reason_to_pause() -> None:
    """Half of the blocks promise nothing; the others pay for both."""
    strong, weak = played(WidthPolicy(USUAL_COSTS), [[0.9] * 7, [0.0] * 7], 100)
    assert len(strong) == len(weak) == 50
    assert set(strong) == {7}
    assert set(weak) == {0}


def test_useless_draft_is_asked_ever_more_rarely() -> None:
    policy = WidthPolicy(USUAL_COSTS)
    gaps, gap = [], 0
    for _ in range(400):
        if policy.wants_draft():
            gaps.append(gap)
            gap = 0
            assert policy.choose([0.0] * 7) == 0
            policy.learn([], 0.0, 1)
        else:
            gap += 1
            policy.learn([], 0.0, 1)
    assert gaps[:8] == [0, 4, 8, 16, 32, 64, 64, 64]
    assert LONGEST_PAUSE == 64


def rounds_drafted(policy: WidthPolicy, chances: list[float], accepted: Any, rounds: int) -> list[bool]:
    """Play rounds in which `accepted(width)` candidates stand."""
    drafted = []
    for _ in range(rounds):
        width = policy.choose(chances) if policy.wants_draft() else 0
        drafted.append(policy.was_drafted)
        policy.learn(chances[:width], accepted(width), width + 1)
    return drafted


def test_what_was_seen_before_a_pause_weighs_less_behind_it() -> None:
    """A text that was hard to guess has become easy: drafting goes on at once when it is tried again."""
    policy = WidthPolicy(USUAL_COSTS)
    hard = rounds_drafted(policy, [0.05] * 7, lambda width: 0, 100)
    assert sum(hard[20:]) < 8
    easy = rounds_drafted(policy, [0.9**k for k in range(1, 8)], lambda width: width, 2 * LONGEST_PAUSE)
    assert sum(easy) > LONGEST_PAUSE // 2
    first = easy.index(True)
    assert all(easy[first:])


def test_batch_scores_few_more_candidates_than_it_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head runs on every slot of every row, which is dear in a batch and next to nothing for one row."""
    target, prompts = shared_target(), random_prompt(9, batch_size=3)
    scored: list[int] = []
    original = Drafter.block_logits

    def counted(self: Any, *args: Any) -> torch.Tensor:
        logits = original(self, *args)
        scored.append(logits.shape[1])
        return logits

    monkeypatch.setattr(Drafter, "block_logits", counted)
    for rows in (prompts, prompts[:1]):
        draft = automatic(oracle_draft(target, rows, 80, 1, block_size=16), "chain", (0.05, 0.2))
        scored.clear()
        output = target.generate(rows, assistant_model=draft, max_new_tokens=80, do_sample=False)
        assert output.tolist() == greedy(target, rows, 80).tolist()
        assert scored[0] == 15
        if len(rows) > 1:
            assert max(scored[20:]) <= 2 + SPARE
        else:
            assert min(scored[:-15]) == 15


def test_boastful_draft_is_found_out_and_an_honest_one_comes_back() -> None:
    policy = WidthPolicy(USUAL_COSTS)
    boast = rounds_drafted(policy, [0.9] * 7, lambda width: 0, 300)
    assert all(boast[:3])
    assert sum(boast[100:]) < 8
    recovered = rounds_drafted(policy, [0.9] * 7, lambda width: width, 2 * LONGEST_PAUSE)
    assert sum(recovered[LONGEST_PAUSE + 1 :]) > LONGEST_PAUSE // 2
    assert all(rounds_drafted(policy, [0.9] * 7, lambda width: width, 20))


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def perf_counter(self) -> float:
        """Now."""
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock()
    monkeypatch.setattr(costs_module, "time", fake)
    yield fake


@pytest.mark.parametrize(("one", "step", "draft"), [(1.0, 0.3, 0.1), (0.02, 0.0002, 0.004), (1.0, 0.02, 0.9)])
def test_costs_are_those_that_the_clock_shows(clock: FakeClock, one: float, step: float, draft: float) -> None:
    """A verification of width w takes `one + step * (w - 1)` seconds; the widths vary, so there is a line to find."""
    policy = WidthPolicy()
    for round_number in range(60):
        policy.wants_draft()
        policy.pause = 0
        clock.time += draft
        policy.choose([0.5] * 15)
        width = 1 + round_number * 7 % 16
        clock.time += one + step * (width - 1)
        policy.learn([0.5] * (width - 1), (width - 1) / 2, width)
    costs = policy.costs.relative
    assert costs.premium == pytest.approx(0, abs=0.01)
    assert costs.draft == pytest.approx(draft / one, rel=0.01)
    assert costs.step == pytest.approx(step / one, rel=0.01)


def test_machine_that_is_slow_now_and_then_has_the_same_costs(clock: FakeClock) -> None:
    """Every seventh round takes four times as long, and now and then one takes half: others use the machine, too."""
    policy, seen = WidthPolicy(), []
    for round_number in range(200):
        factor = 4.0 if round_number % 7 == 3 else 0.5 if round_number % 31 == 5 else 1.0
        width = 0
        if policy.wants_draft(16):
            clock.time += 0.2 * factor
            policy.choose([0.5] * 7)
            width = (0, 3, 5, 7)[round_number % 4]
        policy.pause = 0
        clock.time += (1.0 + 0.03 * width) * factor
        policy.learn([0.5] * width, width / 2, width + 1)
        seen.append(policy.costs.relative)
    assert {round(costs.draft, 3) for costs in seen[20:]} == {0.2}


def test_batch_whose_rows_must_be_moved_for_any_candidate_goes_undrafted(clock: FakeClock) -> None:
    """A line through widths of two and more does not tell what a round without candidates is spared."""
    policy = WidthPolicy()
    drafted = []
    for _ in range(200):
        width = 0
        if policy.wants_draft(16):
            clock.time += 0.2
            width = policy.choose([0.5**k for k in range(1, 8)])
        drafted.append(width > 0)
        clock.time += 1.0 + (1.2 + 0.05 * width if width else 0.0)
        policy.learn([0.5**k for k in range(1, width + 1)], 1 - 0.5**width, width + 1)
    assert not any(drafted[:2]), "the first rounds show what one token takes"
    assert sum(drafted) < 10
    width = policy.choose([0.5**k for k in range(1, 8)]) if policy.wants_draft(8) else None
    assert width is None, "half the rows: measured anew"


@pytest.mark.parametrize("step", [0.001, 0.5])
def test_measured_widths_follow_the_cost(clock: FakeClock, step: float) -> None:
    """Where a position is nearly free all are verified; where it costs half a forward, only those that are likely.

    The draft always says the same, so the policy must try other widths by itself to learn what a position costs.
    """
    policy = WidthPolicy()
    chances = [0.8**k for k in range(1, 16)]
    widths = []
    for _ in range(80):
        width = 0
        if policy.wants_draft():
            clock.time += 0.01
            width = policy.choose(chances)
            widths.append(width)
        clock.time += 1 + step * width
        policy.learn(chances[:width], sum(chances[:width]), width + 1)
    rates = [(1 + sum(chances[:width])) / (1 + step * width) for width in range(16)]
    assert len(widths) > 10
    late = [rates[width] for width in widths[20:]]
    assert sorted(late)[len(late) // 2] > 0.99 * max(rates)
    assert sum(late) / len(late) > 0.97 * max(rates)


def test_drafting_that_cannot_pay_is_given_up_by_the_clock(clock: FakeClock) -> None:
    """Half a forward for each position, and every other candidate wrong: no width is as fast as none."""
    policy = WidthPolicy()
    tokens, start = 0.0, clock.time
    for _ in range(300):
        width = 0
        if policy.wants_draft():
            clock.time += 0.01
            width = policy.choose([0.5**k for k in range(1, 16)])
        clock.time += 1 + 0.5 * width
        accepted = sum(0.5**k for k in range(1, width + 1))
        tokens += 1 + accepted
        policy.learn([0.5**k for k in range(1, width + 1)], accepted, width + 1)
    assert tokens / (clock.time - start) > 0.98  # of the target alone, which makes one a second


def test_chances_of_a_chain_are_products_of_the_largest_probabilities() -> None:
    scores = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.5, 0.4]], [[0.3, 0.3, 0.4], [0.9, 0.05, 0.05]]]).log()
    assert chain_chances(scores, [0, 1]) == pytest.approx([(0.7 + 0.4) / 2, (0.7 * 0.5 + 0.4 * 0.9) / 2])


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [None, USUAL_COSTS, FREE, (0.0, 0.4)], ids=str)
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_text_is_the_targets_own_at_any_cost(mode: str, costs: tuple[float, float] | None) -> None:
    target = shared_target()
    prompt = random_prompt(9)
    for depth in (0, 3):
        draft = automatic(oracle_draft(target, prompt, 30, depth, block_size=6), mode, costs)
        assert_same_text(target, draft, prompt, 30)
    inputs = left_padded([random_prompt(length, seed=length)[0] for length in (3, 9, 6)])
    mask = inputs["attention_mask"]
    draft = automatic(oracle_draft(target, inputs["input_ids"], 30, [0, 3, 2], attention_mask=mask), mode, costs)
    output = target.generate(**inputs, assistant_model=draft, max_new_tokens=30, do_sample=False)
    for row, padding in zip(output, (6, 0, 3), strict=True):
        alone = greedy(target, row[padding:9][None], 30)[0]
        assert row[padding:].tolist() == alone.tolist()


def widths_of(target: Any, draft: Any, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Any:
    """The width of every verification, and the output."""
    widths: list[int] = []
    original = TargetRunner.verify

    def verify(runner: Any, block_ids: torch.Tensor, tree: Any = None) -> Any:
        widths.append(block_ids.shape[1])
        return original(runner, block_ids, tree)

    with monkeypatch.context() as patch:
        patch.setattr(TargetRunner, "verify", verify)
        output, _ = generate_both(target, draft, prompt, 60, **kwargs)
    return widths, output


def test_good_draft_is_used_and_a_useless_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = shared_target(), random_prompt(9)
    good = automatic(oracle_draft(target, prompt, 60, 5, block_size=6), "chain", USUAL_COSTS)
    widths, output = widths_of(target, good, prompt, monkeypatch)
    assert set(widths[:-1]) == {6}
    assert set(output.acceptance_lengths[0][:-1]) == {6}
    useless = automatic(oracle_draft(target, prompt, 60, 0, block_size=6), "chain", USUAL_COSTS)
    widths, _ = widths_of(target, useless, prompt, monkeypatch)
    assert widths.count(1) > 0.8 * len(widths)


def no_clock() -> float:
    raise AssertionError("the clock was read")


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("reason", ["sampling", "deterministic algorithms", "draft_costs", None])
def test_clock_is_not_read_where_a_run_is_to_repeat(
    mode: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs_module, "time", SimpleNamespace(perf_counter=no_clock))
    target, prompt = shared_target(), random_prompt(9)
    draft = automatic(tiny_draft(target, block_size=6), mode, USUAL_COSTS if reason == "draft_costs" else None)
    if reason == "deterministic algorithms":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        if reason is None:
            with pytest.raises(AssertionError, match="the clock was read"):
                widths_of(target, draft, prompt, monkeypatch)
            continue
        widths, output = widths_of(target, draft, prompt, monkeypatch, do_sample=reason == "sampling")
        runs.append((widths, output.sequences.tolist(), output.acceptance_lengths))
    assert reason is None or runs[0] == runs[1]


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_sampled_text_has_the_targets_distribution(mode: str) -> None:
    """The width depends on the draft's distributions and on earlier rounds, never on what was drawn in this one."""
    target, draft = tiny_pair("near")
    expected = exact_distribution(target, top_k=0)
    ids, lengths = sampled(target, automatic(draft, mode, (0.0, 0.25)), 600, 1, top_k=0)
    assert p_value(ids, expected) > 1e-3
    assert {1, 2} <= {count for row in lengths for count in row}
    ids, _ = sampled(target, automatic(draft, mode), 2500, 250, top_k=0)
    assert p_value(ids, expected) > 1e-3


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 1.5, "many", [16]])
def test_wrong_tree_budget_is_refused(value: Any) -> None:
    target = shared_target()
    draft = tiny_draft(target)
    draft.generation_config.draft_tree_budget = value
    with pytest.raises(ValueError, match=r"`draft_tree_budget` must be a number of nodes.*16 to 64 .*'auto'"):
        target.generate(random_prompt(4), assistant_model=draft, max_new_tokens=4)


@pytest.mark.parametrize("value", [0.25, (0.25,), (0.1, 0.2, 0.3), (-0.1, 0.2), ("cheap", 0.2), (0.1, float("nan"))])
def test_wrong_costs_are_refused(value: Any) -> None:
    target = shared_target()
    draft = automatic(tiny_draft(target), "chain", value)
    with pytest.raises(ValueError, match="`draft_costs` must be two numbers"):
        target.generate(random_prompt(4), assistant_model=draft, max_new_tokens=4)
