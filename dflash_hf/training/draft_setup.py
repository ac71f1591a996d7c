"""A new draft for a target: its configuration, and a start from the target's own last layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..checkpoints.loading import SPECIAL_TOKENS
from ..configuration_dflash import DFlashConfig, default_target_layer_ids
from ..modeling_dflash import Qwen3DFlashForDraft
from .target import decoder_layers

RESERVED_NAMES = ("mask", "reserved", "unused", "extra_id", "placeholder", "dummy")
DEFAULT_TAPS = 5


def draft_config_for(
    target_config: Any,
    mask_token_id: int,
    block_size: int = 16,
    num_layers: int = 5,
    target_layer_ids: Sequence[int] | None = None,
    **fields: Any,
) -> DFlashConfig:
    """The configuration of a draft for a target, whose width, heads, vocabulary, positions and logit cap it takes.

    Args:
        target_config: Of a causal language model; its text part is used.
        mask_token_id: As chosen by `pick_mask_token`.
        block_size: Tokens of a block, the anchor included.
        num_layers: Layers of the draft.
        target_layer_ids: Taps. Default: five by the paper's rule, fewer in a target of fewer layers.
        fields: More fields of [`DFlashConfig`], which win.

    Raises:
        ValueError: As [`DFlashConfig`]; and for a target without rotary positions, unless `rope_parameters` are given.
    """
    text = target_config.get_text_config(decoder=True)
    num_target_layers = text.num_hidden_layers
    if target_layer_ids is None:
        taps = min(DEFAULT_TAPS, max(num_target_layers - 3, 1))
        target_layer_ids = default_target_layer_ids(num_target_layers, taps)
    heads = text.num_attention_heads
    return DFlashConfig(
        **{
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": list(target_layer_ids),
            "num_target_layers": num_target_layers,
            "num_hidden_layers": num_layers,
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "max_position_embeddings": text.max_position_embeddings,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "rope_parameters": rope_of(text) if "rope_parameters" not in fields else None,
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            "tie_word_embeddings": False,
            # A text-generation pipeline wants the assistant's to be the target's.
            **{name: getattr(text, name, None) for name in SPECIAL_TOKENS},
            **fields,
        }
    )


def rope_of(text: Any) -> dict[str, Any]:
    """The target's rotary positions; of a target with one set per layer type, those of its full layers."""
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        raise ValueError(
            f"the target's {text.model_type} configuration has no `rope_parameters`, and the draft's positions are "
            "rotary; give `rope_parameters`, for example {'rope_type': 'default', 'rope_theta': 10000.0}."
        )
    if "rope_theta" not in rope:
        rope = rope.get("full_attention") or next(iter(rope.values()))
    rope = dict(rope)
    rope.pop("partial_rotary_factor", None)  # the draft rotates whole heads
    return rope


def pick_mask_token(tokenizer: Any, vocab_size: int) -> int:
    """A token for masked slots that never occurs in text.

    In this order: the tokenizer's own mask token; a row of the target's table that no token uses; a special token
    whose name says that it is reserved.

    Raises:
        ValueError: If there is none; it names the way out.
    """
    if tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    used = set(tokenizer.get_vocab().values())
    if free := [row for row in range(vocab_size) if row not in used]:
        return free[0]
    for token_id in sorted(special_tokens(tokenizer)):
        name = tokenizer.convert_ids_to_tokens(token_id).lower()
        if any(word in name for word in RESERVED_NAMES):
            return token_id
    raise ValueError(
        f"the tokenizer has no mask token, uses all {vocab_size} rows of the target's table, and none of its special "
        "tokens says that it is reserved; name one that never occurs in your texts with `mask_token_id`."
    )


def check_mask_token(mask_token_id: int, tokenizer: Any, vocab_size: int) -> None:
    """Refuse a mask token that occurs in text, or that the target does not have.

    Raises:
        ValueError: Names the token.
    """
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id} but the target's table has {vocab_size} rows, 0 to {vocab_size - 1}; "
            "choose a row that it has, since the target is frozen and a new one would never be trained."
        )
    name = tokenizer.convert_ids_to_tokens(mask_token_id)
    in_use = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    is_text = name is not None and mask_token_id not in special_tokens(tokenizer)
    if is_text or mask_token_id in in_use:
        raise ValueError(
            f"`mask_token_id` {mask_token_id} is the token {name!r}, which the tokenizer uses; choose a reserved one "
            "or leave it out."
        )


def special_tokens(tokenizer: Any) -> set[int]:
    """Ids of the tokens that ordinary text never becomes."""
    added = {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return added | set(tokenizer.all_special_ids)


@torch.no_grad()
def start_from_target(draft: Qwen3DFlashForDraft, target: Any) -> list[str]:
    """Copy the target's last layers, and make the context its last tap; returns the names of what was copied.

    The projections of a layer fit where names and shapes do. A target without query and key norms gets the gain that
    leaves the size of its queries and keys as it is. What does not fit stays as it was.
    """
    layers = decoder_layers(target)[-len(draft.layers) :]
    copied: list[str] = []
    own: Any
    for index, (own, theirs) in enumerate(zip(draft.layers, layers, strict=True)):
        parameters = dict(theirs.named_parameters())
        for name, parameter in own.named_parameters():
            source = parameters.get(name)
            if source is not None and source.shape == parameter.shape:
                parameter.copy_(source)
                copied.append(f"layers.{index}.{name}")
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            name = f"self_attn.{norm}.weight"
            if name not in parameters and f"layers.{index}.self_attn.{projection}.weight" in copied:
                weight = getattr(own.self_attn, projection).weight * own.input_layernorm.weight
                getattr(own.self_attn, norm).weight.fill_(weight.pow(2).sum(1).mean().sqrt())
    if "layers.0.input_layernorm.weight" in copied:
        first: Any = draft.layers[0]
        draft.hidden_norm.weight.copy_(first.input_layernorm.weight)
        size = draft.config.hidden_size
        draft.fc.weight.zero_()
        draft.fc.weight[:, -size:] = torch.eye(size)
        copied += ["fc.weight", "hidden_norm.weight"]
    norm = getattr(target.base_model, "norm", None)
    if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.shape == draft.norm.weight.shape:
        draft.norm.weight.copy_(norm.weight)
        copied.append("norm.weight")
    return copied
