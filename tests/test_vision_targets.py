"""Vision-language targets: images stay the target's business, the draft sees plain one-dimensional positions.

Shapes: B batch, S context, K block, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

from comparing import assert_same_text
from helpers import PAD, greedy, left_padded, random_prompt, scramble, tiny_draft
from oracle import OracleDraft

IMAGE, START, END = 60, 58, 59
WITHOUT_IMAGES = {"suppress_tokens": [START, END, IMAGE, 61]}  # a random model would write some, and has none to show
NEW_TOKENS = 16


@cache
def vision_target(kind: str) -> Any:
    """A tiny float64 Qwen2.5-VL or Qwen3-VL with random weights, shared: do not change it."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
    }
    if kind == "Qwen3VL":
        text |= {"head_dim": 8, "rope_parameters": rope | {"mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    else:
        vision |= {"window_size": 8, "fullatt_block_indexes": [0]}
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": 61,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    scramble(model, 0)
    model.generation_config.pad_token_id = PAD
    return model.to(torch.float64).eval()


def inputs_for(has_image: bool) -> dict[str, torch.Tensor]:
    """Text, with four image tokens in its middle if asked for."""
    ids = random_prompt(9, vocabulary=50)
    if not has_image:
        return {"input_ids": ids}
    ids = torch.cat([ids[:, :3], torch.tensor([[START, *[IMAGE] * 4, END]]), ids[:, 3:]], dim=1)
    pixels = torch.randn(16, 3 * 4 * 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


class VisionOracle(OracleDraft):
    """An oracle whose target looked at an image. It refuses any block that is not where the text really is."""

    extra: dict[str, torch.Tensor]

    @torch.no_grad()
    def _taps_of(self, target: Any, row: torch.Tensor) -> torch.Tensor:
        extra = dict(self.extra)
        if extra:
            prompt = extra["mm_token_type_ids"]
            extra["mm_token_type_ids"] = torch.nn.functional.pad(prompt, (0, len(row) - prompt.shape[1]))
        states = target(row[None], output_hidden_states=True, use_cache=False, **extra).hidden_states
        return torch.cat([states[tap + 1] for tap in self.config.target_layer_ids], dim=-1)[0]


def oracle_for(target: Any, inputs: dict[str, torch.Tensor], depth: int) -> Any:
    draft = tiny_draft(target, draft_class=VisionOracle)
    draft.extra = {key: value for key, value in inputs.items() if key != "input_ids"}
    row = target.generate(**inputs, max_new_tokens=NEW_TOKENS + 4, do_sample=False, **WITHOUT_IMAGES)[0]
    draft.tell(target, [row], depth)
    return draft


@pytest.mark.parametrize("tree_budget", [0, 12])
@pytest.mark.parametrize("has_image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_text_is_the_targets_own_and_good_drafts_are_accepted(kind: str, has_image: bool, tree_budget: int) -> None:
    """An image takes fewer positions than tokens, so positions that ran on by the token would show."""
    target, inputs = vision_target(kind), inputs_for(has_image)
    for depth in (0, 2, 3):
        draft = oracle_for(target, inputs, depth)
        draft.generation_config.draft_tree_budget = tree_budget
        output = assert_same_text(target, draft, inputs, NEW_TOKENS, **WITHOUT_IMAGES)
        assert all(count > depth for count in output.acceptance_lengths[0][:-1])


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_image_changes_what_is_drafted_from(kind: str) -> None:
    """The oracle that was told of another image finds other states than it expects."""
    target, inputs = vision_target(kind), inputs_for(True)
    draft = oracle_for(target, inputs, 3)
    other = inputs | {"pixel_values": -inputs["pixel_values"]}
    with pytest.raises(AssertionError, match="wrong states"):
        target.generate(**other, assistant_model=draft, max_new_tokens=NEW_TOKENS, do_sample=False, **WITHOUT_IMAGES)


@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_draft_sees_plain_positions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, inputs = vision_target(kind), inputs_for(True)
    draft = oracle_for(target, inputs, 1)
    seen: list[torch.Tensor] = []
    handle = draft.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    output = assert_same_text(target, draft, inputs, NEW_TOKENS, **WITHOUT_IMAGES)
    handle.remove()
    assert all(positions.dim() == 2 and (positions.diff(dim=1) == 1).all() for positions in seen)
    context_ends = [int(positions[0, -1]) for positions in seen]
    lengths = [inputs["input_ids"].shape[1]]
    for count in output.acceptance_lengths[0][:-1]:
        lengths.append(lengths[-1] + count)
    blocks = [min(4, inputs["input_ids"].shape[1] + NEW_TOKENS - length) for length in lengths]
    assert context_ends == [length + block - 1 for length, block in zip(lengths, blocks, strict=True)][: len(seen)]


@pytest.mark.parametrize("tree_budget", [0, 12])
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_ragged_batch_of_text(kind: str, tree_budget: int) -> None:
    target = vision_target(kind)
    rows = [random_prompt(length, seed=length, vocabulary=50)[0] for length in (3, 9, 6)]
    draft = tiny_draft(target, draft_class=VisionOracle)
    draft.extra = {}
    told = [greedy(target, row[None], NEW_TOKENS + 4)[0] for row in rows]
    draft.tell(target, told, [0, 3, 1, 2])
    draft.generation_config.draft_tree_budget = tree_budget
    output = target.generate(
        **left_padded(rows),
        assistant_model=draft,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
    )
    for text, row, truth in zip(output.sequences, rows, told, strict=True):
        assert text[9:].tolist() == truth[len(row) : len(row) + NEW_TOKENS].tolist()
    assert max(map(max, output.acceptance_lengths)) == 4
