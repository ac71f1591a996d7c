"""The mask of all blocks in one forward, against each block alone: by brute force and through the model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask, flex_attention

from dflash_hf.generation.drafting import Drafter
from dflash_hf.training.attention import BLOCKWISE, blockwise_attention
from dflash_hf.training.blocks import NO_ANCHOR, make_blocks
from dflash_hf.training.masks import block_mask, block_visibility, dense_visibility, layer_rules, training_masks
from dflash_hf.training.target import FrozenTarget
from helpers import random_prompt, tiny_draft

BLOCK = 4
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# Every rule a draft can have; sliding layers are causal by default.
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": SLIDING,
    "sliding_bidirectional": SLIDING | {"is_causal": False},
    "window_from_anchor": SLIDING | {"window_from_anchor": True},
    "sinks": {"attention_sinks": True},
}
ANCHORS = torch.tensor([[1, 6, 8, 13], [3, 4, NO_ANCHOR, NO_ANCHOR]])
CONTEXT = 15


def sees(
    anchor: int, slot: int, key: int, own: bool, window: int | None, is_causal: bool, window_from_anchor: bool
) -> bool:
    """Whether a slot sees the key at a position, in its own block or in the context; written from the rules' words."""
    query = anchor + slot
    if not own and key >= anchor:
        return False
    if is_causal and key > query:
        return False
    return window is None or abs((anchor if window_from_anchor else query) - key) < window


def by_hand(anchors: torch.Tensor, rules: dict[str, Any]) -> torch.Tensor:
    batch_size, num_blocks = anchors.shape
    visible = torch.zeros(batch_size, num_blocks * BLOCK, CONTEXT + num_blocks * BLOCK, dtype=torch.bool)
    for row in range(batch_size):
        for block, anchor in enumerate(anchors[row].tolist()):
            for slot in range(BLOCK):
                for key in range(CONTEXT):
                    visible[row, block * BLOCK + slot, key] = sees(anchor, slot, key, False, **rules)
                for other in range(BLOCK):
                    start = max(anchor, 0)
                    column = CONTEXT + block * BLOCK + other
                    visible[row, block * BLOCK + slot, column] = sees(start, slot, start + other, True, **rules)
    return visible


@pytest.fixture(params=list(RULES))
def draft(request: pytest.FixtureRequest, qwen3: Any) -> Any:
    """A draft of every kind in turn."""
    return tiny_draft(qwen3, **RULES[request.param])


def test_dense_mask_is_the_rules_written_out(draft: Any) -> None:
    for layer_type in set(draft.config.layer_types):
        rules = layer_rules(draft.config, layer_type)
        assert torch.equal(dense_visibility(ANCHORS, CONTEXT, BLOCK, **rules), by_hand(ANCHORS, rules))


def test_block_mask_is_the_dense_mask(draft: Any) -> None:
    for layer_type in set(draft.config.layer_types):
        rules = layer_rules(draft.config, layer_type)
        dense = dense_visibility(ANCHORS, CONTEXT, BLOCK, **rules)
        flexible = block_mask(ANCHORS, CONTEXT, BLOCK, **rules)
        rows, queries, keys = dense.shape
        assert torch.equal(create_mask(flexible.mask_mod, rows, 1, queries, keys, device="cpu")[:, 0], dense)


def test_no_slot_is_without_a_key_even_in_absent_blocks(draft: Any) -> None:
    for layer_type in set(draft.config.layer_types):
        assert dense_visibility(ANCHORS, CONTEXT, BLOCK, **layer_rules(draft.config, layer_type)).any(-1).all()


@torch.no_grad()
def states_together(draft: Any, taps: torch.Tensor, tokens: torch.Tensor, anchors: torch.Tensor, target: Any) -> Any:
    """All blocks in one forward, as in training: (B, A, K, H)."""
    config = draft.config
    blocks = make_blocks(
        tokens,
        torch.full((len(tokens),), tokens.shape[1], device=tokens.device),
        anchors,
        config.block_size,
        config.mask_token_id,
    )
    positions = torch.arange(taps.shape[1], device=taps.device).expand(len(tokens), -1)
    masks = training_masks(config, anchors, taps.shape[1], config._attn_implementation, taps.dtype)
    outputs = draft(
        noise_embeds=draft.embed_block(blocks.token_ids.flatten(1), target.get_input_embeddings()),
        context_hidden_states=taps,
        position_ids=torch.cat([positions, blocks.positions.flatten(1)], dim=1),
        attention_mask=masks,
    )
    return outputs.last_hidden_state.unflatten(1, blocks.token_ids.shape[1:])


@torch.no_grad()
def logits_of_drafting(draft: Any, taps: torch.Tensor, tokens: torch.Tensor, anchor: int, target: Any) -> torch.Tensor:
    """What `generate` drafts at an anchor: its drafter and cache, fed the context in two pieces, (1, K - 1, V)."""
    drafter = Drafter(draft, target.get_input_embeddings(), target.get_output_embeddings())
    drafter.begin(1, 0)
    first = max(anchor // 2, 1)
    drafter.observe(taps[:, :first], [first])
    if anchor > first:
        drafter.block_logits(tokens[:, first : first + 1], draft.config.block_size)
        drafter.observe(taps[:, first:anchor], [anchor - first])
    return drafter.block_logits(tokens[:, anchor : anchor + 1], draft.config.block_size)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", BLOCKWISE])
def test_training_and_decoding_compute_the_same_logits(draft: Any, qwen3: Any, implementation: str) -> None:
    draft.set_attn_implementation(implementation)
    tolerance = 1e-4 if implementation == "eager" else 1e-9  # the eager softmax works in float32
    tokens = random_prompt(CONTEXT, batch_size=2)
    target = FrozenTarget(qwen3, draft.config.target_layer_ids)
    taps = target.states(tokens, torch.ones_like(tokens))
    states = states_together(draft, taps, tokens, ANCHORS, qwen3)
    for row, anchors in enumerate(ANCHORS.tolist()):
        for block, anchor in enumerate(anchors):
            if anchor == NO_ANCHOR:
                continue
            trained = draft.compute_logits(states[row : row + 1, block], qwen3.get_output_embeddings())
            drafted = logits_of_drafting(draft, taps[row : row + 1], tokens[row : row + 1], anchor, qwen3)
            torch.testing.assert_close(trained, drafted, rtol=tolerance, atol=tolerance)


def test_flex_attention_with_the_block_mask_is_sdpa_with_the_dense_one(draft: Any) -> None:
    torch.manual_seed(0)
    length = ANCHORS.shape[1] * BLOCK
    queries = torch.randn(2, 2, length, 8)
    keys, values = torch.randn(2, 2, 2, CONTEXT + length, 8).unbind(0)
    for layer_type in set(draft.config.layer_types):
        rules = layer_rules(draft.config, layer_type)
        dense = dense_visibility(ANCHORS, CONTEXT, BLOCK, **rules)[:, None]
        expected = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=dense)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it was not compiled
            output = flex_attention(queries, keys, values, block_mask=block_mask(ANCHORS, CONTEXT, BLOCK, **rules))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_blockwise_attention_and_its_gradient_are_those_of_a_softmax_over_the_dense_mask(
    draft: Any, with_sinks: bool
) -> None:
    torch.manual_seed(0)
    length = ANCHORS.shape[1] * BLOCK
    queries = torch.randn(2, 4, length, 8, dtype=torch.float64, requires_grad=True)
    keys, values = torch.randn(2, 2, 2, CONTEXT + length, 8, dtype=torch.float64).requires_grad_().unbind(0)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(2, length, 4, 8, dtype=torch.float64)
    inputs = (queries, keys, values, *([sinks] if with_sinks else []))
    for layer_type in set(draft.config.layer_types):
        rules = layer_rules(draft.config, layer_type)
        dense = dense_visibility(ANCHORS, CONTEXT, BLOCK, **rules)[:, None]
        scores = (queries @ keys.repeat_interleave(2, 1).mT * 0.3).masked_fill(~dense, -torch.inf)
        sink = sinks.view(1, 4, 1, 1).expand(2, -1, length, 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1] if with_sinks else scores.softmax(-1)
        expected = (weights @ values.repeat_interleave(2, 1)).transpose(1, 2)
        seen = block_visibility(ANCHORS, CONTEXT, BLOCK, **rules)
        output, _ = blockwise_attention(
            draft, queries, keys, values, seen, scaling=0.3, s_aux=sinks if with_sinks else None
        )
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        for own, theirs in zip(
            torch.autograd.grad(output, inputs, wanted), torch.autograd.grad(expected, inputs, wanted), strict=True
        ):
            torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention trains on a GPU only")
def test_training_forward_is_the_same_with_flex_attention(qwen3: Any) -> None:
    draft, target = tiny_draft(qwen3, head_dim=16, **SLIDING).float().cuda(), qwen3.float().cuda()
    tokens, anchors = random_prompt(CONTEXT, batch_size=2).cuda(), ANCHORS.cuda()
    taps = FrozenTarget(target, draft.config.target_layer_ids).states(tokens, torch.ones_like(tokens))
    dense = states_together(draft, taps, tokens, anchors, target)
    draft.set_attn_implementation("flex_attention")
    flexible = states_together(draft, taps, tokens, anchors, target)
    torch.testing.assert_close(flexible, dense, rtol=2e-3, atol=2e-3)


def test_a_later_slot_changes_an_earlier_one_in_bidirectional_layers_only(qwen3: Any) -> None:
    for is_causal in (False, True):
        draft = tiny_draft(qwen3, is_causal=is_causal)
        block = torch.tensor([[5, 63, 63, 63]])
        other = torch.tensor([[5, 63, 63, 9]])
        masks = training_masks(draft.config, torch.tensor([[0]]), 0, "sdpa", torch.float64)
        embeddings = qwen3.get_input_embeddings()
        before, after = (
            draft(noise_embeds=draft.embed_block(ids, embeddings), attention_mask=masks).last_hidden_state
            for ids in (block, other)
        )
        assert torch.equal(before[:, 1], after[:, 1]) == is_causal


def test_blocks_do_not_see_each_other_nor_their_anchors_features(draft: Any, qwen3: Any) -> None:
    tokens = random_prompt(CONTEXT)
    anchors = torch.tensor([[6, 8]])
    taps = FrozenTarget(qwen3, draft.config.target_layer_ids).states(tokens, torch.ones_like(tokens))
    before = states_together(draft, taps, tokens, anchors, qwen3)
    changed_taps = taps.clone()
    changed_taps[:, 6:] += 1.0  # the anchor's own feature and all behind it
    changed_tokens = tokens.clone()
    changed_tokens[:, 8] = 1  # the other block's anchor
    after = states_together(draft, changed_taps, changed_tokens, anchors, qwen3)
    torch.testing.assert_close(after[:, 0], before[:, 0], rtol=0, atol=0)
    assert not torch.allclose(after[:, 1], before[:, 1])
