"""The knobs that `--methods NAME:KEY=VALUE,...` may set, and the values that each takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SCHEDULES = ("constant", "heuristic", "heuristic_transient")  # of Transformers; ours add "auto"


def _is_count(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


Knob = tuple[Callable[[Any], bool], str]
_AT_LEAST_1: Knob = (_is_count(1), "a whole number from 1 up")
_SHARE: Knob = (_is_share, "a probability from 0 to 1")
# The upper bounds are the draft's, and checked once it is there.
DRAFT: dict[str, Knob] = {
    "draft_tree_budget": (lambda value: value == "auto" or _is_count(0)(value), "'auto', or a whole number from 0 up"),
    "num_assistant_tokens": (_is_count(0), "a whole number from 0 up"),
    "num_assistant_tokens_schedule": (lambda value: value in ("auto", *SCHEDULES), f"auto, {', '.join(SCHEDULES)}"),
    "assistant_confidence_threshold": _SHARE,
    "draft_context_length": _AT_LEAST_1,
}
ASSISTANT: dict[str, Knob] = {
    "num_assistant_tokens": _AT_LEAST_1,
    "num_assistant_tokens_schedule": (lambda value: value in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
    "assistant_confidence_threshold": _SHARE,
}
PROMPT_LOOKUP: dict[str, Knob] = {"prompt_lookup_num_tokens": _AT_LEAST_1, "max_matching_ngram_size": _AT_LEAST_1}


def check_knob(flag: str, spec: str, knobs: dict[str, Knob], key: str, value: Any) -> None:
    """Refuse a knob that the method does not have, or a value that the knob does not take.

    Raises:
        ValueError: By the name of the knob.
    """
    if key not in knobs:
        known = f"it has {', '.join(knobs)}" if knobs else "it has none"
        raise ValueError(f"{flag} has {spec!r}, whose method has no knob {key!r}; {known}.")
    is_right, rule = knobs[key]
    if not is_right(value):
        raise ValueError(f"{flag} has {spec!r}, where `{key}` is {value!r}; it must be {rule}.")


__all__ = ["ASSISTANT", "DRAFT", "PROMPT_LOOKUP", "Knob", "check_knob"]
