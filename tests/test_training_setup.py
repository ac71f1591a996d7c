"""A new draft for a target: configuration, mask token, start from its layers; and targets that cannot be used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dflash_hf.generation.pairing import check_pair
from dflash_hf.modeling_dflash import Qwen3DFlashForDraft
from dflash_hf.training import draft_setup
from dflash_hf.training.arguments import RunArguments
from dflash_hf.training.target import FrozenTarget, RestrictedHead
from dflash_hf.training.train_command import make_draft
from helpers import random_prompt, tiny_target


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "gemma3", "mixtral", "gpt_oss"])
def test_a_draft_takes_its_shape_from_the_target(family: str) -> None:
    target = tiny_target(family)
    config = draft_setup.draft_config_for(target.config, 63, block_size=4, num_layers=2)
    text = target.config.get_text_config()
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(config, name) == getattr(text, name)
    assert config.num_target_layers == 4
    assert config.rope_parameters["rope_theta"] == draft_setup.rope_of(text)["rope_theta"]
    check_pair(target, Qwen3DFlashForDraft(config))


def test_taps_follow_the_papers_rule_and_the_logit_cap_the_target() -> None:
    config = tiny_target("gemma3", final_logit_softcapping=7.0).config
    config.num_hidden_layers = 36
    draft = draft_setup.draft_config_for(config, 63, block_size=4, num_layers=2)
    assert draft.target_layer_ids == [1, 9, 17, 25, 33]
    assert draft.final_logit_softcapping == 7.0


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_a_new_draft_says_the_scale_of_its_targets_embeddings(family: str) -> None:
    target = tiny_target(family)
    args = RunArguments("data", mask_token_id=63, draft_layers=2, block_size=4)
    draft = make_draft(args, target, tokenizer_of([str(i) for i in range(64)], special=[63])).double()
    tokens = random_prompt(5)
    embeddings = target.get_input_embeddings()
    scale = target.config.get_text_config().hidden_size ** 0.5 if family == "gemma3" else None
    assert draft.config.input_embedding_scale == (None if scale is None else pytest.approx(scale))
    as_zlab_reads_it = functional.embedding(tokens, embeddings.weight) * (draft.config.input_embedding_scale or 1.0)
    torch.testing.assert_close(draft.embed_block(tokens, embeddings), as_zlab_reads_it)
    torch.testing.assert_close(embeddings(tokens), as_zlab_reads_it)


def test_a_target_without_rotary_positions_needs_them_named() -> None:
    config = tiny_target("gpt2").config
    with pytest.raises(ValueError, match="gpt2 configuration has no `rope_parameters`"):
        draft_setup.draft_config_for(config, 63)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    assert draft_setup.draft_config_for(config, 63, rope_parameters=rope).rope_parameters["rope_theta"] == 10_000.0


def tokenizer_of(names: list[str], special: list[int], **fields: Any) -> Any:
    """As much of a tokenizer as the choice of a mask token looks at."""
    defaults = {
        "mask_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "unk_token_id": None,
    }
    return SimpleNamespace(
        get_vocab=lambda: {name: index for index, name in enumerate(names)},
        convert_ids_to_tokens=lambda index: names[index] if index < len(names) else None,
        added_tokens_decoder={index: SimpleNamespace(special=True) for index in special},
        all_special_ids=[0, 1],
        **(defaults | fields),
    )


def test_the_mask_token_is_the_tokenizers_own_or_an_unused_row_or_a_reserved_token() -> None:
    names = ["<s>", "</s>", "a", "<|reserved_7|>", "unused"]
    assert draft_setup.pick_mask_token(tokenizer_of(names, [3], mask_token_id=2), 8) == 2
    assert draft_setup.pick_mask_token(tokenizer_of(names, [3]), 8) == 5
    assert draft_setup.pick_mask_token(tokenizer_of(names, [3]), 5) == 3  # the word "unused" is text
    with pytest.raises(ValueError, match=r"uses all 3 rows .* `mask_token_id`"):
        draft_setup.pick_mask_token(tokenizer_of(names[:3], []), 3)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (2, "is the token 'a', which the tokenizer uses"),
        (1, "is the token '</s>', which the tokenizer uses"),
        (9, "the target's table has 8 rows, 0 to 7"),
        (-1, "the target's table has 8 rows"),
    ],
)
def test_a_mask_token_that_occurs_in_text_or_is_not_there_is_refused(token: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draft_setup.check_mask_token(token, tokenizer_of(["<s>", "</s>", "a", "<|x|>"], [3]), 8)


def test_reserved_tokens_and_rows_without_a_token_may_be_masks() -> None:
    for token in (3, 6):
        draft_setup.check_mask_token(token, tokenizer_of(["<s>", "</s>", "a", "<|x|>"], [3]), 8)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_start_from_the_target_has_its_last_layers_keys(family: str) -> None:
    """The first draft layer's keys and values of the context are those of the target's layer behind the last tap."""
    target = tiny_target(family)
    config = draft_setup.draft_config_for(target.config, 63, 4, num_layers=1, target_layer_ids=[0, 2])
    draft = Qwen3DFlashForDraft(config).double()
    copied = draft_setup.start_from_target(draft, target)
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= set(copied)
    tokens = random_prompt(9)
    taps = FrozenTarget(target, [0, 2]).states(tokens, torch.ones_like(tokens))
    layer = target.model.layers[-1]
    inputs: list[torch.Tensor] = []
    handle = layer.self_attn.v_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    target(tokens)
    handle.remove()
    torch.testing.assert_close(draft.fuse(taps), inputs[0])
    if family == "llama":  # which has no norms on queries and keys: the gain keeps their size
        keys = layer.self_attn.k_proj(inputs[0]).view(-1, 2, 8)
        own = draft.layers[0].self_attn.k_norm(keys)
        assert 0.6 < float(own.norm() / keys.norm()) < 1.6


def test_target_states_are_the_layer_outputs_and_its_logits_those_of_its_forward() -> None:
    target = tiny_target("gemma3", final_logit_softcapping=5.0)
    tokens = random_prompt(7, batch_size=2)
    frozen = FrozenTarget(target, [0, 2])
    states = frozen.states(tokens, torch.ones_like(tokens), with_head_inputs=True)
    outputs = target(tokens, output_hidden_states=True)
    torch.testing.assert_close(states[..., :64], torch.cat([outputs.hidden_states[i] for i in (1, 3)], dim=-1))
    torch.testing.assert_close(frozen.logits(states[..., 64:]), outputs.logits)


def test_a_target_that_changes_its_logits_after_the_head_is_not_distilled() -> None:
    target = tiny_target("qwen3")
    forward = target.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        outputs.logits = outputs.logits * 3
        return outputs

    target.forward = scaled
    tokens = random_prompt(5)
    frozen = FrozenTarget(target, [0])
    frozen.states(tokens, torch.ones_like(tokens))
    with pytest.raises(ValueError, match="`loss` cannot be 'kl'"):
        frozen.states(tokens, torch.ones_like(tokens), with_head_inputs=True)


def test_a_tied_target_trains_through_its_embedding(tmp_path: Any) -> None:
    tiny_target("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    target = type(tiny_target("qwen3")).from_pretrained(tmp_path, dtype=torch.float64)
    frozen = FrozenTarget(target, [0])
    assert torch.equal(frozen.head.weight, target.get_input_embeddings().weight)
    target.lm_head.weight = nn.Parameter(torch.randn_like(target.lm_head.weight))
    with pytest.raises(ValueError, match="`tie_word_embeddings` is true but"):
        FrozenTarget(target, [0])


def test_an_offloaded_or_headless_target_is_refused() -> None:
    target = tiny_target("qwen3")
    target.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="the target is offloaded: 11 of its parameters"):
        FrozenTarget(target, [0])
    headless = tiny_target("qwen3")
    headless.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="has no language-model head"):
        FrozenTarget(headless, [0])


def test_a_quantised_head_trains_whole_and_is_not_restricted() -> None:
    class Int8Linear(nn.Linear):
        """Stands for a quantised layer: a linear one by name only."""

    with pytest.raises(ValueError, match="head is a Int8Linear, not a plain linear layer"):
        RestrictedHead(Int8Linear(4, 9), torch.arange(3))
