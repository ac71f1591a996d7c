"""How fast it could be: the speed-up of a loop that spends time in the two models' forward passes only.

    best = acceptance length x plain step / (draft + head + verification)

The plain step is what plain `generate` takes for a token while decoding. Draft and head are the mean forward passes
of a round, as they were measured inside the loop; the verification is a bare forward of the target (`bare`), timed
outside of any loop at the widths that the rounds had, beside every prompt: a machine is not as fast at the end of a
long run as it was in its middle. What was not reached of it is what all the rest costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from .summary import is_loop


def bare_verifications(lines: Sequence[dict[str, Any]], methods: Sequence[str]) -> dict[tuple[str, str], float]:
    """Seconds of a bare verification by task and method, the mean over the widths of the target's forwards.

    Args:
        lines: Of the samples' log, measured ones.
        methods: Names.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for method in methods:
            result = line["results"][method]
            if result["rounds"] and not is_loop(line, method):
                passes = [line["bare"][str(width)] for width in result["widths"]]
                seconds.setdefault((line["task"], method), []).extend(passes)
    return {key: statistics.fmean(found) for key, found in seconds.items() if found}


def best_possible(
    rows: list[dict[str, Any]], verifications: dict[tuple[str, str], float] | None = None
) -> list[dict[str, Any]]:
    """For each row that drafts: the parts of the formula, the best speed-up, and the share of it that was reached.

    Speeds here are pooled, as the parts are.

    Args:
        rows: See `summary`.
        verifications: Seconds of a bare verification by task and method; those inside the loop where there is none.
    """
    found = []
    for row in rows:
        speed, speedup, accepted = row["tokens_per_second_pooled"], row["speedup_pooled"], row["acceptance_length"]
        if not speed or not speedup or not accepted or not row["acceptance_histogram"]:
            continue
        rounds = sum(row["acceptance_histogram"])
        per_round = {name: seconds / rounds for name, seconds in row["seconds"].items() if name != "prefill"}
        in_loop = per_round["draft"] + per_round["head"] + per_round["target"]
        bare = (verifications or {}).get((row["task"], row["method"]))
        passes = per_round["draft"] + per_round["head"] + (per_round["target"] if bare is None else bare)
        plain_step = speedup / speed  # on the same prompts
        best = accepted * plain_step / passes if passes else None
        found.append(
            {
                "task": row["task"],
                "method": row["method"],
                "acceptance_length": accepted,
                "plain_step": plain_step,
                **{f"{name}_per_round": seconds for name, seconds in per_round.items()},
                "bare_verification": bare,
                "overhead_share": per_round["elsewhere"] / (in_loop + per_round["elsewhere"]),
                "best_speedup": best,
                "speedup": speedup,
                "reached": speedup / best if best else None,
            }
        )
    return found


__all__ = ["bare_verifications", "best_possible"]
