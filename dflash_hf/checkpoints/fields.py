"""A published config's fields as those of `DFlashConfig`.

What formats express in different conventions becomes one here: taps count layer outputs from 0, a window of w shows
keys at a distance below w, and causality, slots, own embedding and own head are fields of the config. Two fields of a
file that say the same thing must agree.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..configuration_dflash import NESTED_NAMES
from .formats import NATIVE, SPECULATORS, ZLAB, architectures_of

Fields = dict[str, Any]

# What the draft's body reads of a Qwen3 config, under the same names in every format.
BODY_FIELDS = (
    "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "layer_types", "max_position_embeddings",
    "max_window_layers", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window",
    "vocab_size",
)  # fmt: skip
REQUIRED_COUNTS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
)  # fmt: skip
OPTIONAL_INTEGERS = ("head_dim", "mask_token_id", "max_window_layers", "sliding_window", "vocab_size")

# Every field that names taps, and what it calls the output of the first layer, which is 0 here. vLLM takes the ids of
# all but `target_layer_ids` as they are, and it counts the embedding's output as 0.
TAP_FIELDS = {
    "target_layer_ids": 0,
    "eagle_aux_hidden_state_layer_ids": 1,
    "aux_hidden_state_layer_ids": 1,
    "layer_ids": 1,
}

# Draft fields under each name that a format gives them, at the top level or inside `dflash_config`.
DRAFT_FIELDS = {name: ours for name, ours in NESTED_NAMES.items() if name not in TAP_FIELDS} | {
    "logit_scale": "output_multiplier",
    "shift_label": "slots_predict_next",
}

# Understood elsewhere in this module, or of no effect on what the draft computes.
OTHER_NESTED_FIELDS = frozenset(
    (
        "use_swa", "swa_window_size", "projector_type", "mask_token", "has_embed_tokens", "attention_mode",
        "num_anchors", "confidence_head_alpha", "loss_decay_gamma",
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

# Block sizes that the formats' own classes take where a file names none (speculators 0.9, dflash 0.1, Transformers).
BLOCK_SIZES = {SPECULATORS: 8, ZLAB: 16, NATIVE: 16}
# Defaults of Transformers' own class, where the file names none.
NATIVE_ROPE = {"rope_theta": 500000.0, "rope_type": "default"}
NATIVE_WINDOW = 2048
QWEN3_MAX_WINDOW_LAYERS = 28

DSPARK_ARCHITECTURE = re.compile(r"DSpark\w*Model\b")
DFLASH_ARCHITECTURE = re.compile(r"\bDFlash\w*Model\b")


def import_fields(
    draft_format: str, raw: Mapping[str, Any], tensors: Mapping[str, Any], mask_token_id: int | None = None
) -> Fields:
    """A published config as keyword arguments of `DFlashConfig`; `tensors` tell what optional parts the draft has.

    Args:
        mask_token_id: What `mask_embedding.pt` says, where there is such a file.

    Raises:
        ValueError: If a field that matters is missing or not understood, or two fields contradict each other.
    """
    nested = nested_fields(raw)
    refuse_unknown(raw, nested)
    body = raw if draft_format != SPECULATORS else _speculators_body(raw)
    fields = _draft_fields(raw, nested)
    fields.update({name: body[name] for name in BODY_FIELDS if name in body})
    _read_mask_token(fields, raw, nested, mask_token_id)
    _check_body(fields)
    _read_taps(fields, raw, nested)
    _read_block_size(fields, draft_format)
    if draft_format == SPECULATORS:
        fields.update(_speculators_fields(raw, fields))
    elif draft_format == NATIVE:
        _read_native_conventions(fields)
    else:
        _read_window_flags(fields, raw, nested)
    if draft_format != NATIVE:
        # Engines of these formats look tokens up in the bare table; only Transformers' own calls the module.
        fields.setdefault("input_embedding_scale", 1.0)
    _refuse_sliding_without_window(fields)
    fields.update(_parts_present(tensors, fields))
    _refuse_missing_embedding(fields, raw, nested)
    if draft_format not in (NATIVE, SPECULATORS) and _is_dspark(raw, nested, fields):
        fields.setdefault("slots_predict_next", True)
    return {name: value for name, value in fields.items() if value is not None}


def nested_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested dialect, empty where the file has none."""
    nested = raw.get("dflash_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"`dflash_config` must be an object of fields, got {nested!r}; see z-lab's checkpoints.")
    return nested or {}


def refuse_unknown(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Refuse fields that change what a draft computes and that the model has no field for.

    Raises:
        ValueError: Naming the first.
    """
    containers = [("", raw), ("dflash_config.", nested)]
    containers += [(f"{name}.", raw.get(name)) for name in ("rope_parameters", "rope_scaling")]
    for where, container in containers:
        for name, usual in USUAL_VALUES.items():
            if isinstance(container, Mapping) and name in container and container[name] not in usual:
                raise ValueError(
                    f"`{where}{name}` is {container[name]!r}, which changes what the draft computes and is not "
                    f"supported here; only {' or '.join(map(repr, usual))} is."
                )
    known = DRAFT_FIELDS.keys() | TAP_FIELDS.keys() | OTHER_NESTED_FIELDS | USUAL_VALUES.keys()
    for name in nested:
        if name not in known:
            raise ValueError(
                f"`dflash_config.{name}` ({nested[name]!r}) is not understood; a draft read without it could lose "
                "acceptance silently, so remove the field only if you know that it has no effect."
            )


def states_vocabulary(raw: Mapping[str, Any]) -> bool:
    """Whether a draft's config.json says how many tokens its target has; Transformers' own format does not."""
    body = raw.get("transformer_layer_config", raw)
    return isinstance(body, Mapping) and body.get("vocab_size") is not None


def _stated(raw: Mapping[str, Any], nested: Mapping[str, Any], *names: str) -> Iterator[tuple[str, str, Any]]:
    """Place, name and value of each of the fields that the file states, at the top level or inside `dflash_config`."""
    for where, container in (("", raw), ("dflash_config.", nested)):
        for name in names:
            if container.get(name) is not None:
                yield where + name, name, container[name]


def _read_either(raw: Mapping[str, Any], nested: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Place and value of a field that may stand in either dialect; `None` where it stands in neither."""
    stated = list(_stated(raw, nested, name)) or [(name, name, None)]
    (first, _, value), (last, _, other) = stated[0], stated[-1]
    if value != other:
        raise _contradiction(first, value, last, other)
    return first, value


def _contradiction(first: str, value: Any, second: str, other: Any, why: str = "") -> ValueError:
    return ValueError(
        f"`{first}` is {value!r} but `{second}` is {other!r}{why}; remove the wrong one from the draft's config.json."
    )


def _draft_fields(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> Fields:
    """The draft fields of both dialects; those that both state must agree."""
    fields: Fields = {}
    origins: dict[str, str] = {}
    for place, name, value in _stated(raw, nested, *DRAFT_FIELDS):
        ours = DRAFT_FIELDS[name]
        if ours in fields and fields[ours] != value:
            raise _contradiction(origins[ours], fields[ours], place, value)
        fields[ours] = value
        origins[ours] = place
    return fields


def _read_mask_token(
    fields: Fields, raw: Mapping[str, Any], nested: Mapping[str, Any], of_embedding: int | None
) -> None:
    known = fields.setdefault("mask_token_id", of_embedding)
    if known is None:
        asked = nested.get("mask_token") or raw.get("mask_token")
        raise ValueError(
            f"The draft's config has no `mask_token_id` (`mask_token` is {asked!r}); add the id that this token has "
            "in the target's tokenizer."
        )
    check_mask_token(known, of_embedding)


def check_mask_token(mask_token_id: int | None, of_embedding: int | None) -> None:
    """The config and `mask_embedding.pt`, each where it names a token, must name the same.

    Raises:
        ValueError: If they do not.
    """
    if of_embedding is not None and mask_token_id != of_embedding:
        raise _contradiction("mask_token_id", mask_token_id, "mask_token_id` of `mask_embedding.pt", of_embedding)


def _check_body(fields: Fields) -> None:
    """What every format's body must state, in numbers that the rest of this module can count with."""
    for name in REQUIRED_COUNTS:
        if name not in fields:
            raise ValueError(f"The draft's config has no `{name}`, which its weights were made for; add it.")
    if fields["num_key_value_heads"] is None:  # Qwen3's rule
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in (*REQUIRED_COUNTS, *OPTIONAL_INTEGERS):
        value, is_count = fields.get(name), name in REQUIRED_COUNTS
        if value is None and not is_count:
            continue
        if not _is_int(value) or (is_count and value < 1):
            kind = "a whole number above 0" if is_count else "a whole number"
            raise ValueError(f"`{name}` must be {kind}, got {value!r}; correct the draft's config.json.")
    if not isinstance(fields.get("layer_types", []), (list, tuple, type(None))):
        raise ValueError(f"`layer_types` must be a list with one entry per layer, got {fields['layer_types']!r}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_taps(fields: Fields, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """The taps of every field that names some; all must name the same layers."""
    first: tuple[str, str, Any] | None = None
    for place, name, taps in _stated(raw, nested, *TAP_FIELDS):
        if not isinstance(taps, (list, tuple)) or not all(map(_is_int, taps)):
            raise ValueError(f"`{place}` must be a list of layer numbers, got {taps!r}; correct the draft's config.")
        if not taps:  # engines take an empty list for none
            continue
        ours = [tap - TAP_FIELDS[name] for tap in taps]
        if first is None:
            first = place, name, taps
            fields["target_layer_ids"] = ours
        elif ours != fields["target_layer_ids"]:
            high, low = (name, first[1]) if TAP_FIELDS[name] else (first[1], name)
            apart = TAP_FIELDS[high] != TAP_FIELDS[low]
            why = f" (`{high}` counts the embedding as 0, so its numbers should be higher by one)" if apart else ""
            raise _contradiction(first[0], first[2], place, taps, why)


def _read_block_size(fields: Fields, draft_format: str) -> None:
    if "block_size" not in fields and draft_format not in BLOCK_SIZES:
        raise ValueError("The draft's config has no `block_size`; add the number of slots it was trained to fill.")
    fields.setdefault("block_size", BLOCK_SIZES.get(draft_format))


def _layer_types(fields: Fields) -> list[str]:
    """The layers' kinds; where the file lists none, by Qwen3's rule: layers from `max_window_layers` on slide."""
    if fields.get("layer_types") is not None:
        return list(fields["layer_types"])
    first = fields.get("max_window_layers")
    first = QWEN3_MAX_WINDOW_LAYERS if first is None else first
    slides = fields.get("use_sliding_window") and fields.get("sliding_window") is not None
    layers = range(fields["num_hidden_layers"])
    return ["sliding_attention" if slides and layer >= first else "full_attention" for layer in layers]


def _read_window_flags(fields: Fields, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """`use_swa` makes every layer slide where none does, and `swa_window_size` is the window of those that do.

    vLLM's reading: layers that `use_swa` alone makes slide are bidirectional, as MiMo's drafts are, unless the file
    names a causality; sliding layers of `layer_types` are causal.
    """
    swa_place, use_swa = _read_either(raw, nested, "use_swa")
    window_place, window = _read_either(raw, nested, "swa_window_size")
    if window is not None and not _is_int(window):
        raise ValueError(f"`{window_place}` must be a whole number, got {window!r}; correct the draft's config.json.")
    slides = "sliding_attention" in _layer_types(fields)
    known = fields.get("sliding_window") if slides or fields.get("use_sliding_window") else None
    if window is not None and known is not None and window != known:
        raise _contradiction(window_place, window, "sliding_window", known)
    window = known if window is None else window
    if use_swa and not slides:
        if window is None:
            raise ValueError(f"`{swa_place}` is true but `swa_window_size` is missing; add the window's length.")
        fields["layer_types"] = ["sliding_attention"] * fields["num_hidden_layers"]
        fields.setdefault("is_causal", False)
        slides = True
    if slides and window is not None:
        fields.update(sliding_window=window, use_sliding_window=True)


def _refuse_sliding_without_window(fields: Fields) -> None:
    if "sliding_attention" in _layer_types(fields) and fields.get("sliding_window") is None:
        raise ValueError(
            "`layer_types` has sliding layers but `sliding_window` is missing; add the window of the draft's training."
        )


def _is_dspark(raw: Mapping[str, Any], nested: Mapping[str, Any], fields: Fields) -> bool:
    """Whether the draft's slots were trained the way of DSpark and DeepSpec: each predicts the token after its own.

    Either says so by its class or its `projector_type`, or has DSpark's parts. DeepSpec's plain drafts have none, but
    state `markov_rank` 0, which only a class that knows Markov heads has.
    """
    _, projector = _read_either(raw, nested, "projector_type")
    architectures = " ".join(architectures_of(raw))
    if projector == "dspark" or DSPARK_ARCHITECTURE.search(architectures):
        return True
    if fields.get("markov_rank") or fields.get("confidence_head"):
        return True
    return fields.get("markov_rank") == 0 and projector is None and not DFLASH_ARCHITECTURE.search(architectures)


def _refuse_missing_embedding(fields: Fields, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    place, has_table = _read_either(raw, nested, "has_embed_tokens")
    if has_table and not fields["own_embedding"]:
        raise ValueError(
            f"`{place}` is {has_table!r} but the draft's weights hold no 'embed_tokens.weight'; the file is "
            "incomplete."
        )


def _speculators_body(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    body = raw.get("transformer_layer_config")
    if not isinstance(body, Mapping):
        raise ValueError("The speculators config has no `transformer_layer_config`, which describes the draft's body.")
    refuse_unknown(body, {})
    if raw.get("aux_hidden_state_layer_ids") is None:
        raise ValueError("The speculators config has no `aux_hidden_state_layer_ids`; add the taps of the training.")
    return {**body, "dtype": raw.get("dtype", body.get("dtype"))}


def _speculators_fields(raw: Mapping[str, Any], body: Fields) -> Fields:
    hidden_size = raw.get("target_hidden_size")
    if hidden_size not in (None, body["hidden_size"]):
        raise ValueError(
            f"`target_hidden_size` is {hidden_size} but the draft's `hidden_size` is {body['hidden_size']}; only "
            "drafts of the target's own width can be read."
        )

    def stated(name: str, default: Any) -> Any:
        return default if raw.get(name) is None else raw[name]

    is_dspark = raw["speculators_model_type"] == "dspark"
    fields: Fields = {
        "draft_vocab_size": stated("draft_vocab_size", 32000),
        "slots_predict_next": stated("sample_from_anchor", is_dspark),
        "layer_types": _layer_types(body),
    }
    if "sliding_attention" in fields["layer_types"]:
        fields.update(_speculators_window(raw, body))
    if stated("sliding_window_non_causal", raw["speculators_model_type"] == "dflash2"):
        fields["is_causal"] = False
    if is_dspark:
        fields.update(markov_rank=stated("markov_rank", 256), confidence_head=stated("enable_confidence_head", True))
        fields["markov_head_type"] = stated("markov_head_type", "vanilla")
        fields["confidence_head_with_markov"] = stated("confidence_head_with_markov", True)
    return fields


def _speculators_window(raw: Mapping[str, Any], body: Fields) -> Fields:
    """Its training shows every query the same last w context keys, so keys at a distance of w from the anchor.

    The exports of this package say `window_from_anchor: false`: theirs is vLLM's reading of the number, per query.
    """
    if raw.get("window_from_anchor", True) and body.get("sliding_window") is not None:
        return {"window_from_anchor": True, "sliding_window": body["sliding_window"] + 1}
    return {}


def _read_native_conventions(fields: Fields) -> None:
    """Transformers' own drafts are bidirectional everywhere, and their window includes the distance it names."""
    fields["is_causal"] = False
    if not any(name in fields for name in ("rope_parameters", "rope_theta", "rope_scaling")):
        fields["rope_parameters"] = dict(NATIVE_ROPE)
    if fields.get("layer_types") is None:
        fields["layer_types"] = ["sliding_attention"] * fields["num_hidden_layers"]
    if "sliding_attention" in fields["layer_types"]:
        window = fields.setdefault("sliding_window", NATIVE_WINDOW)
        fields["sliding_window"] = None if window is None else window + 1
        fields["use_sliding_window"] = True
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
