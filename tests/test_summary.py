"""From samples to figures, against figures worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dflash_hf.evaluation.limits import bare_verifications, best_possible
from dflash_hf.evaluation.repetition import is_repetitive, longest_repeat
from dflash_hf.evaluation.summary import bootstrap, build_flags, build_rows, by_place, median

METHODS: dict[str, dict[str, Any]] = {"plain": {}, "dflash": {"draft_tree_budget": 0}}


def result(
    decode: float, decoded: int, rounds: tuple[int, ...] = (), verdict: str = "identical", **parts: float
) -> Any:
    parts = {"draft": 0.0, "head": 0.0, "target": decode, "elsewhere": 0.0} | parts
    return {
        "tokens": list(range(decoded + 1)),
        "prefill": 0.5,
        "decode": decode,
        "parts": parts,
        "first_tokens": 1,
        "decoded_tokens": decoded,
        "rounds": list(rounds),
        "peak_memory_mib": 100.0,
        "comparison": {"verdict": verdict},
    }


def line(index: int, plain: Any, draft: Any, repetitive: bool = False, task: str = "t") -> dict[str, Any]:
    results = {"plain": plain, "dflash": draft}
    where = {"task": task, "index": index, "turn": 0}
    return {**where, "prompt_tokens": 50, "repetitive": repetitive, "results": results}


LINES = [
    line(0, result(12.0, 12), result(4.0, 12, (3, 3, 3, 3))),  # 1 s a token; 3 times as fast
    line(1, result(12.0, 12), result(6.0, 12, (2, 2, 2, 2, 2, 2))),  # twice
    line(2, result(24.0, 12), result(6.0, 12, (4, 4, 4))),  # 4 times
    line(3, result(10.0, 10), result(0.1, 10, (8, 2)), repetitive=True),
]


def rows() -> tuple[dict[str, Any], dict[str, Any]]:
    plain, chain = build_rows(LINES, METHODS)
    return plain, chain


def test_speeds_are_medians_over_prompts_that_are_no_loops() -> None:
    plain, chain = rows()
    assert (plain["speedup"], chain["speedup"]) == (1.0, pytest.approx(3.0))
    assert chain["tokens_per_second"] == pytest.approx(2.0)  # of 3, 2 and 2
    assert chain["speedup_pooled"] == pytest.approx(48 / 16)
    assert chain["samples"] == 3 and chain["samples_repetitive"] == 1
    assert chain["prefill_tokens_per_second"] == 100.0


def test_acceptance_is_over_all_rounds_with_its_histogram_and_positions() -> None:
    _, chain = rows()
    assert chain["acceptance_length"] == pytest.approx(36 / 13)
    assert chain["acceptance_histogram"] == [0, 6, 4, 3]
    assert chain["by_position"] == pytest.approx([13 / 13, 7 / 13, 3 / 13])


def test_acceptance_by_place_counts_where_a_round_starts() -> None:
    found = by_place([result(1.0, 40, (15, 8, 8, 9))])
    # Rounds start behind 1, 16, 24 and 32 tokens; the places are 0 to 15, 16 to 31 and 32 to 63.
    assert found == [[0, 15, 15.0, 1], [16, 31, 8.0, 2], [32, 63, 9.0, 1]]


def test_a_wrong_output_makes_the_row_incorrect_and_comes_first_among_the_flags() -> None:
    lines = [*LINES, line(4, result(1.0, 1), result(1.0, 1, (1,), verdict="wrong"))]
    _, chain = build_rows(lines, METHODS)
    assert chain["correct"] is False
    assert chain["outputs"] == {"identical": 4, "near_tie": 0, "wrong": 1, "not_compared": 0}
    kinds = [flag["kind"] for flag in build_flags(lines)]
    assert kinds == ["wrong", "repetitive"]


def test_a_near_tie_is_counted_and_is_not_wrong() -> None:
    lines = [line(0, result(1.0, 1), result(1.0, 1, (1,), verdict="near_tie"))]
    _, chain = build_rows(lines, METHODS)
    assert chain["correct"] is True and chain["outputs"]["near_tie"] == 1


def test_an_output_that_loops_where_plain_does_not_is_in_no_figure_of_its_method() -> None:
    looping = line(4, result(12.0, 12), result(0.1, 12, (12,)))
    looping["results"]["dflash"]["repetitive"] = True
    plain, chain = build_rows([*LINES, looping], METHODS)
    assert (plain["samples"], chain["samples"], chain["samples_repetitive"]) == (4, 3, 2)
    assert chain["speedup"] == pytest.approx(3.0) and chain["acceptance_length"] == pytest.approx(36 / 13)
    assert [flag.get("method") for flag in build_flags([looping])] == ["dflash"]


def test_only_loops_leave_a_row_without_figures() -> None:
    _, chain = build_rows([LINES[3]], METHODS)
    assert chain["samples"] == 0 and chain["tokens_per_second"] is None and chain["acceptance_length"] is None
    assert best_possible(build_rows([LINES[3]], METHODS)) == []


def test_interval_contains_the_median_and_narrows_with_more_prompts() -> None:
    draw = random.Random(0)
    few, many = ([draw.gauss(10.0, 2.0) for _ in range(n)] for n in (10, 400))
    widths = []
    for values in (few, many):
        low, high = bootstrap(values, median)
        assert low <= median(values) <= high
        widths.append(high - low)
    assert widths[1] < widths[0] / 3  # as one over the root of the number
    assert bootstrap([1.0], median) is None


def test_best_possible_is_the_formula() -> None:
    """acceptance x plain step / (draft + head + verification), worked out by hand."""
    parts = {"draft": 1.0, "head": 0.5, "target": 2.5, "elsewhere": 1.0}
    lines = [line(0, result(12.0, 12), result(5.0, 12, (3, 3, 3, 3), **parts))]
    (best,) = best_possible(build_rows(lines, METHODS))
    assert best["plain_step"] == 1.0
    assert best["best_speedup"] == pytest.approx(3.0 * 1.0 / (0.25 + 0.125 + 0.625))
    assert best["overhead_share"] == pytest.approx(0.2)
    assert best["speedup"] == pytest.approx(12 / 5) and best["reached"] == pytest.approx(0.8)


def test_best_possible_takes_the_bare_verification_where_there_is_one() -> None:
    parts = {"draft": 1.0, "head": 0.5, "target": 2.5, "elsewhere": 1.0}
    rows = build_rows([line(0, result(12.0, 12), result(5.0, 12, (3, 3, 3, 3), **parts))], METHODS)
    (best,) = best_possible(rows, {("t", "dflash"): 0.375})
    assert best["best_speedup"] == pytest.approx(3.0 * 1.0 / (0.25 + 0.125 + 0.375))
    assert best["overhead_share"] == pytest.approx(0.2) and best["bare_verification"] == 0.375


def test_bare_verifications_are_those_of_each_prompts_own_minute() -> None:
    """On a machine that gets twice as slow on the way, by hand; loops count for naught."""

    def measured(index: int, widths: list[int], bare: dict[str, float], **more: Any) -> dict[str, Any]:
        drafted = result(5.0, 12, (3,) * len(widths)) | {"widths": widths}
        return line(index, result(12.0, 12) | {"widths": [1]}, drafted, **more) | {"bare": bare}

    lines = [
        measured(0, [4, 4, 2], {"2": 0.2, "4": 0.4}),
        measured(1, [4], {"4": 0.8}),
        measured(2, [4], {"4": 100.0}, repetitive=True),
    ]
    expected = (0.4 + 0.4 + 0.2 + 0.8) / 4
    assert bare_verifications(lines, METHODS) == {("t", "dflash"): pytest.approx(expected)}
    assert bare_verifications(lines[2:], METHODS) == {}


LIST = [token for item in range(30) for token in (1, 100 + item, 200 + item, 300 + item, 2)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (list(range(100)), False),
        ([5] * 100, True),
        ([*range(60), *[7, 8, 9] * 20], True),
        ([*range(200), *[7, 8, 9] * 20], False),  # a refrain in a long text
        ([*range(60), *range(20), *range(20)], False),  # twice is no loop
        ([*range(40), *list(range(500, 520)) * 3], True),
        (list(range(80)) * 12, True),  # a long period
        (LIST, False),
        ([4, 4, 4, 4, 4], False),
        ([], False),
    ],
)
def test_loops_are_told_from_lists_and_refrains(tokens: list[int], expected: bool) -> None:
    assert is_repetitive(tokens) is expected


def test_longest_repeat_is_the_length_of_the_loop() -> None:
    assert longest_repeat([*range(10), *[50, 51, 52, 53] * 5, 99]) == 20
