"""From samples to a record's rows: medians over prompts, confidence by bootstrap, and what was left out and why.

A prompt whose plain answer is a loop is in no figure, and one that a method answers with a loop in none of that
method's. Speeds are medians over prompts, so that no single prompt decides; the pooled figures beside them are totals
divided by totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .methods import PLAIN
from .near_tie import WRONG

RESAMPLES = 2000
CONFIDENCE = 0.95
PLACES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # bounds of the places in an answer, in tokens


def build_rows(lines: Sequence[dict[str, Any]], methods: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and method; `methods` are the settings by method name."""
    measured = [line for line in lines if "results" in line]
    tasks = list(dict.fromkeys(line["task"] for line in measured))
    return [
        build_row(task, method, settings, [line for line in measured if line["task"] == task])
        for task in tasks
        for method, settings in methods.items()
    ]


def build_row(task: str, method: str, settings: dict[str, Any], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of a task's measured lines for one method; its fields are described in `record`."""
    kept = [line for line in lines if not is_loop(line, method)]
    mine, plain = ([line["results"][name] for line in kept] for name in (method, PLAIN))
    paired = [(_per_token(a), _per_token(b)) for a, b in zip(plain, mine, strict=True)]
    ratios = [a / b for a, b in paired if a is not None and b is not None]
    speeds = [1 / seconds for seconds in map(_per_token, mine) if seconds is not None]
    outputs = count_outputs(line["results"][method]["comparison"] for line in lines)
    rounds = [length for result in mine for length in result["rounds"]]
    return {
        "task": task,
        "method": method,
        "method_settings": settings,
        "samples": len(kept),
        "samples_repetitive": len(lines) - len(kept),
        "correct": None if outputs["not_compared"] else outputs["wrong"] == 0,
        "outputs": outputs,
        "tokens_per_second": median(speeds),
        "tokens_per_second_ci": bootstrap(speeds, median),
        "tokens_per_second_pooled": _pooled_speed(mine),
        "speedup": median(ratios),
        "speedup_ci": bootstrap(ratios, median),
        "speedup_pooled": _ratio(_pooled_speed(mine), _pooled_speed(plain)),
        "time_to_first_token": median([result["prefill"] for result in mine]),
        "prefill_tokens_per_second": median(
            [line["prompt_tokens"] / line["results"][method]["prefill"] for line in kept]
        ),
        **acceptance(mine, rounds),
        "seconds": _seconds(mine),
        "peak_memory_mib": max((r["peak_memory_mib"] for r in mine if r["peak_memory_mib"] is not None), default=None),
    }


def is_loop(line: dict[str, Any], method: str) -> bool:
    """Whether a line is in no figure of a method: its output, or plain `generate`'s, is a loop."""
    return bool(line["repetitive"] or line["results"][method].get("repetitive"))


def acceptance(results: Sequence[dict[str, Any]], rounds: Sequence[int]) -> dict[str, Any]:
    """How the drafting went: mean, histogram, by place in the block and by place in the answer."""
    if not rounds:
        empty = ("acceptance_length", "acceptance_length_ci", "acceptance_histogram", "by_position", "by_place")
        return dict.fromkeys(empty)
    histogram = [sum(1 for length in rounds if length == n) for n in range(1, max(rounds) + 1)]
    per_prompt = [result["rounds"] for result in results if result["rounds"]]
    return {
        "acceptance_length": sum(rounds) / len(rounds),
        "acceptance_length_ci": bootstrap(
            per_prompt, lambda chosen: _ratio(sum(map(sum, chosen)), sum(map(len, chosen)))
        ),
        "acceptance_histogram": histogram,
        "by_position": [sum(histogram[n:]) / len(rounds) for n in range(1, len(histogram))],
        "by_place": by_place(results),
    }


def by_place(results: Iterable[dict[str, Any]]) -> list[list[float]]:
    """Acceptance length by where in the answer a round started: [first, last, mean, rounds] for each place."""
    lengths: dict[int, list[int]] = {}
    for result in results:
        start = result["first_tokens"]
        for length in result["rounds"]:
            lengths.setdefault(max(i for i, bound in enumerate(PLACES) if bound <= start), []).append(length)
            start += length
    bounds = [*PLACES[1:], 1 << 30]
    return [[PLACES[i], bounds[i] - 1, sum(lengths[i]) / len(lengths[i]), len(lengths[i])] for i in sorted(lengths)]


def count_outputs(comparisons: Iterable[dict[str, Any] | None]) -> dict[str, int]:
    """How many outputs were identical to plain `generate`'s, and how many were not and why."""
    counts = {"identical": 0, "near_tie": 0, "wrong": 0, "not_compared": 0}
    for comparison in comparisons:
        counts["not_compared" if comparison is None else comparison["verdict"]] += 1
    return counts


def build_flags(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every output that is not plain `generate`'s, and every output that is a loop."""
    flags = []
    for line in lines:
        where = {name: line[name] for name in ("task", "index", "turn")}
        if "results" not in line:
            flags.append({**where, "kind": "skipped", "reason": line["skipped"]})
            continue
        if line["repetitive"]:
            flags.append({**where, "kind": "repetitive"})
        for method, result in line["results"].items():
            if result.get("repetitive") and not line["repetitive"]:
                flags.append({**where, "kind": "repetitive", "method": method})
            comparison = result["comparison"]
            if comparison is not None and comparison["verdict"] != "identical":
                flags.append({**where, "kind": comparison["verdict"], "method": method, **comparison})
    return sorted(flags, key=lambda flag: flag["kind"] != WRONG)


def median(values: Sequence[float]) -> float | None:
    """The median; `None` of nothing."""
    import statistics

    return statistics.median(values) if values else None


def bootstrap(values: Sequence[Any], statistic: Callable[[Sequence[Any]], float | None]) -> list[float] | None:
    """A 95 % interval of a statistic over prompts, by resampling them; `None` of fewer than two."""
    if len(values) < 2:
        return None
    import numpy as np

    rng = np.random.default_rng(0)
    draws = rng.integers(len(values), size=(RESAMPLES, len(values)))
    found = [statistic([values[i] for i in draw]) for draw in draws]
    edges = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    return [float(edge) for edge in np.quantile(np.array(found, dtype=float), edges)]


def _per_token(result: dict[str, Any]) -> float | None:
    """Seconds per decoded token; `None` if the prefill's tokens were all."""
    return result["decode"] / result["decoded_tokens"] if result["decoded_tokens"] and result["decode"] > 0 else None


def _pooled_speed(results: Sequence[dict[str, Any]]) -> float | None:
    return _ratio(sum(r["decoded_tokens"] for r in results), sum(r["decode"] for r in results))


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _seconds(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("draft", "head", "target", "elsewhere")
    totals = {name: sum(result["parts"][name] for result in results) for name in names}
    return {"prefill": sum(result["prefill"] for result in results), **totals}


__all__ = ["bootstrap", "build_flags", "build_row", "build_rows", "by_place", "is_loop", "median"]
