"""Which candidates stand: the lossless acceptance rules, for whole batches of blocks.

Greedy: the target's argmax decides; a candidate stands while it equals it. Sampling: speculative sampling (Leviathan
et al., arXiv 2211.17192, algorithm 1): a candidate x drawn from q stands with probability min(1, p(x) / q(x)); where
the first one falls, the token comes from norm(max(p - q, 0)); behind a block that stands whole, from p.

Shapes: B batch, P proposals, V vocabulary.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch


@dataclass
class Verdict:
    """What a round yields, still on the device.

    Attributes:
        tokens: (B, P + 1 or fewer): in row b the first `accepted[b]` are accepted candidates, the next is the target's
            own; those behind it mean nothing.
        accepted: (B,) number of accepted candidates.
        order: (B, W or fewer) which verified positions the tokens stand on, where they are not the first ones in turn.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    order: torch.Tensor | None = None

    @classmethod
    def from_host(cls, tokens: list[list[int]], like: torch.Tensor, order: list[list[int]] | None = None) -> "Verdict":
        """The verdict of what was found on the host: each row's accepted candidates and the target's own token."""

        def padded(rows: list[list[int]]) -> torch.Tensor:
            longest = max(map(len, rows))
            return like.new_tensor([row + [0] * (longest - len(row)) for row in rows])

        accepted = like.new_tensor([len(row) - 1 for row in tokens])
        return cls(padded(tokens), accepted, None if order is None else padded(order))

    def to_host(self) -> list[list[int]]:
        """The committed tokens of each row. The one point of a round where the host waits for the device."""
        packed = torch.cat([self.accepted[:, None], self.tokens], dim=1).tolist()
        return [row[1 : row[0] + 2] for row in packed]


def accept_greedy(candidates: torch.Tensor, scores: torch.Tensor) -> Verdict:
    """Accept candidates (B, P) while they are the argmax of scores (B, P + 1, V)."""
    if is_on_host(scores):
        return _accept_greedy_on_host(candidates, scores)
    tokens = best_tokens(scores)  # (B, P + 1)
    accepted = (candidates == tokens[:, :-1]).cumprod(dim=1).sum(dim=1)
    return Verdict(tokens, accepted)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether looking at a tensor waits for no device."""
    return tensor.device.type == "cpu"


def _accept_greedy_on_host(candidates: torch.Tensor, scores: torch.Tensor) -> Verdict:
    """The same, looking at no scores behind a candidate that falls: most fall early, and reading scores takes long."""
    proposed = candidates.tolist()
    chosen: list[list[int]] = [[] for _ in proposed]
    standing = list(range(len(proposed)))
    start, width = 0, 2
    while standing and start < scores.shape[1]:
        part = scores[:, start : start + width]
        if len(standing) < len(proposed):
            part = part.index_select(0, torch.tensor(standing))
        for row, tokens in zip(standing, best_tokens(part).tolist(), strict=True):
            chosen[row] += tokens
        start, width = start + width, 2 * width
        standing = [row for row in standing if proposed[row][:start] == chosen[row]]
    kept = [tokens[: _num_equal(own, tokens) + 1] for own, tokens in zip(proposed, chosen, strict=True)]
    return Verdict.from_host(kept, candidates)


def _num_equal(candidates: Sequence[int], tokens: Sequence[int]) -> int:
    """How many candidates at the start are those tokens."""
    pairs = zip(candidates, tokens, strict=False)
    return next((number for number, (candidate, token) in enumerate(pairs) if candidate != token), len(candidates))


def best_tokens(scores: torch.Tensor, is_guess: bool = False) -> torch.Tensor:
    """The token (B, W) that greedy `generate` takes at each position of scores (B, W, V): the first of the best.

    It compares in float32: rounding float64 scores can create ties. Narrower types are exact. A guess may overlook
    what is no number, as it is verified anyway.
    """
    scores = scores.float() if scores.dtype == torch.float64 else scores
    size = math.gcd(scores.shape[-1], 512)
    if not is_on_host(scores) or size < 64 or scores.numel() < 2**20:
        return scores.max(dim=-1).indices  # the same as `argmax`, and three times as fast on a CPU
    # A CPU finds what is best far faster than where: only the first part of a vocabulary that has it is searched.
    parts = scores.unflatten(-1, (-1, size))  # (B, W, V / size, size)
    part = _part_of_best(parts, is_guess)  # (B, W)
    row, column = torch.arange(part.shape[0])[:, None], torch.arange(part.shape[1])
    return part * size + parts[row, column, part].max(dim=-1).indices


def _part_of_best(parts: torch.Tensor, is_guess: bool) -> torch.Tensor:
    """The first of parts (B, W, n, size) that has the largest number, (B, W).

    The bits of positive numbers are in the order of the numbers, and 16 of them are compared three times as fast as
    integers. Only a sum tells whether there is what is no number, which `max` would choose.
    """
    if parts.dtype.itemsize == 2:
        best, part = parts.view(torch.int16).amax(dim=-1).max(dim=-1)
        is_positive = best.min().item() > 0
        if is_positive and (is_guess or not math.isnan(parts.sum(dim=(-2, -1)).sum().item())):
            return part
    return parts.amax(dim=-1).max(dim=-1).indices


def accept_sampled(candidates: torch.Tensor, draft_probs: torch.Tensor | None, scores: torch.Tensor) -> Verdict:
    """Speculative sampling of candidates (B, P), drawn from `draft_probs` (B, P, V), against scores (B, P + 1, V)."""
    target_probs = scores.float().softmax(dim=-1)  # (B, P + 1, V)
    batch_size, num_proposals = candidates.shape
    if num_proposals == 0:
        return Verdict(sample(target_probs[:, 0])[:, None], candidates.new_zeros(batch_size))
    p = target_probs[:, :-1].gather(-1, candidates[..., None])[..., 0]  # (B, P)
    q = draft_probs.gather(-1, candidates[..., None])[..., 0]
    accepted = (torch.rand_like(q) * q < p).long().cumprod(dim=1).sum(dim=1)  # (B,)
    at = accepted[:, None, None].expand(-1, 1, target_probs.shape[-1])
    p_next = target_probs.gather(1, at)[:, 0]  # (B, V)
    q_next = draft_probs.gather(1, at.clamp(max=num_proposals - 1))[:, 0]
    residual = residual_distribution(p_next, q_next * (accepted < num_proposals)[:, None])
    own = sample(residual)[:, None]  # (B, 1)
    tokens = torch.cat([candidates, own], dim=1).scatter(1, accepted[:, None], own)
    return Verdict(tokens, accepted)


def accept_stepwise(
    candidates: torch.Tensor,
    draft_probs: torch.Tensor | None,
    score_at: Callable[[int], torch.Tensor],
    do_sample: bool,
    end_tokens: Container[int] = (),
) -> Verdict:
    """The same rules for one row, computing the scores (1, V) of position i only once all before it stand.

    Behind an end token no scores are computed; it counts as the target's own.
    """
    accepted: list[torch.Tensor] = []
    for step in range(candidates.shape[1] + 1):
        scores = score_at(step)[:, None]  # (1, 1, V)
        has_candidate = step < candidates.shape[1]
        candidate = candidates[:, step : step + 1]
        if not do_sample:
            own = scores.argmax(dim=-1)
            stands = has_candidate and bool(own == candidate)
        elif not has_candidate:
            own, stands = sample(scores[:, 0].float().softmax(dim=-1))[:, None], False
        else:
            both = scores.expand(-1, 2, -1)
            verdict = accept_sampled(candidate, draft_probs[:, step : step + 1], both)
            stands = bool(verdict.accepted)
            own = verdict.tokens[:, :1]
        accepted.append(own)
        if not stands or int(own) in end_tokens:
            break
    return Verdict(torch.cat(accepted, dim=1), candidates.new_full((1,), len(accepted) - 1))


def residual_distribution(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """norm(max(p - q, 0)) over the last dimension; p itself where rounding leaves nothing (p equals q)."""
    residual = (p - q).clamp_min(0)
    total = residual.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, residual / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def sample(probs: torch.Tensor) -> torch.Tensor:
    """One token per row of (..., V) distributions."""
    return torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1).view(probs.shape[:-1])


__all__ = [
    "Verdict",
    "accept_greedy",
    "accept_sampled",
    "accept_stepwise",
    "best_tokens",
    "residual_distribution",
    "sample",
]
