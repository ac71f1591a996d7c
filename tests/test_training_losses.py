"""Losses and weights, against closed forms, autograd and the D-PACE implementation of SpecForge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from dflash_hf.training import losses
from dflash_hf.training.blocks import IGNORED


@pytest.mark.parametrize(
    ("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (9, 4.5), (13, 6.0), (6, 3.0), (32, 37 / 3)]
)
def test_gamma_is_the_papers_and_linear_between(block_size: int, gamma: float) -> None:
    assert losses.default_gamma(block_size) == pytest.approx(gamma)


def test_gamma_stays_positive_for_the_smallest_blocks() -> None:
    assert all(losses.default_gamma(size) >= losses.MIN_GAMMA for size in range(2, 8))


def test_decay_of_a_block_of_four_by_hand() -> None:
    expected = torch.tensor([1.0, math.exp(-1 / 2), math.exp(-2 / 2)])
    torch.testing.assert_close(losses.decay_weights(4, 2.0), expected)


def test_dpace_weights_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.2, 0.9]])
    reach = [0.75, 0.75 * 0.6, 0.75 * 0.6 * 0.95]
    expected = torch.tensor([[sum(reach), sum(reach[1:]), reach[2]]])
    torch.testing.assert_close(losses.dpace_weights(probs, torch.ones(1, 3, dtype=torch.bool), 0.5), expected)


def test_dpace_with_alpha_one_counts_the_slots_that_are_left() -> None:
    weights = losses.dpace_weights(torch.rand(2, 4), torch.ones(2, 4, dtype=torch.bool), 1.0)
    torch.testing.assert_close(weights, torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 2))


def specforge_model() -> Any:
    """SpecForge's D-PACE code, from an installed package or an unpacked wheel; skips where it is absent."""
    pytest.importorskip("specforge", reason="needs specforge==0.2.0 (install with --no-deps)")
    return pytest.importorskip("specforge.algorithms.common.dflash_family_model")


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_specforges(alpha: float) -> None:
    module = specforge_model()
    model = module.OnlineDFlashModel(torch.nn.Identity(), None, None, 0, 8, loss_type="dpace", dpace_alpha=alpha)
    probs = torch.rand(3, 5, 8)
    is_label = torch.rand(3, 5, 8) > 0.2
    is_label[..., 0] = False  # SpecForge counts the anchor's slot, which has no label
    theirs = model._dpace_weight(probs, is_label.float(), is_label, "dpace") * is_label
    torch.testing.assert_close(losses.dpace_weights(probs, is_label, alpha), theirs)


def test_kl_is_the_definition_and_zero_for_equal_distributions() -> None:
    ours, targets = torch.randn(6, 9), torch.randn(6, 9)
    p, q = targets.softmax(-1), ours.softmax(-1)
    torch.testing.assert_close(losses.kl_divergence(ours, targets), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(losses.kl_divergence(targets + 3.0, targets), torch.zeros(6), atol=1e-6, rtol=0)


def test_ignored_labels_cost_nothing() -> None:
    logits = torch.randn(2, 5)
    each = losses.cross_entropy(logits, torch.tensor([3, IGNORED]))
    assert each[1] == 0
    torch.testing.assert_close(each[0], -logits[0].log_softmax(-1)[3])


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunked_sum_has_the_value_and_gradient_of_the_whole(chunk_size: int) -> None:
    head = torch.randn(11, 6, dtype=torch.float64)
    labels = torch.randint(11, (7,))
    weights = torch.rand(7, dtype=torch.float64)
    states = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    whole = (functional.cross_entropy(states @ head.T, labels, reduction="none") * weights).sum()
    (expected,) = torch.autograd.grad(whole / 3, states)

    def terms(some: torch.Tensor, chunk: slice) -> torch.Tensor:
        return (losses.cross_entropy(some @ head.T, labels[chunk]) * weights[chunk]).sum()

    total = losses.chunked_sum(states, terms, chunk_size)
    (gradient,) = torch.autograd.grad(total / 3, states)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradient, expected)


def test_chunked_sum_without_gradients_keeps_none() -> None:
    with torch.no_grad():
        total = losses.chunked_sum(torch.ones(4, 2), lambda some, chunk: some.sum(), 2)
    assert total == 8
    assert not total.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mse", None, 0.5), "`loss` must be one of ce, kl, dpace, got 'mse'"),
        (("ce", 0.0, 0.5), "`gamma` must be a positive number, got 0.0"),
        (("ce", float("inf"), 0.5), "`gamma` must be a positive number, got inf"),
        (("dpace", None, 1.5), "`dpace_alpha` must lie between 0 and 1, got 1.5"),
    ],
)
def test_bad_constants_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        losses.check_loss_arguments(*arguments)
