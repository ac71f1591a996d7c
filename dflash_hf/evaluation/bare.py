"""Forward passes of the target and nothing around them: what a round's verification would cost in a loop that is free.

A pass reads some tokens behind a text and drops them again, as a verification does whose candidates are all refused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

REPEATS = 15
REPEATS_BESIDE = 5  # beside every prompt of a benchmark, which add up
MOST_WIDTHS = 8  # to time; between them the cost of a width is interpolated


def clock_of(target: Any) -> Callable[[], float]:
    """Seconds; on a GPU once the device has caught up."""
    if target.device.type != "cuda":
        return time.perf_counter
    import torch

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


def bare_forwards(
    target: Any, text_ids: Sequence[int], widths: Iterable[int], repeats: int = REPEATS
) -> dict[int, float]:
    """Seconds of the target's forward of each width (tokens) behind a text.

    Args:
        target: The target.
        text_ids: What the pass reads on from.
        widths: One or more; at most 8 of them are timed.
        repeats: Of each, of which the median counts.
    """
    import numpy as np

    wanted = sorted(set(widths))
    places = np.linspace(0, len(wanted) - 1, MOST_WIDTHS).round().astype(int)
    timed = [wanted[place] for place in np.unique(places)]
    seconds = time_forwards(target, _with_room(target, text_ids, wanted[-1]), timed, repeats)
    return {width: float(np.interp(width, timed, seconds)) for width in wanted}


def _with_room(target: Any, text_ids: Sequence[int], width: int) -> list[int]:
    """As much of a text as leaves the target positions for `width` more tokens."""
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return list(text_ids if context is None else text_ids[: max(1, context - width)])


def mean_over(widths: Sequence[int], seconds: dict[int, float]) -> float:
    """The mean seconds of passes that had these widths."""
    return statistics.fmean(seconds[width] for width in widths)


def time_forwards(target: Any, text_ids: list[int], widths: Sequence[int], repeats: int = REPEATS) -> list[float]:
    """The median seconds of some forwards of each width (tokens) behind a text; every width is timed."""
    import copy

    import torch
    from transformers import DynamicCache

    from ..generation.compat import CACHE_KEY

    now = clock_of(target)
    cache = DynamicCache(config=target.config)
    input_ids = torch.tensor([text_ids], device=target.device)
    is_recurrent = getattr(target, "_is_stateful", False)
    if not is_recurrent:
        cache.activate_past_recording()
    medians = []
    with torch.inference_mode():  # as the loop runs where it may
        target(input_ids, **{CACHE_KEY: cache}, use_cache=True)
        for width in widths:
            block = input_ids[:, -1:].expand(-1, width).contiguous()
            seconds = []
            for _ in range(repeats):
                used = copy.deepcopy(cache) if is_recurrent else cache  # whose states cannot be taken back
                start = now()
                target(block, **{CACHE_KEY: used}, use_cache=True)
                seconds.append(now() - start)
                if not is_recurrent:
                    cache.crop(-width)
            medians.append(statistics.median(seconds))
    return medians


__all__ = ["bare_forwards", "clock_of", "mean_over", "time_forwards"]
