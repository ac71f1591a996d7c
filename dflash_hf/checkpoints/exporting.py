"""Drafts in other formats, with the fields that the engines reading those formats look for, in their conventions.

A format that has no way to say what a draft does is refused: the engine would load it and propose worse tokens.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from .formats import NATIVE, SPECULATORS, ZLAB
from .targets import embedding_scale, target_config, text_config

if TYPE_CHECKING:
    import torch

    from ..configuration_dflash import DFlashConfig

logger = logging.get_logger(__name__)

Fields = dict[str, Any]
Tensors = dict[str, "torch.Tensor"]

SPECULATORS_VERSION = "0.9.0"  # whose config classes and weight names are written

# Fields of the body, as z-lab's checkpoints and a speculators `transformer_layer_config` both list them.
BODY_FIELDS = (
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings", "max_window_layers",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps",
    "rope_parameters", "sliding_window", "tie_word_embeddings", "use_cache", "use_sliding_window", "vocab_size",
)  # fmt: skip
NATIVE_FIELDS = (
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "head_dim", "hidden_act", "hidden_size",
    "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "block_size", "mask_token_id",
    "target_layer_ids", "num_target_layers", "vocab_size",
)  # fmt: skip

# What each optional field of `DFlashConfig` is when the draft does not use it.
UNUSED: Fields = {
    "own_embedding": False,
    "own_head": False,
    "draft_vocab_size": None,
    "own_mask_embedding": False,
    "slots_predict_next": False,
    "window_from_anchor": False,
    "attention_sinks": False,
    "attention_value_scale": None,
    "tap_norms": False,
    "input_embedding_scale": None,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "conv_kernel_size": None,
    "selector_rank": None,
    "markov_rank": 0,
    "confidence_head": False,
}

DFLASH_2 = frozenset(("conv_kernel_size", "selector_rank"))
DSPARK = frozenset(("markov_rank", "confidence_head"))
EXPRESSIBLE = {
    ZLAB: {
        *DFLASH_2, *DSPARK, "slots_predict_next", "attention_sinks", "attention_value_scale", "input_embedding_scale",
        "output_multiplier", "final_logit_softcapping", "own_mask_embedding",
    },
    SPECULATORS: {
        *DFLASH_2, *DSPARK, "own_embedding", "own_head", "draft_vocab_size", "slots_predict_next",
        "window_from_anchor", "input_embedding_scale",
    },
    NATIVE: {"input_embedding_scale"},
}  # fmt: skip
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}


def export_draft(
    config: "DFlashConfig", tensors: Tensors, to: str, target: str | None = None
) -> tuple[Fields, Tensors]:
    """config.json and tensors of a draft in the format `to`: `zlab`, `speculators` or `native`.

    Args:
        target: Name or path of the target: the speculators format records it, z-lab's its number of layers, and it
            tells what its embedding multiplies by.

    Raises:
        ValueError: If the format has no way to express a field of `config`.
    """
    exporters = {ZLAB: export_zlab, NATIVE: export_native, SPECULATORS: export_speculators}
    if to not in exporters:
        raise ValueError(f"There is no export to {to!r}; choose one of {', '.join(exporters)}.")
    config = _with_embedding_scale(config, to, target)
    _refuse_inexpressible(config, to)
    return exporters[to](config, tensors, target)


def export_zlab(config: "DFlashConfig", tensors: Tensors, target: str | None = None) -> tuple[Fields, Tensors]:
    """z-lab's layout, with ModelOpt's and SpecForge's additions to `dflash_config`: read by vLLM and SGLang."""
    kind = _kind(config, ZLAB)
    if (kind == "dspark") != config.slots_predict_next:
        raise _inexpressible(
            ZLAB, "slots_predict_next", config, "in it the slots of DSpark drafts, and of no others, are"
        )
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    nested.update(
        _used(config, {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None})
    )
    nested.update(_used(config, {"attention_value_scale": None}))
    if config.attention_sinks:
        nested["attention_sink_bias"] = True
    if kind == "dflash2":
        nested.update(
            _used(config, dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")))
        )
    if kind == "dspark":
        nested.update(
            projector_type="dspark", markov_rank=config.markov_rank, markov_head_type=config.markov_head_type
        )
        nested["enable_confidence_head"] = config.confidence_head
        nested["confidence_head_with_markov"] = config.confidence_head_with_markov
    fields = _body(config, BODY_FIELDS) | {
        "architectures": [ARCHITECTURES[kind]],
        "block_size": config.block_size,
        "dflash_config": nested,
        "model_type": "qwen3",
        "num_target_layers": _num_target_layers(config, target),
    }
    if config.is_causal is not None:
        fields["is_causal"] = config.is_causal
    if config.output_multiplier != 1.0:
        fields["logit_scale"] = config.output_multiplier  # vLLM's name for it
    if kind == "dspark":  # vLLM reads these at the top level, SpecForge in `dflash_config`
        names = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
        fields.update({name: nested[name] for name in names}, sample_from_anchor=True)
    if config.attention_sinks:
        tensors = {
            name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias"): t for name, t in tensors.items()
        }
    return fields, dict(tensors)


def export_speculators(config: "DFlashConfig", tensors: Tensors, target: str | None = None) -> tuple[Fields, Tensors]:
    """The layout of the speculators project, which vLLM serves without further flags."""
    kind = _kind(config, SPECULATORS)
    body = _body(config, BODY_FIELDS) | {"model_type": "qwen3"}
    proposals = config.block_size - (not config.slots_predict_next)
    fields: Fields = {
        "architectures": [ARCHITECTURES[kind]],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": _dtype_name(config),
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.slots_predict_next,
        "sliding_window_non_causal": _sliding_non_causal(config),
        "speculators_config": _speculators_config(kind, proposals, target),
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
    }
    if "sliding_attention" in config.layer_types:
        # Its training counts from the anchor and vLLM from each query; the extra field says which one is meant.
        fields["window_from_anchor"] = config.window_from_anchor
        body["sliding_window"] = config.sliding_window - config.window_from_anchor
    if kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        fields.update({name: getattr(config, name) for name in names})
    if kind == "dspark":
        fields.update(markov_rank=config.markov_rank, markov_head_type=config.markov_head_type)
        fields["enable_confidence_head"] = config.confidence_head
        fields["confidence_head_with_markov"] = config.confidence_head_with_markov
    return fields, _with_vocabulary_map(config, tensors)


def export_native(config: "DFlashConfig", tensors: Tensors, target: str | None = None) -> tuple[Fields, Tensors]:
    """Transformers' own assistant class, which `speculation_type="dflash"` drives."""
    if config.attention_bias:
        raise _inexpressible(NATIVE, "attention_bias", config, "its projections have no bias, so they are")
    if any(config.layer_is_causal(i) for i in range(config.num_hidden_layers)):
        raise _inexpressible(NATIVE, "is_causal", config, "its drafts are bidirectional in every layer, so none is")
    if min(config.target_layer_ids) < 0:
        raise _inexpressible(NATIVE, "target_layer_ids", config, "it taps layers only, so the embedding is")
    fields = _body(config, NATIVE_FIELDS) | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "sliding_window": (config.sliding_window or config.max_position_embeddings) - 1,
        "tie_word_embeddings": False,
    }
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return fields, {names.get(name, name): tensor for name, tensor in tensors.items()}


def _with_embedding_scale(config: "DFlashConfig", to: str, target: str | None) -> "DFlashConfig":
    """The config with the factor on the block's embeddings said in the format's way.

    Transformers' own calls the target's module, scale and all, which `input_embedding_scale` says by null. The other
    formats' engines look up the bare table, so null has to become the number that the target's module multiplies by.
    """
    given = config.input_embedding_scale
    if config.own_embedding or (given is None) == (to == NATIVE):
        return config
    scale = None if target is None else embedding_scale(target)
    if scale is None:
        if given in (None, 1.0):
            logger.warning(
                f"The draft's config does not say whether its target scales its embeddings, as Gemma does "
                f"(`input_embedding_scale` is {given}), and is written as {to!r} for one that does not; name the "
                "target (--target) to have it looked up."
            )
        return config
    if to == NATIVE and given != scale:
        reason = f"its drafts are given the target's own embeddings, here scaled by {scale:.6g}, so other scales are"
        raise _inexpressible(to, "input_embedding_scale", config, reason)
    config = copy.deepcopy(config)
    config.input_embedding_scale = None if to == NATIVE else scale
    return config


def _refuse_inexpressible(config: "DFlashConfig", to: str) -> None:
    for name, unused in UNUSED.items():
        value = getattr(config, name)
        if name not in EXPRESSIBLE[to] and value != unused:
            raise _inexpressible(to, name, config)
    # Where formats share the field, its value 1 is what engines do with no field; others are an engine's own.
    if to != ZLAB and config.input_embedding_scale not in (None, 1.0):
        raise _inexpressible(to, "input_embedding_scale", config)
    if to == ZLAB and min(config.target_layer_ids) < 0:
        raise _inexpressible(to, "target_layer_ids", config, "it taps layers only, so the embedding (-1) is")


def _inexpressible(to: str, name: str, config: "DFlashConfig", reason: str = "it is") -> ValueError:
    return ValueError(
        f"`{name}` is {getattr(config, name)!r}, which the format {to!r} cannot express ({reason} not in its fields); "
        "keep the draft as `dflash`, or choose another format."
    )


def _kind(config: "DFlashConfig", to: str) -> str:
    uses_dflash2 = config.conv_kernel_size is not None, config.selector_rank is not None
    uses_dspark = bool(config.markov_rank) or config.confidence_head
    if any(uses_dflash2) != all(uses_dflash2):
        raise _inexpressible(to, "conv_kernel_size", config, "without the selector, or the reverse, it is")
    if any(uses_dflash2) and uses_dspark:
        raise _inexpressible(to, "markov_rank", config, "beside DFlash 2's parts it is")
    return "dflash2" if any(uses_dflash2) else "dspark" if uses_dspark else "dflash"


def _sliding_non_causal(config: "DFlashConfig") -> bool:
    """`sliding_window_non_causal`; full layers of this format are bidirectional.

    vLLM (0.32) applies the flag to all layers, so a draft without sliding layers says true, which means nothing else.
    """
    causal = {kind: config.layer_is_causal(i) for i, kind in enumerate(config.layer_types)}
    if causal.get("full_attention"):
        raise _inexpressible(SPECULATORS, "is_causal", config, "its full layers are bidirectional, so it is")
    return not causal.get("sliding_attention", False)


def _speculators_config(kind: str, proposals: int, target: str | None) -> Fields:
    method = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": proposals,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"architectures": _architectures_of(target), "name_or_path": target},
    }


def _architectures_of(target: str | None) -> list[str]:
    return [] if target is None else list(target_config(target).architectures or [])


def _num_target_layers(config: "DFlashConfig", target: str | None) -> int:
    """z-lab's own class does not load without it."""
    if config.num_target_layers is not None:
        return config.num_target_layers
    if target is None:
        raise ValueError(
            "`num_target_layers` is unknown, and z-lab's class does not load without it; name the target (--target)."
        )
    return text_config(target).num_hidden_layers


def _with_vocabulary_map(config: "DFlashConfig", tensors: Tensors) -> Tensors:
    """`draft_token_ids` as the pair `d2t` (offsets, target id minus draft id) and `t2d` (marks)."""
    import torch

    exported = dict(tensors)
    token_ids = exported.pop("draft_token_ids", None)
    if token_ids is not None:
        exported["d2t"] = token_ids - torch.arange(len(token_ids))
        exported["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    return exported


def _used(config: "DFlashConfig", unused: Mapping[str, Any]) -> Fields:
    """Those of the fields that differ from what they are when unused, or from null."""
    values = {name: getattr(config, name) for name in unused}
    return {name: value for name, value in values.items() if value is not None and value != unused[name]}


def _body(config: "DFlashConfig", names: tuple[str, ...]) -> Fields:
    everything = config.to_dict()
    return {name: everything.get(name) for name in names} | {"dtype": _dtype_name(config)}


def _dtype_name(config: "DFlashConfig") -> str | None:
    return None if config.dtype is None else str(config.dtype).removeprefix("torch.")
