"""How much to verify this round: as many candidates as pay for themselves, down to none.

The k-th candidate adds the probability that it stands; it costs what one more position adds to the target's forward.
Probabilities come from the draft, corrected by how often it was right of late; costs are measured, or given. To make
the most tokens for their cost over many rounds, a round takes every candidate that adds more tokens than its cost
brings at the rate of late (CaDDTree, arXiv 2606.01813, takes the best ratio of one round; the rate over rounds is
Dinkelbach's method for ratios of sums). Where that rate is no better than the target's alone, drafting pauses for a
while and is then tried again, each time for longer.

The choice must not depend on a clock where a run is to be repeated: when sampling, because the number of proposals
decides how many random numbers are drawn; under `torch.use_deterministic_algorithms`; and whenever
`draft.generation_config.draft_costs` is set. Then costs are fixed and the same call makes the same choices.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from .costs import FORGETTING, FixedCosts, MeasuredCosts

FIRST_PAUSE, LONGEST_PAUSE = 4, 64
LASTING = 4  # rounds that must pay in a row until the next pause is a short one again
SECOND_PROBE = 8  # rounds of one width
SPARE = 2  # candidates to score beyond as many as were chosen of late
TRUST_FORGETTING = 0.93
CREDIT = 0.2  # tokens that drafting may fall short of its cost at first, before it pauses


class WidthPolicy:
    """Chooses, round by round, whether to draft and how many candidates to verify.

    Args:
        fixed_costs: Cost of drafting a block and of each further verified position, relative to a one-token forward of
            the target; `None` measures them with a clock.
    """

    def __init__(self, fixed_costs: tuple[float, float] | None = None):
        self.costs: MeasuredCosts | FixedCosts = MeasuredCosts() if fixed_costs is None else FixedCosts(*fixed_costs)
        # Decayed sums over rounds that drafted: their number, their cost and the candidates hoped for; and, decaying
        # faster, the candidates that stood and those hoped for.
        self.rounds, self.cost, self.hoped = 0.0, 0.0, 0.0
        self.hits, self.expected = 0.0, 0.0
        self.pause, self.next_pause = 0, FIRST_PAUSE
        self.paying_rounds = 0  # in a row
        self.alike_rounds, self.next_probe = 0, 1
        self.was_drafted = False
        self.horizon: int | None = None  # candidates that this round may choose, where scoring more of them costs

    def wants_draft(self, num_rows: int = 1) -> bool:
        """Whether this round drafts at all. Starts the round's clock."""
        self.costs.begin_round(num_rows)
        self.was_drafted = self.pause == 0 and not self.costs.needs_plain_round
        self.pause = max(0, self.pause - 1)
        return self.was_drafted

    def choose(self, chances: Sequence[float]) -> int:
        """How many candidates to verify, given the draft's probability that each stands, in descending order."""
        self.costs.drafted()
        costs, trust, rate = self.costs.relative, self._trust(), max(self._rate(), 1.0)
        tokens = accumulate(chances)
        surplus = [trust * gain - rate * costs.of(width) for width, gain in enumerate(tokens, start=1)]
        best = max(surplus, default=0.0)
        width = surplus.index(best) + 1 if best > 0.0 else 0
        self.horizon = max(width + SPARE, (self.horizon or 0) - 1)
        return self._probe(width)

    def learn(self, chances: Sequence[float], accepted: float, width: int) -> None:
        """Take in a round: what was expected of the verified candidates, how many stood, and how long it took."""
        self.costs.verified(width)
        if not self.was_drafted:
            return
        costs = self.costs.relative
        self.rounds = FORGETTING * self.rounds + 1.0
        self.cost = FORGETTING * self.cost + 1.0 + costs.draft + costs.of(width - 1)
        self.hoped = FORGETTING * self.hoped + sum(chances)
        self.hits = TRUST_FORGETTING * self.hits + accepted
        self.expected = TRUST_FORGETTING * self.expected + sum(chances)
        if self._rate() >= 1.0:
            self.paying_rounds += 1
            if self.paying_rounds >= LASTING:  # one lucky block behind a pause shortens no pauses
                self.next_pause = FIRST_PAUSE
            return
        self.paying_rounds = 0
        self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, LONGEST_PAUSE)
        # Paused rounds pass, too, so what went before weighs less behind them; but a useless draft stays known.
        weight = max(0.5, FORGETTING**self.pause)
        self.rounds, self.cost, self.hoped = weight * self.rounds, weight * self.cost, weight * self.hoped

    def _trust(self) -> float:
        """Candidates that stood for each one expected, started at one as if one had been seen."""
        return (self.hits + 1.0) / (self.expected + 1.0)

    def _rate(self) -> float:
        """Tokens of the rounds that drafted for their cost, started as if a round had a little more than it cost."""
        return (self.rounds + self._trust() * self.hoped + 1.0 + CREDIT) / (self.cost + 1.0)

    def _probe(self, width: int) -> int:
        """Halve a width while all were alike, ever more rarely, to see what a position costs."""
        self.alike_rounds += self.costs.are_widths_alike
        if self.alike_rounds < self.next_probe:
            return width
        self.next_probe = max(SECOND_PROBE, 2 * self.next_probe)
        return width // 2


def chain_chances(scores: torch.Tensor, rows: Sequence[int]) -> list[float]:
    """The draft's own probability that each candidate of a chain stands, (B, P, V) scores, averaged over some rows.

    That is the product of the largest probabilities up to there: of the distributions, not of what was drawn from
    them, since a choice that depends on a draw would bias sampling.
    """
    best = scores[rows].softmax(dim=-1).amax(dim=-1).float()  # (rows, P)
    return best.cumprod(dim=1).mean(dim=0).tolist()


__all__ = ["WidthPolicy", "chain_chances"]
