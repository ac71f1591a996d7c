"""The token that greedy decoding takes. A CPU looks for it in parts; it is `argmax`'s, whatever the scores are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_hf.generation.verification import best_tokens

ROWS, WIDTH, VOCABULARY = 3, 6, 128 * 512  # enough numbers to be worth the parts
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.0, -3.0)


def assert_as_argmax(scores: torch.Tensor) -> None:
    assert torch.equal(best_tokens(scores), scores.float().argmax(dim=-1))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
    st.sampled_from([-50.0, 0.0, 50.0]),
    st.lists(
        st.tuples(
            st.integers(0, ROWS - 1),
            st.integers(0, WIDTH - 1),
            st.integers(0, VOCABULARY - 1),
            st.sampled_from(SPECIAL),
        ),
        max_size=30,
    ),
    st.integers(0, 99),
)
def test_the_first_of_the_best(dtype: torch.dtype, mean: float, entries: list[tuple], seed: int) -> None:
    """Scores with ties, of either sign, with infinities and what is no number."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-8, 9, (ROWS, WIDTH, VOCABULARY), generator=generator) / 4 + mean
    for row, position, token, value in entries:
        scores[row, position, token] = value
    assert_as_argmax(scores.to(dtype))  # the signs of what is no number are the conversion's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_score_that_is_no_number(dtype: torch.dtype, sign: int) -> None:
    """Its bits depend on the operation that it came from: a CPU's vector units make negative ones of all."""
    scores = torch.randn(ROWS, WIDTH, VOCABULARY)
    scores[1, 2, 700] = scores[1, 2, 900] = sign * math.nan
    assert_as_argmax(scores.to(dtype))
    assert_as_argmax(scores.to(dtype) * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [0.0, -0.0, -math.inf, math.inf, math.nan, -math.nan])
def test_scores_that_are_all_the_same(dtype: torch.dtype, value: float) -> None:
    assert_as_argmax(torch.full((ROWS, WIDTH, VOCABULARY), value, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zeros_of_either_sign_are_a_tie(dtype: torch.dtype) -> None:
    scores = torch.full((ROWS, WIDTH, VOCABULARY), -1.0, dtype=dtype)
    scores[..., 700], scores[..., 900] = -0.0, 0.0
    assert_as_argmax(scores)


@pytest.mark.parametrize("size", [50257, 49152, 151936, 128256, 201088])
def test_every_size_of_vocabulary(size: int) -> None:
    assert_as_argmax(torch.randn(2, 12, size, generator=torch.Generator().manual_seed(size)).bfloat16())


def test_part_of_a_block_is_not_copied() -> None:
    """As where a block is cut short; its rows are apart."""
    scores = torch.randn(ROWS, 2 * WIDTH, VOCABULARY).bfloat16()
    assert_as_argmax(scores[:, :WIDTH])


@pytest.mark.parametrize("shape", [(1, 1, 49152), (40, 1, 32768), (1, 65, 49152)])
def test_every_shape(shape: tuple[int, ...]) -> None:
    assert_as_argmax(torch.randn(shape).bfloat16())
