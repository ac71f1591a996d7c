"""Anchors and blocks: where they may be, what they predict, and that a visit can be repeated exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_hf.training.blocks import IGNORED, NO_ANCHOR, batch_anchors, has_label, make_blocks, sample_anchors

MASK = 63


@given(prompt=st.integers(0, 6), response=st.integers(0, 20), number=st.integers(1, 30), seed=st.integers(0, 9))
def test_anchors_are_different_response_tokens_with_a_token_behind_them(
    prompt: int, response: int, number: int, seed: int
) -> None:
    anchors = sample_anchors([seed], prompt, prompt + response, number).tolist()
    possible = list(range(prompt, prompt + response - 1))
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= set(possible)
    assert len(anchors) == min(number, len(possible))


def test_every_possible_anchor_is_drawn_equally_often() -> None:
    counts = torch.zeros(10)
    for visit in range(600):
        counts[torch.from_numpy(sample_anchors([1, visit], 3, 14, 2)) - 3] += 1
    expected = 600 * 2 / 10
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < 27.9  # 0.1 % of fair draws exceed it (9 degrees of freedom)


def test_anchors_depend_on_seed_step_and_sequence_but_not_on_the_batch() -> None:
    def draw(sequences: list[int], step: int, seed: int = 0) -> torch.Tensor:
        number = len(sequences)
        return batch_anchors(
            torch.tensor(sequences), torch.full((number,), 4), torch.full((number,), 60), 5, (seed, step)
        )

    together = draw([7, 8], 3)
    assert torch.equal(together[1:], draw([8], 3))
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(draw([7], 3), draw([7], 4))
    assert not torch.equal(draw([7], 3), draw([7], 3, seed=1))


def test_a_slot_predicts_the_token_at_its_own_place() -> None:
    input_ids = torch.arange(10, 20)[None]
    blocks = make_blocks(input_ids, torch.tensor([10]), torch.tensor([[2, 7]]), 4, MASK)
    assert blocks.token_ids.tolist() == [[[12, MASK, MASK, MASK], [17, MASK, MASK, MASK]]]
    assert blocks.labels.tolist() == [[[13, 14, 15], [18, 19, IGNORED]]]
    assert blocks.positions.tolist() == [[[2, 3, 4, 5], [7, 8, 9, 10]]]


def test_padding_and_absent_blocks_have_no_labels() -> None:
    input_ids = torch.tensor([[5, 6, 7, 8, 9, 1], [5, 6, 7, 0, 0, 0]])
    lengths = torch.tensor([6, 3])
    anchors = torch.tensor([[1, 4], [1, NO_ANCHOR]])
    blocks = make_blocks(input_ids, lengths, anchors, 4, MASK)
    assert blocks.labels.tolist() == [
        [[7, 8, 9], [1, IGNORED, IGNORED]],
        [[7, IGNORED, IGNORED], [IGNORED, IGNORED, IGNORED]],
    ]
    assert torch.equal(has_label(lengths, anchors, 4), blocks.labels != IGNORED)


@pytest.mark.parametrize("length", range(1, 10))
def test_sequences_of_any_length_make_blocks(length: int) -> None:
    anchors = batch_anchors(torch.tensor([0]), torch.tensor([0]), torch.tensor([length]), 3, (0, 0))
    blocks = make_blocks(torch.ones(1, length, dtype=torch.long), torch.tensor([length]), anchors, 4, MASK)
    expected = sum(min(3, length - 1 - anchor) for anchor in anchors[0].tolist() if anchor != NO_ANCHOR)
    assert int((blocks.labels != IGNORED).sum()) == expected
