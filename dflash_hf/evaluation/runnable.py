"""Which methods can run on a loaded pair: some targets, drafts and generation configs rule some of them out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .methods import Method, Runner, knobs_set

# What z-lab's loop does by itself.
SAMPLING = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")


def runnable(methods: Sequence[Method], are_named: bool, runner: Runner, generation_config: Any) -> list[Method]:
    """The methods that can run; the others are left out, with a line on standard error for each.

    Args:
        methods: What to run.
        are_named: Whether the user asked for these, so that none may be left out.
        runner: What they would run on.
        generation_config: For all of them.

    Raises:
        ValueError: If a method that was asked for cannot run, or a knob is out of the draft's range.
    """
    kept = []
    for method in methods:
        reason = why_not(method, runner, generation_config)
        if reason is None:
            kept.append(method)
        elif are_named:
            raise ValueError(f"The method {method.name!r} cannot run here: {reason}; leave it out of --methods.")
        else:
            print(f"Left out the method {method.name}: {reason}.", file=sys.stderr)
    return kept


def why_not(method: Method, runner: Runner, generation_config: Any) -> str | None:
    """Why a method cannot run on the runner's pair, as part of a sentence; `None` if it can.

    Raises:
        ValueError: If a knob is out of the draft's range.
    """
    target = runner.pair.target
    if is_ours(method):
        from ..generation.settings import DraftSettings

        with knobs_set(runner.pair.draft.generation_config, method.draft_settings):
            DraftSettings.read(runner.pair.draft, generation_config)
        return None
    if not (method.assistant or method.generate_settings):
        return None
    if getattr(target, "_is_stateful", False):
        return f"it cannot take back what the recurrent states of {type(target).__name__} have read"
    return _why_not_zlab(runner, method, generation_config) if method.assistant == "zlab" else None


def is_ours(method: Method) -> bool:
    """Whether a method's rounds are this package's."""
    return method.assistant == "draft" and not method.generate_settings


def _why_not_zlab(runner: Runner, method: Method, generation_config: Any) -> str | None:
    try:
        runner.drafter(method)
    except ValueError as error:
        return f"z-lab's format cannot express this draft ({str(error).rstrip('.')})"
    processors = [name for name in processor_names(runner.pair.target, generation_config) if name not in SAMPLING]
    if processors:
        return f"its loop runs no logits processors, and the target's generation config asks for {processors[0]}"
    return None


def processor_names(target: Any, generation_config: Any) -> list[str]:
    """Class names of the logits processors and warpers that `generate` makes of a generation config."""
    import torch

    names: list[str] = []

    def look(model: Any, input_ids: Any, logits_processor: Any = None, **_: Any) -> Any:
        names.extend(type(each).__name__ for each in logits_processor)
        return input_ids

    input_ids = torch.tensor([[0]], device=target.device)
    mask = torch.ones_like(input_ids)
    target.generate(input_ids, attention_mask=mask, generation_config=generation_config, custom_generate=look)
    return names


__all__ = ["is_ours", "processor_names", "runnable", "why_not"]
