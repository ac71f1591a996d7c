"""A round's time, taken apart: every moment belongs to the innermost of the parts that are running."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PYTHON = "Python between them"
PARTS = (
    "choosing candidates",
    "draft forward",
    "head",
    "verification inputs",
    "verification forward",
    "acceptance",
    "cache and states",
    "committing tokens",
    PYTHON,
)
FORWARDS = ("draft forward", "head", "verification forward")


@dataclass
class RoundTime:
    """The slices of one round as (part, start, end), seconds from the round's start, in order and without gaps."""

    slices: list[tuple[str, float, float]] = field(default_factory=list)
    width: int = 0

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return self.slices[-1][2]

    def seconds(self, part: str) -> float:
        """Seconds of a part."""
        return sum(end - start for name, start, end in self.slices if name == part)


class Stopwatch:
    """Splits the rounds of a decoding loop into parts.

    Args:
        now: Seconds. On a GPU it must wait for the device first, which makes rounds a little slower than unwatched.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self.rounds: list[RoundTime] = []
        self.stack: list[str] = []
        self.since = 0.0

    @contextmanager
    def watching(self, loop: Any) -> Iterator[None]:
        """Watch a `DecodingLoop`."""
        draft, target = loop.drafter.draft, loop.target
        self._wrap(loop, "_round", None)
        self._wrap(loop, "_accept", "acceptance")
        self._wrap(loop, "_commit", "committing tokens")
        self._wrap(loop.proposer, "propose", "choosing candidates")
        self._wrap(loop.runner, "verify", "verification inputs")
        for owner, name in ((loop.runner, "keep"), (loop.runner, "taps"), (loop.drafter, "observe")):
            self._wrap(owner, name, "cache and states")
        restore_head = self._wrap(draft, "compute_logits", "head")
        handles = []
        for module, part in ((draft, "draft forward"), (target, "verification forward")):
            handles.append(module.register_forward_pre_hook(self._enter_hook(part), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave_hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            restore_head()
            self.stack.clear()

    def _wrap(self, owner: Any, name: str, part: str | None) -> Callable[[], None]:
        """Charge calls of a method to a part, `None`: begin a round with them. Returns what undoes it."""
        original, had_its_own = getattr(owner, name), name in vars(owner)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if part is None:
                self._begin_round()
            elif not self.stack:  # the prefill belongs to no round
                return original(*args, **kwargs)
            else:
                self._enter(part)
            try:
                return original(*args, **kwargs)
            finally:
                self._leave()

        setattr(owner, name, wrapper)
        return lambda: setattr(owner, name, original) if had_its_own else delattr(owner, name)

    def _enter_hook(self, part: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if self.stack and part == "verification forward":
                self.rounds[-1].width = kwargs["input_ids"].shape[1]
            self._enter(part)

        hook.keeps_no_tensors = True  # type: ignore[attr-defined]  # being watched must not change how a call runs
        return hook

    def _leave_hook(self, module: Any, args: Any, output: Any) -> None:
        self._leave()

    _leave_hook.keeps_no_tensors = True  # type: ignore[attr-defined]

    def _begin_round(self) -> None:
        self.rounds.append(RoundTime())
        self.stack = [PYTHON]
        self.since = self.start = self.now()

    def _enter(self, part: str) -> None:
        if self.stack:
            self._charge()
            self.stack.append(part)

    def _leave(self) -> None:
        if self.stack:
            self._charge()
            self.stack.pop()

    def _charge(self) -> None:
        """The time since the last change belongs to the part on top."""
        now = self.now()
        self.rounds[-1].slices.append((self.stack[-1], self.since - self.start, now - self.start))
        self.since = now

    def means(self) -> dict[str, float]:
        """Seconds of each part in a round, the mean over rounds: they add up to the mean round."""
        return {part: statistics.fmean(each.seconds(part) for each in self.rounds) for part in PARTS}

    def typical(self) -> RoundTime:
        """The round of median length."""
        return sorted(self.rounds, key=lambda each: each.total)[len(self.rounds) // 2]


__all__ = ["FORWARDS", "PARTS", "RoundTime", "Stopwatch"]
