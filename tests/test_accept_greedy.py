"""Greedy acceptance: on a CPU, which reads no more scores than it must, and as on an accelerator, never waiting."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_hf.generation import verification
from dflash_hf.generation.verification import accept_greedy
from helpers import on_every_device

VOCABULARY = 7
blocks = st.tuples(st.integers(1, 5), st.integers(0, 17)).flatmap(
    lambda size: st.tuples(
        st.lists(st.lists(st.integers(0, 1), min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]),
        st.integers(0, 99),
    )
)


@on_every_device
@settings(max_examples=150, deadline=None)
@given(blocks)
def test_candidates_stand_up_to_the_first_that_the_target_would_not_choose(device: Any, block: tuple) -> None:
    """Against a loop over scores that are drawn at random; 1 says that a candidate is the target's own choice."""
    is_choice, seed = block
    width = len(is_choice[0]) + 1
    scores = torch.randn(len(is_choice), width, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    choices = [[max(range(VOCABULARY), key=row[i].tolist().__getitem__) for i in range(width)] for row in scores]
    candidates = [
        [choice if same else (choice + 1) % VOCABULARY for choice, same in zip(own, row, strict=False)]
        for own, row in zip(choices, is_choice, strict=True)
    ]
    expected = []
    for own, proposed in zip(choices, candidates, strict=True):
        kept = []
        while len(kept) < len(proposed) and proposed[len(kept)] == own[len(kept)]:
            kept.append(proposed[len(kept)])
        expected.append([*kept, own[len(kept)]])
    with device():
        verdict = accept_greedy(torch.tensor(candidates, dtype=torch.long).view(len(candidates), width - 1), scores)
    assert verdict.to_host() == expected
    assert verdict.accepted.tolist() == [len(row) - 1 for row in expected]


def test_scores_behind_what_falls_are_not_read_on_a_cpu() -> None:
    """They are most of a block's, and a CPU takes as long for them as for the rest of a round's own work."""
    scores = torch.zeros(2, 16, VOCABULARY)
    scores[:, :, 3] = 1
    candidates = torch.full((2, 15), 3)
    candidates[0, 1], candidates[1, 9] = 0, 0
    seen = []
    with patch.object(verification, "best_tokens", lambda part: seen.append(part.shape[:2]) or part.argmax(dim=-1)):
        assert accept_greedy(candidates, scores).accepted.tolist() == [1, 9]
    assert seen == [(2, 2), (1, 4), (1, 8)]
