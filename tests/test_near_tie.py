"""The near-tie check: what rounding explains passes, what it does not is flagged, by replaying the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_hf.evaluation.near_tie import compare, describe, scores_after, tie_gap
from evaluation_helpers import tiny_tokenizer
from helpers import greedy, random_prompt, tiny_target


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target("qwen3", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return random_prompt(7)


@pytest.fixture(scope="module")
def plain(target: Any, prompt: torch.Tensor) -> list[int]:
    return greedy(target, prompt, 12)[0, 7:].tolist()


def test_the_same_tokens_are_identical(target: Any, prompt: torch.Tensor, plain: list[int]) -> None:
    assert compare(target, prompt, plain, plain).verdict == "identical"


def test_two_swapped_tokens_are_flagged_where_they_first_differ(
    target: Any, prompt: torch.Tensor, plain: list[int]
) -> None:
    at = next(i for i in range(3, 11) if plain[i] != plain[i + 1])
    swapped = [*plain]
    swapped[at], swapped[at + 1] = plain[at + 1], plain[at]
    found = compare(target, prompt, plain, swapped)
    scores = target(torch.cat([prompt, torch.tensor([plain[:at]])], 1)).logits[0, -1]
    assert (found.verdict, found.position, found.expected, found.found) == ("wrong", at, plain[at], plain[at + 1])
    assert found.gap == pytest.approx(
        float(scores.detach().max() - scores.detach()[plain[at + 1]]), abs=found.tolerance
    )


def test_the_second_best_token_is_a_near_tie_only_within_the_tolerance(
    target: Any, prompt: torch.Tensor, plain: list[int]
) -> None:
    scores = scores_after(target, prompt, plain[:5])
    second = int(scores.topk(2).indices[1])
    changed = continued(target, prompt, [*plain[:5], second], 12)
    gap = float(scores.max() - scores[second])
    step = compare(target, prompt, plain, changed, tie_steps=1).tolerance
    assert gap > 0
    assert compare(target, prompt, plain, changed, tie_steps=gap / step * 1.01).verdict == "near_tie"
    assert compare(target, prompt, plain, changed, tie_steps=gap / step * 0.99).verdict == "wrong"


def continued(target: Any, prompt: torch.Tensor, taken: list[int], length: int) -> list[int]:
    """What the target alone makes of the new tokens `taken`, `length` tokens in all."""
    prefix = torch.cat([prompt, torch.tensor([taken])], 1)
    return [*taken, *greedy(target, prefix, length - len(taken))[0, prefix.shape[1] :].tolist()]


def test_what_follows_a_near_tie_is_checked_to_the_end(target: Any, prompt: torch.Tensor, plain: list[int]) -> None:
    second = int(scores_after(target, prompt, plain[:2]).topk(2).indices[1])
    found = continued(target, prompt, [*plain[:2], second], 12)
    scores = scores_after(target, prompt, plain[:2])
    step = compare(target, prompt, plain, found, tie_steps=1).tolerance
    steps = float(scores.max() - scores[second]) / step * 1.01  # the smallest tolerance that lets this one pass
    tie = compare(target, prompt, plain, found, tie_steps=steps)
    assert (tie.verdict, tie.position, tie.ties) == ("near_tie", 2, 1)
    worst = int(scores_after(target, prompt, found[:6]).argmin())
    garbage = compare(target, prompt, plain, [*found[:6], worst, *found[7:]], tie_steps=steps)
    assert (garbage.verdict, garbage.position, garbage.expected, garbage.found) == ("wrong", 6, found[6], worst)
    cut = compare(target, prompt, plain, found[:8], generation_config=limited(target, 12), tie_steps=steps)
    assert (cut.verdict, cut.position) == ("wrong", 8)


def limited(target: Any, max_new_tokens: int, **settings: Any) -> Any:
    """The target's generation config with a limit."""
    import copy

    config = copy.deepcopy(target.generation_config)
    config.update(max_new_tokens=max_new_tokens, **settings)
    return config


def test_a_second_near_tie_counts_and_an_end_of_text_at_a_tie_ends_the_check(
    target: Any, prompt: torch.Tensor, plain: list[int]
) -> None:
    found = plain
    for position in (1, 5):
        second = int(scores_after(target, prompt, found[:position]).topk(2).indices[1])
        found = continued(target, prompt, [*found[:position], second], 12)
    tie = compare(target, prompt, plain, found, tie_steps=1e9)
    assert (tie.verdict, tie.position, tie.ties) == ("near_tie", 1, 2)
    assert describe(tie, tiny_tokenizer()).endswith("; from there on they part at 1 more near tie")
    config = limited(target, 12, eos_token_id=[found[1]])
    assert compare(target, prompt, plain, found[:2], generation_config=config, tie_steps=1e9).verdict == "near_tie"
    assert compare(target, prompt, plain, found[:3], generation_config=config, tie_steps=1e9).verdict == "wrong"


@pytest.mark.parametrize("end", [0, 4])
def test_an_output_that_ends_early_or_late_is_wrong(
    target: Any, prompt: torch.Tensor, plain: list[int], end: int
) -> None:
    assert compare(target, prompt, plain, plain[:end]).verdict == "wrong"
    late = compare(target, prompt, plain[:end], plain)
    assert (late.verdict, late.position, late.expected, late.found) == ("wrong", end, None, plain[end])


def test_the_tolerance_is_steps_of_the_dtype_at_the_size_of_the_best_score() -> None:
    scores = torch.tensor([1.0, 20.0, 19.75, 3.0])
    assert tie_gap(scores, (1, 2), torch.bfloat16, 4) == (0.25, 4 * 0.125)  # bfloat16 counts in eighths from 16 to 32
    assert tie_gap(scores, (2, 3), torch.bfloat16, 4)[0] == 17.0  # the worse of the two counts
    assert tie_gap(scores, (1, 2), torch.float32, 4)[1] == pytest.approx(4 * 16 * 2**-23)


def test_the_replay_applies_the_logits_processors_of_the_generation(target: Any, prompt: torch.Tensor) -> None:
    import copy

    config = copy.deepcopy(target.generation_config)
    config.suppress_tokens = [int(scores_after(target, prompt, []).argmax())]
    assert scores_after(target, prompt, [], config)[config.suppress_tokens[0]] == -torch.inf


def test_the_sentence_names_both_tokens_and_the_gap(target: Any, prompt: torch.Tensor, plain: list[int]) -> None:
    tokenizer = tiny_tokenizer()
    wrong = compare(target, prompt, plain, [*plain[:2], (plain[2] + 1) % 64, *plain[3:]])
    sentence = describe(wrong, tokenizer)
    assert sentence.startswith("WRONG: they part at new token 3 (")
    assert repr(tokenizer.decode([plain[2]])) in sentence and "does not explain" in sentence
