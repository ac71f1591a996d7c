"""DFlashConfig: every field that changes what a DFlash draft computes, validated in one place (arXiv 2602.06036)."""

from collections.abc import Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

# `dflash_config` is the dialect of z-lab's checkpoints; each of its keys has one flat name here.
NESTED_NAMES = {
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "target_layer_ids",
    "block_size": "block_size",
    "num_target_layers": "num_target_layers",
    "causal": "is_causal",
    "is_causal": "is_causal",
    "input_embedding_scale": "input_embedding_scale",
    "output_multiplier": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_sink_bias": "attention_sinks",
    "attention_value_scale": "attention_value_scale",
    "sample_from_anchor": "slots_predict_next",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "markov_rank": "markov_rank",
    "markov_head_type": "markov_head_type",
    "enable_confidence_head": "confidence_head",
    "confidence_head_with_markov": "confidence_head_with_markov",
}

# Parts that only some published drafts have, and what their fields are when a draft has none of them.
OPTIONAL_PARTS: dict[str, Any] = {
    "draft_vocab_size": None,
    "own_embedding": False,
    "own_head": False,
    "own_mask_embedding": False,
    "slots_predict_next": False,
    "window_from_anchor": False,
    "attention_sinks": False,
    "attention_value_scale": None,
    "tap_norms": False,
    "conv_kernel_size": None,
    "conv_group_size": None,
    "selector_rank": None,
    "selector_top_k": None,
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "confidence_head": False,
    "confidence_head_with_markov": False,
}
# What is known of the training. Nothing is computed from it; `generate` warns where a pair is known to be poor.
TRAINING_FACTS: dict[str, Any] = {"trained_length": None, "trained_with_thinking": None}
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Fields that are null or a number above 0: whole ones, and factors.
COUNTS = (
    "num_target_layers", "draft_vocab_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "trained_length",
)  # fmt: skip
FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "attention_value_scale")

# Kinds of RoPE that a draft can have, and the numbers that each needs.
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),  # lists of numbers, one for each pair of channels
}


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """The paper's taps: `num_taps` layers, evenly spaced from the second layer to the third from the end (section 3).

    Ids are 0-based layer outputs: id `i` is `hidden_states[i + 1]` of the target.
    """
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_taps - 1)) for i in range(num_taps)]


class DFlashConfig(Qwen3Config):
    """Configuration of a DFlash draft: Qwen3's fields plus the ones below.

    Args:
        block_size: Number of tokens the draft was trained to fill in one forward, the anchor included (K).
        mask_token_id: Token of the target's vocabulary that stands for "to be filled" in a block.
        target_layer_ids: Taps. Target layers whose outputs the draft reads, 0-based: id `i` is `hidden_states[i + 1]`,
            and -1 is the target's embedding output.
            Default: the paper's choice for `num_target_layers`, as many taps as draft layers.
        num_target_layers: Number of layers of the target, where known.
        is_causal: Whether a block's queries see only keys at or before their own position. `None`: sliding layers are
            causal, full layers bidirectional.
        input_embedding_scale: Factor on the rows of the target's embedding table. `None`: what the target's own
            embedding module does (Gemma's multiplies by the root of the hidden size).
        output_multiplier: Factor on the draft's logits.
        final_logit_softcapping: Cap `c` of `c * tanh(logits / c)`, as in the target's own forward. `None`: no cap.
        dflash_config: The nested dialect of the same fields. Both dialects may be present if they agree.
        own_embedding: The draft embeds its blocks with a table of its own, not with the target's.
        own_head: The draft's logits come from a head of its own, not from the target's.
        draft_vocab_size: Rows of that head where it covers a part of the vocabulary only. `None`: all of it.
        own_mask_embedding: A vector of the draft's own stands for the mask token.
        slots_predict_next: Every slot predicts the token after its own, so the anchor's slot proposes, too: K
            proposals from K slots. False: every slot but the anchor's predicts its own token, K - 1 proposals.
        window_from_anchor: Sliding layers measure the distance of context from the anchor, not from each query.
        attention_sinks: Every attention head has a learned logit that takes weight and gives no value.
        attention_value_scale: Factor on the attention's values. `None`: 1.
        tap_norms: Every tap has an RMSNorm of its own before the fusion.
        conv_kernel_size, conv_group_size: DFlash 2's convolutions around every sublayer: kernel taps, and channels
            that share a dynamic kernel. `None`: none.
        selector_rank, selector_top_k: DFlash 2's candidate selector: rank, and candidates of a slot. `None`: none.
        markov_rank, markov_head_type: DSpark's Markov head: rank (0: none) and `vanilla`, `gated` or `rnn`.
        confidence_head, confidence_head_with_markov: DSpark's confidence head, and whether it reads the Markov head's
            embedding of the token before, too.
        trained_length: Tokens of the longest sequences of the training. `None`: unknown.
        trained_with_thinking: Whether the answers it was trained on think. `None`: unknown.
        kwargs: Fields of [`~transformers.Qwen3Config`]. A sliding layer sees keys at a distance below
            `sliding_window`, on both sides where it is bidirectional.

    Raises:
        ValueError: For a field out of its range, two dialects that disagree, or a file without a RoPE base.
    """

    model_type = "dflash"

    def __init__(
        self,
        block_size: int | None = None,
        mask_token_id: int | None = None,
        target_layer_ids: Sequence[int] | None = None,
        num_target_layers: int | None = None,
        is_causal: bool | None = None,
        input_embedding_scale: float | None = None,
        output_multiplier: float | None = None,
        final_logit_softcapping: float | None = None,
        dflash_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        flat: dict[str, Any] = {
            "block_size": block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": target_layer_ids,
            "num_target_layers": num_target_layers,
            "is_causal": is_causal,
            "input_embedding_scale": input_embedding_scale,
            "output_multiplier": output_multiplier,
            "final_logit_softcapping": final_logit_softcapping,
        }
        optional = OPTIONAL_PARTS | TRAINING_FACTS
        flat.update({name: kwargs.pop(name, None) for name in optional})
        flat = merge_dialects(flat, {} if dflash_config is None else dflash_config)
        _check_dtype(kwargs.get("dtype", kwargs.get("torch_dtype")))
        kinds = kwargs.get("layer_types")
        slides = isinstance(kinds, (list, tuple)) and "sliding_attention" in kinds
        if slides and kwargs.get("sliding_window") is not None:
            kwargs["use_sliding_window"] = True
        try:
            super().__init__(**kwargs)
        except (StrictDataclassError, KeyError, ZeroDivisionError) as error:  # the latter two of RoPE's parameters
            cause = error.__cause__ or error
            message = cause.args[0] if isinstance(cause, KeyError) else str(cause)
            raise ValueError(f"DFlashConfig: {' '.join(message.split())}") from error
        self.block_size = 16 if flat["block_size"] is None else flat["block_size"]
        self.mask_token_id = flat["mask_token_id"]
        self.num_target_layers = flat["num_target_layers"]
        self.target_layer_ids = flat["target_layer_ids"]
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        self.is_causal = flat["is_causal"]
        self.input_embedding_scale = flat["input_embedding_scale"]
        self.output_multiplier = 1.0 if flat["output_multiplier"] is None else flat["output_multiplier"]
        self.final_logit_softcapping = flat["final_logit_softcapping"]
        for name, unused in optional.items():
            setattr(self, name, unused if flat[name] is None else flat[name])
        self._validate_body()
        self._validate_numbers()
        self._validate_draft_fields()
        self._validate_optional_parts()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "DFlashConfig":
        """Like [`~transformers.PreTrainedConfig.from_dict`]; refuses a file that names no RoPE base, or two."""
        bases = _rope_bases(config_dict)
        if not bases:
            raise ValueError(
                "The draft's config names no RoPE base: neither `rope_theta` nor `rope_parameters.rope_theta` is "
                "there; add the base the draft was trained with, since a guess would lower acceptance silently."
            )
        (first, base), (last, other) = next(iter(bases.items())), list(bases.items())[-1]
        if base != other:
            raise ValueError(
                f"`{first}` is {base!r} but `{last}` is {other!r}; remove the wrong one from the draft's config.json."
            )
        return super().from_dict(config_dict, **kwargs)

    @property
    def num_proposals(self) -> int:
        """Tokens that one block proposes: K, or K - 1 where the anchor's slot predicts nothing."""
        return self.block_size if self.slots_predict_next else self.block_size - 1

    @property
    def proposes_stepwise(self) -> bool:
        """Whether a proposal depends on the ones before it in its block (a selector or a Markov head)."""
        return self.selector_rank is not None or self.markov_rank > 0

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether layer `layer_idx` hides keys after the query: `is_causal`, or by default in sliding layers only."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    def _validate_body(self) -> None:
        """What Qwen3's own class leaves to the first forward, or to a table of functions that lacks the name."""
        from transformers.activations import ACT2FN

        if self.hidden_act not in ACT2FN:
            raise ValueError(
                f"`hidden_act` is {self.hidden_act!r}, which Transformers has no function for; correct it."
            )
        unknown = [kind for kind in self.layer_types if kind not in LAYER_TYPES]
        if unknown:
            raise ValueError(
                f"`layer_types` names {unknown[0]!r}; a draft's layers are {' or '.join(map(repr, LAYER_TYPES))}."
            )
        rope = self.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_NUMBERS:
            raise ValueError(f"`rope_type` must be one of {', '.join(ROPE_NUMBERS)}, got {kind!r}.")
        for name in ("rope_theta", *ROPE_NUMBERS[kind]):
            value = rope.get(name)
            if not all(map(_is_positive, value if kind == "longrope" and isinstance(value, list) else [value])):
                raise ValueError(
                    f"`rope_parameters.{name}` must be a number above 0 where `rope_type` is {kind!r}, got "
                    f"{value!r}; add the one of the draft's training."
                )

    def _validate_numbers(self) -> None:
        for names, kind, is_valid in ((COUNTS, "whole number", _is_int), (FACTORS, "number", _is_positive)):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (is_valid(value) and value > 0):
                    raise ValueError(f"`{name}` must be a {kind} above 0, or null, got {value!r}; correct it.")

    def _validate_draft_fields(self) -> None:
        if not _is_int(self.block_size) or self.block_size < 2:
            raise ValueError(
                f"`block_size` must be an integer of at least 2, got {self.block_size!r}; a block holds the anchor "
                "and at least one proposal."
            )
        if self.mask_token_id is not None and (
            not _is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size
        ):
            raise ValueError(
                f"`mask_token_id` must lie in the target's vocabulary, 0 to {self.vocab_size - 1} (`vocab_size` "
                f"{self.vocab_size}), got {self.mask_token_id!r}; name a token the target has."
            )
        self._validate_taps()
        if self.is_causal is not None and not isinstance(self.is_causal, bool):
            raise ValueError(
                f"`is_causal` must be true, false or null, got {self.is_causal!r}; null means causal in sliding "
                "layers only."
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries but `num_hidden_layers` is "
                f"{self.num_hidden_layers}; give one entry per layer."
            )
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"`sliding_window` is {self.sliding_window} but `block_size` is {self.block_size}; a sliding layer "
                "needs a window at least as long as the block."
            )

    def _validate_optional_parts(self) -> None:
        if self.draft_vocab_size is not None:
            if not self.own_head:
                raise ValueError(
                    f"`draft_vocab_size` is {self.draft_vocab_size} but `own_head` is false; only a head of the "
                    "draft's own can cover a part of the vocabulary."
                )
            if not _is_int(self.draft_vocab_size) or not 0 < self.draft_vocab_size < self.vocab_size:
                raise ValueError(
                    f"`draft_vocab_size` must be a part of `vocab_size` {self.vocab_size}, got "
                    f"{self.draft_vocab_size!r}; null means the whole vocabulary."
                )
        if (self.conv_kernel_size is None) != (self.conv_group_size is None):
            raise ValueError(
                f"`conv_kernel_size` is {self.conv_kernel_size} and `conv_group_size` {self.conv_group_size}; a "
                "convolution needs both."
            )
        if self.conv_group_size is not None and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"`conv_group_size` {self.conv_group_size} does not divide `hidden_size` {self.hidden_size}; every "
                "group must have the same number of channels."
            )
        if (self.selector_rank is None) != (self.selector_top_k is None):
            raise ValueError(
                f"`selector_rank` is {self.selector_rank} and `selector_top_k` {self.selector_top_k}; a selector "
                "needs both."
            )
        if self.selector_top_k is not None and self.draft_vocab_size is not None:
            raise ValueError(
                f"`selector_top_k` is {self.selector_top_k} and `draft_vocab_size` {self.draft_vocab_size}; a "
                "selector needs a head of the whole vocabulary."
            )
        self._validate_sequential_heads()

    def _validate_sequential_heads(self) -> None:
        if not _is_int(self.markov_rank) or self.markov_rank < 0:
            raise ValueError(f"`markov_rank` must be 0 (no Markov head) or more, got {self.markov_rank!r}.")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"`markov_head_type` must be one of {', '.join(MARKOV_HEAD_TYPES)}, got {self.markov_head_type!r}."
            )
        if self.markov_rank and self.selector_rank is not None:
            raise ValueError(
                f"`markov_rank` is {self.markov_rank} and `selector_rank` {self.selector_rank}; a draft has one way "
                "of choosing tokens one after the other, so set one of them to null or 0."
            )
        if self.confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ValueError(
                "`confidence_head_with_markov` is true but `markov_rank` is 0; without a Markov head it must be false."
            )

    def _validate_taps(self) -> None:
        taps = self.target_layer_ids
        if taps is None:
            return
        if not isinstance(taps, (list, tuple)) or not taps or not all(_is_int(tap) and tap >= -1 for tap in taps):
            raise ValueError(
                f"`target_layer_ids` must be a non-empty list of layer numbers counted from 0, got {taps!r}."
            )
        self.target_layer_ids = list(taps)
        if self.num_target_layers is not None and max(taps) >= self.num_target_layers:
            raise ValueError(
                f"`target_layer_ids` names layer {max(taps)} but `num_target_layers` is {self.num_target_layers}, so "
                f"the last layer is {self.num_target_layers - 1}; ids count layer outputs from 0."
            )


def merge_dialects(flat: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """Fold the nested `dflash_config` into the flat fields.

    Raises:
        ValueError: If a nested field is unknown, or both dialects give a field different values.
    """
    merged = dict(flat)
    if not isinstance(nested, dict):
        raise ValueError(f"`dflash_config` must be an object of fields, got {nested!r}; see z-lab's checkpoints.")
    for nested_name, value in nested.items():
        if nested_name not in NESTED_NAMES:
            raise ValueError(
                f"`dflash_config.{nested_name}` ({value!r}) is not understood; known fields are "
                f"{sorted(NESTED_NAMES)}; ignoring it could lower acceptance silently."
            )
        name = NESTED_NAMES[nested_name]
        if value is None:
            continue
        known = merged.get(name)
        if known is not None and _plain(known) != _plain(value):
            raise ValueError(
                f"`{name}` is {known!r} at the top level but {value!r} in `dflash_config.{nested_name}`; remove the "
                "wrong one from the draft's config.json."
            )
        merged[name] = value
    return merged


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _check_dtype(dtype: Any) -> None:
    """Transformers looks a dtype's name up in torch as it stands."""
    if dtype is None:
        return
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"`dtype` is {dtype!r}, which torch does not have; name one such as 'bfloat16'.")


def _rope_bases(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Every place of a file that names a RoPE base, and the base there."""
    bases = {"rope_theta": config_dict.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        parameters = config_dict.get(name)
        if parameters is None:
            continue
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise ValueError(
                f"`{name}` must be an object of numbers, got {parameters!r}; all layers of a draft share one RoPE."
            )
        bases[f"{name}.rope_theta"] = parameters.get("rope_theta")
    return {place: base for place, base in bases.items() if base is not None}


__all__ = ["DFlashConfig", "default_target_layer_ids"]
