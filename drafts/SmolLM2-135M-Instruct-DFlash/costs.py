"""What drafting and verifying cost, relative to the target's forward of one token: given, or measured with a clock."""

import statistics
import time
from collections import deque
from dataclasses import dataclass

# Drafting a block, and each further position of a verification.
USUAL_COSTS = (0.25, 0.025)
FORGETTING = 0.95
LATEST = 5  # durations of a kind whose median counts: a machine that others use is slow now and then
WARM_AFTER = 2  # rounds; the first of a shape is slower


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a round's parts, in rounds without candidates.

    Attributes:
        draft: Drafting a block.
        premium: Verifying any candidates at all, such as moving the rows of a batch that accept different numbers.
        step: Each candidate.
    """

    draft: float
    premium: float
    step: float

    def of(self, width: int) -> float:
        """Cost of verifying `width` candidates, on top of a round without."""
        return self.premium + self.step * width if width else 0.0


class FixedCosts:
    """Costs that never change; no clock is read."""

    needs_plain_round = False
    are_widths_alike = False

    def __init__(self, draft: float, step: float):
        self.relative = RoundCosts(draft, 0.0, step)

    def begin_round(self, num_rows: int) -> None:
        """A round of `num_rows` rows begins."""

    def drafted(self) -> None:
        """A block has been drafted in this round."""

    def verified(self, width: int) -> None:
        """The round, of `width` positions with the anchor's, has ended."""


class MeasuredCosts:
    """Costs as the clock shows them, for the number of rows at hand.

    A line is laid through the times of verifications by width. Where rows that accept different numbers are moved in
    the cache, a round without candidates is spared more than that line shows; so a batch starts with such rounds.
    """

    def __init__(self) -> None:
        self.num_rows = 0  # when measuring began
        self.started = 0.0
        self.has_drafted = False
        self._forget()

    def _forget(self) -> None:
        self.drafts: deque[float] = deque(maxlen=LATEST)  # seconds
        self.ones: deque[float] = deque(maxlen=LATEST)  # of rounds without candidates
        # Decayed sums over verifications of width w and duration t: n, w, w^2, t, w * t.
        self.sums = [0.0] * 5
        self.intercept, self.slope_share = 0.0, USUAL_COSTS[1]  # of the line through them; slope / intercept

    def begin_round(self, num_rows: int) -> None:
        """A round begins. With half the rows that it began with, everything is measured anew."""
        if num_rows <= self.num_rows // 2 or not self.num_rows:
            self.num_rows = num_rows
            self._forget()
        self.started = time.perf_counter()

    @property
    def needs_plain_round(self) -> bool:
        """Whether it is not known yet what a round without candidates takes, and nothing else would tell."""
        return self.num_rows > 1 and len(self.ones) < WARM_AFTER

    def drafted(self) -> None:
        """A block has been drafted in this round. The first one is no measure: its draft reads the prompt, too."""
        duration = self._lap()
        if self.has_drafted:
            self.drafts.append(duration)
        self.has_drafted = True

    def verified(self, width: int) -> None:
        """The round, of `width` positions with the anchor's, has ended."""
        duration = self._lap()
        if width == 1:
            self.ones.append(duration)
            return
        new = (1.0, width, width**2, duration, width * duration)
        self.sums = [FORGETTING * old + added for old, added in zip(self.sums, new, strict=True)]
        self._fit()

    @property
    def relative(self) -> RoundCosts:
        """What is known so far; what is not, is as usual."""
        one = statistics.median(self.ones) if self.ones else self.intercept
        draft_cost, step_cost = USUAL_COSTS
        if not one:
            return RoundCosts(draft_cost, 0.0, step_cost)
        if self.drafts:
            draft_cost = statistics.median(self.drafts) / one
        if not self.intercept:
            return RoundCosts(draft_cost, 0.0, step_cost)
        return RoundCosts(draft_cost, max(0.0, self.intercept / one - 1.0), self.slope_share * self.intercept / one)

    @property
    def are_widths_alike(self) -> bool:
        """Whether all remembered widths are much the same: one width alone does not say what a position costs."""
        count, total, square, *_ = self.sums
        return count > 0 and square / count - (total / count) ** 2 < 1.0

    def _fit(self) -> None:
        """Lay a line through the times of verifications: where it meets one token, and what a position adds.

        A pull towards the slope of the round before keeps the line sane while all widths are much the same.
        """
        count, width, square, duration, product = self.sums
        mean_width, mean_duration = width / count, duration / count
        pull = mean_duration * self.slope_share / (1.0 + self.slope_share * (mean_width - 1.0))
        spread = square / count - mean_width**2
        slope = (product / count - mean_width * mean_duration + pull) / (spread + 1.0)
        self.intercept = max(mean_duration - slope * (mean_width - 1.0), 0.1 * mean_duration)
        self.slope_share = max(slope, 0.0) / self.intercept if self.intercept else self.slope_share

    def _lap(self) -> float:
        now = time.perf_counter()
        duration, self.started = now - self.started, now
        return duration


__all__ = ["USUAL_COSTS", "FixedCosts", "MeasuredCosts", "RoundCosts"]
