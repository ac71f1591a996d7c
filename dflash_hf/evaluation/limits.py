"""How fast it could be: the speed-up of a loop that spends time in the two models' forward passes only.

    best = acceptance length x plain step / (draft + head + verification)

The plain step is what plain `generate` takes for a token while decoding; the others are the mean forward passes of a
round, as they were measured inside the loop. What was reached of it is what everything outside of them costs.
"""

from __future__ import annotations

from typing import Any

from .methods import PLAIN


def best_possible(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each row that drafts: the parts of the formula, the best speed-up, and the share of it that was reached.

    Speeds here are pooled, as the parts are.
    """
    plain = {row["task"]: row for row in rows if row["method"] == PLAIN}
    found = []
    for row in rows:
        speed, accepted = plain[row["task"]]["tokens_per_second_pooled"], row["acceptance_length"]
        if not speed or not accepted or not row["acceptance_histogram"]:
            continue
        rounds = sum(row["acceptance_histogram"])
        per_round = {name: seconds / rounds for name, seconds in row["seconds"].items() if name != "prefill"}
        passes = per_round["draft"] + per_round["head"] + per_round["target"]
        best = accepted / speed / passes if passes else None
        found.append(
            {
                "task": row["task"],
                "method": row["method"],
                "acceptance_length": accepted,
                "plain_step": 1 / speed,
                **{f"{name}_per_round": seconds for name, seconds in per_round.items()},
                "overhead_share": per_round["elsewhere"] / (passes + per_round["elsewhere"]),
                "best_speedup": best,
                "speedup": row["speedup_pooled"],
                "reached": row["speedup_pooled"] / best if best and row["speedup_pooled"] else None,
            }
        )
    return found


__all__ = ["best_possible"]
