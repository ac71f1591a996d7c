"""Published drafts into this package's terms: each format's config fields as `DFlashConfig` fields, tensors renamed.

What formats express in different conventions becomes one here: taps count layer outputs from 0, a window of w shows
keys at a distance below w, and causality, slots, own embedding and own head are fields of the config.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration_dflash import NESTED_NAMES, DFlashConfig
from .files import read_config, read_tensors
from .formats import DEEPSPEC, NATIVE, OWN, SPECULATORS, detect_format, model_name

if TYPE_CHECKING:
    import torch

Fields = dict[str, Any]
Tensors = dict[str, "torch.Tensor"]

# What the draft's body reads of a Qwen3 config, under the same names in every format.
BODY_FIELDS = (
    "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings",
    "max_window_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "vocab_size",
)  # fmt: skip

# Draft fields under each name that a format gives them, at the top level or inside `dflash_config`.
DRAFT_FIELDS = NESTED_NAMES | {
    "layer_ids": "target_layer_ids",
    "logit_scale": "output_multiplier",
    "shift_label": "slots_predict_next",
}

# Understood elsewhere in this module, or of no effect on what the draft computes.
OTHER_NESTED_FIELDS = frozenset(
    (
        "use_swa", "swa_window_size", "projector_type", "mask_token", "has_embed_tokens", "attention_mode",
        "num_anchors", "confidence_head_alpha", "loss_decay_gamma", "eagle_aux_hidden_state_layer_ids",
    )
)  # fmt: skip

# Fields that change what a draft computes, in ways the model here has no field for: the values that mean "as usual".
USUAL_VALUES: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash", "dspark"),
    "pure_draft_prefix_len": (None, 0),
    "causal_head": (None, False),
    "is_neox_style": (None, True),
    "partial_rotary_factor": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "gating": (None, False),
    "attention_output_gate": (None, False),
    "quantization_config": (None,),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}

# Defaults of Transformers' own class, where the file names none.
NATIVE_ROPE = {"rope_theta": 500000.0, "rope_type": "default"}
NATIVE_WINDOW = 2048


def read_draft(folder: Path, vocab_size: int | None = None) -> tuple[str, DFlashConfig, Tensors]:
    """Read a draft of any format: the format, its config, and its tensors under the model's names.

    Args:
        folder: Holds config.json and safetensors files.
        vocab_size: The target's, for formats that do not state it.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file is damaged, the format is unknown, a field that matters is not understood, or a tensor
            has no place in the model, or the model's has none in the file.
    """
    raw_config, raw_tensors = read_config(folder), read_tensors(folder)
    draft_format = detect_format(raw_config, raw_tensors)
    tensors = rename_tensors(raw_tensors)
    if draft_format == OWN:
        config = DFlashConfig.from_dict(raw_config)
    else:
        fields = import_fields(draft_format, raw_config, tensors)
        if "vocab_size" not in fields:
            fields["vocab_size"] = vocab_size or fields["mask_token_id"] + 1
        split_fused_projections(tensors, fields)
        import_vocabulary_map(tensors, fields)
        config = DFlashConfig.from_dict(fields)
    check_tensors(config, tensors)
    return draft_format, config, tensors


def import_fields(draft_format: str, raw: Mapping[str, Any], tensors: Mapping[str, Any]) -> Fields:
    """A published config as keyword arguments of `DFlashConfig`; `tensors` tell what optional parts the draft has.

    Raises:
        ValueError: If a field that matters is not understood, or two fields contradict each other.
    """
    nested = raw.get("dflash_config") or {}
    _refuse_unknown(raw, nested)
    fields = _draft_fields(raw, nested)
    if draft_format == SPECULATORS:
        fields.update(_speculators_fields(raw))
    else:
        fields.update({name: raw[name] for name in BODY_FIELDS if name in raw})
        _read_window_flags(fields, nested)
        _read_eagle_taps(fields, raw, nested)
        fields.setdefault("block_size", None)
    if draft_format == NATIVE:
        _read_native_conventions(fields)
    elif draft_format == DEEPSPEC or nested.get("projector_type") == "dspark":
        fields.setdefault("slots_predict_next", True)
    if draft_format != NATIVE:
        # Engines of these formats look tokens up in the bare table; only Transformers' own calls the module.
        fields.setdefault("input_embedding_scale", 1.0)
    fields.update(_parts_present(tensors, fields))
    if fields.get("mask_token_id") is None:
        asked = nested.get("mask_token") or raw.get("mask_token")
        raise ValueError(
            f"The draft's config has no `mask_token_id` (`mask_token` is {asked!r}); add the id that this token has "
            "in the target's tokenizer."
        )
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_unknown(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    for where, container in (("", raw), ("dflash_config.", nested)):
        for name, usual in USUAL_VALUES.items():
            if name in container and container[name] not in usual:
                raise ValueError(
                    f"`{where}{name}` is {container[name]!r}, which changes what the draft computes and is not "
                    f"supported here; only {' or '.join(map(repr, usual))} is."
                )
    for name in nested:
        if name not in DRAFT_FIELDS and name not in OTHER_NESTED_FIELDS and name not in USUAL_VALUES:
            raise ValueError(
                f"`dflash_config.{name}` ({nested[name]!r}) is not understood; a draft read without it could lose "
                "acceptance silently, so remove the field only if you know that it has no effect."
            )


def _draft_fields(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> Fields:
    """The draft fields of both dialects; those that both state must agree."""
    fields: Fields = {}
    origins: dict[str, str] = {}
    for where, container in (("", raw), ("dflash_config.", nested)):
        for name, ours in DRAFT_FIELDS.items():
            value = container.get(name)
            if value is None:
                continue
            if ours in fields and fields[ours] != value:
                raise ValueError(
                    f"`{origins[ours]}` is {fields[ours]!r} but `{where}{name}` is {value!r}; remove the wrong one "
                    "from the draft's config.json."
                )
            fields[ours] = value
            origins[ours] = where + name
    return fields


def _speculators_fields(raw: Mapping[str, Any]) -> Fields:
    body = raw.get("transformer_layer_config")
    if not isinstance(body, Mapping):
        raise ValueError("The speculators config has no `transformer_layer_config`, which describes the draft's body.")
    _refuse_unknown(body, {})
    fields: Fields = {name: body[name] for name in BODY_FIELDS if name in body}
    fields["dtype"] = raw.get("dtype", fields.get("dtype"))
    taps = raw.get("aux_hidden_state_layer_ids")
    if taps is None:
        raise ValueError("The speculators config has no `aux_hidden_state_layer_ids`; add the taps of the training.")
    fields["target_layer_ids"] = [tap - 1 for tap in taps]  # they index hidden_states, whose first is the embedding
    hidden_size = raw.get("target_hidden_size")
    if hidden_size not in (None, fields.get("hidden_size")):
        raise ValueError(
            f"`target_hidden_size` is {hidden_size} but the draft's `hidden_size` is {fields.get('hidden_size')}; "
            "only drafts of the target's own width can be read."
        )
    kind = raw["speculators_model_type"]
    fields["block_size"] = raw.get("block_size", 8)
    fields["draft_vocab_size"] = raw.get("draft_vocab_size", 32000)
    fields["slots_predict_next"] = raw.get("sample_from_anchor", kind == "dspark")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        fields.update(_speculators_window(raw, fields))
    if raw.get("sliding_window_non_causal", kind == "dflash2"):
        fields["is_causal"] = False
    if kind == "dspark":
        fields.update(markov_rank=raw.get("markov_rank", 256), confidence_head=raw.get("enable_confidence_head", True))
        fields["markov_head_type"] = raw.get("markov_head_type", "vanilla")
        fields["confidence_head_with_markov"] = raw.get("confidence_head_with_markov", True)
    return fields


def _speculators_window(raw: Mapping[str, Any], fields: Fields) -> Fields:
    """Its training shows every query the same last w context keys, so keys at a distance of w from the anchor.

    The exports of this package say `window_from_anchor: false`: theirs is vLLM's reading of the number, per query.
    """
    if raw.get("window_from_anchor", True):
        return {"window_from_anchor": True, "sliding_window": fields["sliding_window"] + 1}
    return {}


def _read_window_flags(fields: Fields, nested: Mapping[str, Any]) -> None:
    """`use_swa` makes every layer sliding, with `swa_window_size`."""
    if not nested.get("use_swa"):
        return
    window = nested.get("swa_window_size")
    known = fields.get("sliding_window") if fields.get("use_sliding_window") else None
    if not window and not known:
        raise ValueError("`dflash_config.use_swa` is true but `swa_window_size` is missing; add the window's length.")
    if window and known and window != known:
        raise ValueError(
            f"`dflash_config.swa_window_size` is {window} but `sliding_window` is {known}; remove the wrong one from "
            "the draft's config.json."
        )
    layers = fields["num_hidden_layers"]
    fields.update(sliding_window=window or known, layer_types=["sliding_attention"] * layers, use_sliding_window=True)


def _read_eagle_taps(fields: Fields, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    taps = raw.get(name, nested.get(name))
    if taps is None:
        return
    ours = [tap - 1 for tap in taps]
    if fields.get("target_layer_ids", ours) != ours:
        raise ValueError(
            f"`{name}` {taps} names other layers than `target_layer_ids` {fields['target_layer_ids']} (it counts the "
            "embedding as 0, so each should be higher by one); remove the wrong one from the draft's config.json."
        )
    fields["target_layer_ids"] = ours


def _read_native_conventions(fields: Fields) -> None:
    """Transformers' own drafts are bidirectional everywhere, and their window includes the distance it names."""
    fields["is_causal"] = False
    if not any(name in fields for name in ("rope_parameters", "rope_theta", "rope_scaling")):
        fields["rope_parameters"] = dict(NATIVE_ROPE)
    if "sliding_attention" in fields.get("layer_types", ("sliding_attention",)):
        fields["sliding_window"] = fields.get("sliding_window", NATIVE_WINDOW) + 1
        fields["use_sliding_window"] = True
        fields.setdefault("layer_types", ["sliding_attention"] * fields["num_hidden_layers"])
    else:
        fields.pop("sliding_window", None)


def _parts_present(tensors: Mapping[str, Any], fields: Fields) -> Fields:
    """Optional parts that the file has; whether it has them all is `check_tensors`'s question."""
    parts: Fields = {
        "own_embedding": "embed_tokens.weight" in tensors,
        "own_head": "lm_head.weight" in tensors,
        "own_mask_embedding": "mask_embedding" in tensors,
        "tap_norms": any(name.startswith("tap_norms.") for name in tensors),
        "tie_word_embeddings": False,
    }
    if any(name.endswith(".self_attn.sinks") for name in tensors):
        parts["attention_sinks"] = True
    if any(name.startswith("confidence_head.") for name in tensors):
        parts["confidence_head"] = True
    if fields.get("draft_vocab_size") == fields.get("vocab_size"):
        parts["draft_vocab_size"] = None
    return parts


def rename_tensors(raw: Mapping[str, "torch.Tensor"]) -> Tensors:
    """The draft's tensors under the model's names, without the target's copies.

    Raises:
        ValueError: If two tensors of the file have the same place in the model.
    """
    tensors: Tensors = {}
    origins: dict[str, str] = {}
    for name, tensor in raw.items():
        ours = model_name(name)
        if ours is None:
            continue
        if ours in tensors:
            raise ValueError(f"{origins[ours]!r} and {name!r} in the draft's weights have the same place, {ours!r}.")
        tensors[ours], origins[ours] = tensor, name
    return tensors


def split_fused_projections(tensors: Tensors, fields: Fields) -> None:
    """Split every `qkv_proj` into `q_proj`, `k_proj` and `v_proj`, in place."""
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    queries, keys = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim
    for name in [name for name in tensors if ".self_attn.qkv_proj." in name]:
        fused = tensors.pop(name)
        if fused.shape[0] != queries + 2 * keys:
            raise ValueError(
                f"{name!r} has {fused.shape[0]} rows, but the config's heads need {queries} + 2 * {keys}; the file "
                "and its config do not belong together."
            )
        for part, rows in zip("qkv", fused.split([queries, keys, keys]), strict=True):
            tensors[name.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()


def import_vocabulary_map(tensors: Tensors, fields: Fields) -> None:
    """`d2t` holds offsets, target id minus draft id; the model keeps the target ids themselves.

    Raises:
        ValueError: If an id has no place in the target's vocabulary, or `t2d` marks other tokens than `d2t` names.
    """
    import torch

    offsets, marks = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if marks is not None:
            raise ValueError("The draft's weights hold 't2d' without 'd2t', which says what its own head's rows mean.")
        return
    token_ids = torch.arange(len(offsets)) + offsets.long()
    vocab_size = fields["vocab_size"]
    if len(offsets) == vocab_size and not offsets.any():
        return
    if token_ids.min() < 0 or token_ids.max() >= vocab_size or len(token_ids.unique()) != len(token_ids):
        raise ValueError(
            f"'d2t' maps the draft's {len(offsets)} tokens to ids from {int(token_ids.min())} to "
            f"{int(token_ids.max())}, which are not distinct tokens of a vocabulary of {vocab_size}; the file is "
            "damaged."
        )
    if marks is not None and (len(marks) != vocab_size or not torch.equal(marks.nonzero()[:, 0], token_ids.sort()[0])):
        raise ValueError("'t2d' marks other target tokens than 'd2t' names; the file is damaged.")
    tensors["draft_token_ids"] = token_ids


def check_tensors(config: DFlashConfig, tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Every tensor has a place in the model that `config` describes, of its shape, and every place a tensor.

    Raises:
        ValueError: Naming the first that does not fit.
    """
    import torch

    from ..modeling_dflash import Qwen3DFlashForDraft

    with torch.device("meta"):
        places = Qwen3DFlashForDraft(config).state_dict()
    for name, tensor in tensors.items():
        if name not in places:
            raise ValueError(
                f"The draft's weights hold {name!r}, which has no place in the model that its config describes; the "
                "draft is of a kind that is not supported here, or its config.json lacks a field."
            )
        if tensor.shape != places[name].shape:
            raise ValueError(
                f"{name!r} is of shape {tuple(tensor.shape)} in the draft's weights, but its config asks for "
                f"{tuple(places[name].shape)}; the two do not belong together."
            )
    missing = [name for name in places if name not in tensors]
    if missing:
        raise ValueError(
            f"The draft's weights lack {missing[0]!r} ({len(missing)} missing in all), which its config asks for; the "
            "file is incomplete."
        )
