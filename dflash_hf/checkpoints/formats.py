"""Published formats: how each is told from config and tensors, and one table of names for the tensors of all."""

import re
from collections.abc import Collection, Mapping
from typing import Any

NATIVE, SPECULATORS, DEEPSPEC, ZLAB, OWN = "native", "speculators", "deepspec", "zlab", "dflash"

# Names on disk -> names in the model. No two formats use one name for different things, so one table serves all.
RENAMES = [
    (r"^(?:model|draft_model)\.", ""),
    (r"^logit_head\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_hidden_norms\.", "tap_norms."),
    (r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),
    (r"^mask_embedding\.pt$", "mask_embedding"),  # a file of its own
    (r"^candidate_selector\.(\w+_codebook)\.weight$", r"candidate_selector.\1"),
]

# Copies of target weights that training tools leave in a file and drafting never reads; RoPE tables are computed.
NOT_OF_THE_DRAFT = re.compile(r"^verifier_(?:norm|lm_head)\.weight$|(?:^|\.)rotary_emb\.(?:original_)?inv_freq$")

SPECULATORS_TYPES = ("dflash", "dflash2", "dspark")
DEEPSPEC_ARCHITECTURE = re.compile(r"^\w+DSparkModel$")


def model_name(name: str) -> str | None:
    """The model's name of a tensor called `name` on disk; `None` for what is no part of a draft."""
    if NOT_OF_THE_DRAFT.search(name):
        return None
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """The names of classes that a config.json says load it."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def detect_format(config: dict[str, Any], tensor_names: Collection[str]) -> str:
    """Which format a draft is in, from its config.json and the names of its tensors; never from its own name.

    Raises:
        ValueError: If it is no DFlash draft, with what it looks like instead.
    """
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        if kind not in SPECULATORS_TYPES:
            raise ValueError(
                f"`speculators_model_type` is {kind!r}, which is no DFlash draft; "
                f"of that format {', '.join(SPECULATORS_TYPES)} can be read."
            )
        return SPECULATORS
    model_type = str(config.get("model_type"))
    names = {model_name(name) for name in tensor_names}
    if "fc.weight" not in names or "hidden_norm.weight" not in names:
        raise ValueError(
            f"This is no DFlash draft (`model_type` {model_type!r}, architectures {config.get('architectures')}): its "
            "weights have no `fc` and `hidden_norm`, which fuse the target's hidden states; name a draft, no target."
        )
    if model_type == "dflash":
        return OWN
    if model_type.endswith("_assistant") or "encoder.fc.weight" in tensor_names:
        return NATIVE
    if any(DEEPSPEC_ARCHITECTURE.match(name) for name in architectures_of(config)):
        return DEEPSPEC
    return ZLAB
