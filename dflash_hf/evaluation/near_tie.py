"""Is an output plain `generate`'s, and where it is not, was it a near tie of the target's own scores?

In half precision a forward of a block and a forward of one token round differently, so where two tokens' scores are
almost equal either may win, and both texts are greedy texts of the target. Nothing else may differ: the check replays
the common prefix through plain `generate`, looks at the scores of the two tokens that followed it, and goes on from
the token that was found, up to the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

# How many steps of the dtype, at the top score's size, count as a tie. On the embedded target in bfloat16 (scores of
# 16 to 32, steps of 0.125) a forward over a whole text and one token by token put the gap between the first two tokens
# up to 2 steps apart; 4 leaves room for deeper targets.
TIE_STEPS = 4

IDENTICAL, NEAR_TIE, WRONG = "identical", "near_tie", "wrong"


@dataclass(frozen=True)
class Comparison:
    """How an output compares to plain `generate`'s.

    Attributes:
        verdict: "identical", "near_tie" or "wrong".
        position: The first new token that differs, counted from 0; if wrong, the first that no near tie explains;
            `None` if identical.
        expected: Plain `generate`'s token there, `None` if its output has ended.
        found: The token that was found, `None` if the output has ended.
        gap: How far the worse of the two lies below the target's best score there.
        tolerance: The largest gap that counts as a tie.
        ties: At how many places the two parted at a near tie; `None` if at none.
    """

    verdict: str
    position: int | None = None
    expected: int | None = None
    found: int | None = None
    gap: float | None = None
    tolerance: float | None = None
    ties: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def compare(
    target: Any,
    prompt_ids: Any,
    expected: Sequence[int],
    found: Sequence[int],
    *,
    generation_config: Any = None,
    tie_steps: float = TIE_STEPS,
) -> Comparison:
    """Compare new tokens with those of plain greedy `generate`.

    Behind a near tie the target continues alone from the token that was found, and the rest is held to that: each
    place where they part again must be a near tie, too.

    Args:
        target: The target.
        prompt_ids: What both outputs continue, (1, S).
        expected: New tokens of plain `generate`.
        found: New tokens to judge.
        generation_config: What both were generated with, so that its logits processors shape the scores.
        tie_steps: Tolerance, in steps of the target's dtype at the size of the top score.
    """
    expected, found = list(expected), list(found)
    config = generation_config or target.generation_config
    limit = config.max_new_tokens or max(len(expected), len(found))
    parted: list[Comparison] = []
    while expected != found:
        here = _first_difference(target, prompt_ids, expected, found, config, tie_steps)
        if here.verdict == WRONG:
            return replace(here, ties=len(parted) or None)
        parted.append(here)
        taken = found[: here.position + 1]
        expected = taken + _continuation(target, prompt_ids, taken, limit, config)
    return replace(parted[0], ties=len(parted)) if parted else Comparison(IDENTICAL)


def _first_difference(
    target: Any, prompt_ids: Any, expected: list[int], found: list[int], config: Any, tie_steps: float
) -> Comparison:
    shorter = min(len(expected), len(found))
    position = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    if position == shorter:  # one ended where the other went on: no score explains that
        at = (expected[position : position + 1] or [None])[0], (found[position : position + 1] or [None])[0]
        return Comparison(WRONG, position, *at)
    scores = scores_after(target, prompt_ids, expected[:position], config)
    gap, tolerance = tie_gap(scores, (expected[position], found[position]), target.dtype, tie_steps)
    verdict = NEAR_TIE if gap <= tolerance else WRONG
    return Comparison(verdict, position, expected[position], found[position], gap, tolerance)


def _continuation(target: Any, prompt_ids: Any, taken: list[int], limit: int, config: Any) -> list[int]:
    """What plain greedy `generate` adds to the new tokens `taken`, up to `limit` new tokens in all."""
    ends = config.eos_token_id
    if len(taken) >= limit or taken[-1] in (ends if isinstance(ends, list) else [ends]):
        return []
    output = _replay(target, prompt_ids, taken, limit - len(taken), config)
    continued: list[int] = output.sequences[0, prompt_ids.shape[1] + len(taken) :].tolist()
    return continued


def scores_after(target: Any, prompt_ids: Any, new_tokens: Sequence[int], generation_config: Any = None) -> Any:
    """The target's processed scores (V,) of the token after `prompt_ids` (1, S) and `new_tokens`, replayed."""
    config = generation_config or target.generation_config
    return _replay(target, prompt_ids, new_tokens, 1, config, with_scores=True).scores[0][0]


def _replay(
    target: Any,
    prompt_ids: Any,
    new_tokens: Sequence[int],
    max_new_tokens: int,
    config: Any,
    with_scores: bool = False,
) -> Any:
    """Plain greedy `generate` from `prompt_ids` (1, S) and `new_tokens` on."""
    import copy

    import torch

    config = copy.deepcopy(config)
    config.max_new_tokens, config.max_length = max_new_tokens, None
    config.min_new_tokens = max((config.min_new_tokens or 0) - len(new_tokens), 0) or None
    config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
    config.return_dict_in_generate, config.output_scores = True, with_scores
    prefix = torch.cat([prompt_ids, prompt_ids.new_tensor([list(new_tokens)])], dim=1)
    return target.generate(prefix, attention_mask=torch.ones_like(prefix), generation_config=config)


def tie_gap(scores: Any, tokens: Sequence[int], dtype: Any, tie_steps: float = TIE_STEPS) -> tuple[float, float]:
    """How far the worst of `tokens` lies below the best of `scores` (V,), and the largest distance that is a tie."""
    import torch

    best = float(scores.max())
    gap = max(best - float(scores[token]) for token in tokens)
    exponent = math.floor(math.log2(max(abs(best), torch.finfo(dtype).tiny)))
    return gap, tie_steps * 2.0**exponent * torch.finfo(dtype).eps


def describe(comparison: Comparison, tokenizer: Any) -> str:
    """A comparison in one sentence for a reader."""
    if comparison.verdict == IDENTICAL:
        return "identical to the target alone, token for token"
    place = f"new token {comparison.position + 1}"
    if comparison.gap is None:
        return f"WRONG: one of the two outputs ends before {place}, where the other goes on"
    texts = [repr(tokenizer.decode([token])) for token in (comparison.expected, comparison.found)]
    scores = (
        f"at {place} ({texts[0]} alone, {texts[1]} with the draft), where the target's scores of the two are within "
        f"{comparison.gap:.3g} of its best (a tie is {comparison.tolerance:.3g} or less)"
    )
    if comparison.verdict == NEAR_TIE:
        more = (comparison.ties or 1) - 1
        again = f"; from there on they part at {more} more near tie{'s' * (more > 1)}" if more else ""
        return f"they part {scores}: a near tie, which rounding may decide either way{again}"
    return f"WRONG: they part {scores}, which rounding does not explain"


__all__ = ["IDENTICAL", "NEAR_TIE", "WRONG", "Comparison", "compare", "describe", "scores_after", "tie_gap"]
