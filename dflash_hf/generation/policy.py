"""How much to verify this round: as many candidates as pay for themselves, down to none.

The k-th candidate adds the probability that it stands; it costs what one more position adds to the target's forward.
Probabilities come from the draft, corrected by how often it was right of late; costs are measured, or given. Expected
tokens per unit of cost rise and then fall with the width (CaDDTree, arXiv 2606.01813), so the best width is the best
of one curve. Where even that is no faster than the target alone, drafting pauses for a while and is then tried again,
each time for longer. In a batch, rows that accept different numbers are moved in the cache, which a round without
candidates is spared; so a batch starts with two such rounds, to know what one takes once it is warm.

The choice must not depend on a clock where a run is to be repeated: when sampling, because the number of proposals
decides how many random numbers are drawn; under `torch.use_deterministic_algorithms`; and whenever
`draft.generation_config.draft_costs` is set. Then costs are fixed and the same call makes the same choices.
"""

import time
from collections.abc import Sequence

import torch

# Relative to the target's forward of one token: drafting a block, and each further position of a verification.
USUAL_COSTS = (0.25, 0.025)
FORGETTING = 0.9
LONGEST_PAUSE = 64
PROBE_EVERY = 8
WARM_AFTER = 2  # rounds; the first of a shape is slower


class WidthPolicy:
    """Chooses, round by round, whether to draft and how many candidates to verify.

    Args:
        fixed_costs: Cost of drafting a block and of each further verified position, relative to a one-token forward of
            the target; `None` measures them with a clock.
    """

    def __init__(self, fixed_costs: tuple[float, float] | None = None):
        self.fixed_costs = fixed_costs
        self.hits, self.expected = 0.0, 0.0  # candidates that stood, and that the draft expected to stand
        self.pause, self.next_pause = 0, 4
        self.num_rows = 0  # when measuring began
        self._forget_costs()
        self.alike_rounds = 0  # in a row in which the remembered widths were all much the same
        self.started = 0.0
        self.was_drafted = False

    def _forget_costs(self) -> None:
        self.draft_seconds: float | None = None
        self.one: float | None = None  # seconds of a round without candidates
        self.num_ones = 0  # such rounds that were timed
        # Decayed sums over verifications of width w and duration t: n, w, w^2, t, w * t.
        self.sums = [0.0] * 5
        self.intercept, self.slope_share = 0.0, USUAL_COSTS[1]  # of the line through them; slope / intercept

    def wants_draft(self, num_rows: int = 1) -> bool:
        """Whether this round drafts at all. Starts the round's clock."""
        if num_rows <= self.num_rows // 2 or not self.num_rows:
            self.num_rows = num_rows
            self._forget_costs()
        self.started = self._now()
        is_start_of_batch = self.fixed_costs is None and num_rows > 1 and self.num_ones < WARM_AFTER
        self.was_drafted = self.pause == 0 and not is_start_of_batch
        self.pause = max(0, self.pause - 1)
        return self.was_drafted

    def choose(self, chances: Sequence[float]) -> int:
        """How many candidates to verify, given the draft's probability that each stands, in descending order."""
        drafting = self._now() - self.started
        self.draft_seconds = drafting if self.draft_seconds is None else _decay(self.draft_seconds, drafting)
        draft_cost, premium, step_cost = self._costs()
        trust = self._trust()
        best_width, best_rate, gain = 0, 1.0, 1.0  # the block is drafted: its cost is sunk
        for width, chance in enumerate(chances, start=1):
            gain += trust * chance
            rate = gain / (1.0 + premium + step_cost * width)
            if rate > best_rate:
                best_width, best_rate = width, rate
        gain = 1.0 + trust * sum(chances[:best_width])
        cost = 1.0 + draft_cost + (premium + step_cost * best_width if best_width else 0.0)
        if gain / cost < 1.0:
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)
        else:
            self.next_pause = 4
        best_width = self._probe(best_width)
        self.started = self._now()
        return best_width

    def _probe(self, width: int) -> int:
        """Halve a width now and then while all were alike: one width alone does not say what a position costs."""
        count, total, square, *_ = self.sums
        is_alike = count > 0 and square / count - (total / count) ** 2 < 1.0
        self.alike_rounds = self.alike_rounds + 1 if is_alike else 0
        is_due = self.fixed_costs is None and self.alike_rounds % PROBE_EVERY == 1
        return width // 2 if is_due else width

    def learn(self, chances: Sequence[float], accepted: float, width: int) -> None:
        """Take in a round: what was expected of the verified candidates, how many stood, and how long it took."""
        now = self._now()
        duration, self.started = now - self.started, now
        if width == 1:
            self.num_ones += 1
            self.one = duration if self.one is None else min(duration, _decay(self.one, duration))
        else:
            new = (1.0, width, width**2, duration, width * duration)
            self.sums = [FORGETTING * old + added for old, added in zip(self.sums, new, strict=True)]
            self._fit()
        if self.was_drafted:
            self.hits = FORGETTING * self.hits + accepted
            self.expected = FORGETTING * self.expected + sum(chances)

    def _trust(self) -> float:
        """Candidates that stood for each one expected, started at one as if one had been seen."""
        return (self.hits + 1.0) / (self.expected + 1.0)

    def _costs(self) -> tuple[float, float, float]:
        """Cost of drafting, of verifying any candidates at all, and of each, relative to a round without."""
        draft_cost, step_cost = self.fixed_costs or USUAL_COSTS
        one = self.one or self.intercept
        if self.fixed_costs is not None or not one:
            return draft_cost, 0.0, step_cost
        drafting = (self.draft_seconds or 0.0) / one
        if not self.intercept:
            return drafting, 0.0, step_cost
        return drafting, max(0.0, self.intercept / one - 1.0), self.slope_share * self.intercept / one

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

    def _now(self) -> float:
        return 0.0 if self.fixed_costs is not None else time.perf_counter()


def _decay(old: float, new: float) -> float:
    return FORGETTING * old + (1.0 - FORGETTING) * new


def chain_chances(scores: torch.Tensor) -> list[float]:
    """The draft's own probability that each candidate of a chain stands, (B, P, V) scores, averaged over the rows.

    That is the product of the largest probabilities up to there: of the distributions, not of what was drawn from
    them, since a choice that depends on a draw would bias sampling.
    """
    best = scores.float().softmax(dim=-1).amax(dim=-1)  # (B, P)
    return best.cumprod(dim=1).mean(dim=0).tolist()


__all__ = ["WidthPolicy", "chain_chances"]
