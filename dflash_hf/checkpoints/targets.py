"""What an export asks of a draft's target: its config, its vocabulary, its embedding's scale. No weights are read."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def target_config(target: str) -> "PreTrainedConfig":
    """The whole config of the target called `target`, on the Hub or in a folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(target)


def text_config(target: str) -> "PreTrainedConfig":
    """The config of the target's language model, which is a part of a multimodal one's."""
    return target_config(target).get_text_config(decoder=True)


def embedding_scale(target: str) -> float | None:
    """What the target's embedding module multiplies its table by, 1 for most; `None` where that cannot be told.

    Only the module itself says so (Gemma's does), so the target is built without storage.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = text_config(target)
    try:
        with torch.device("meta"):
            embeddings = AutoModelForCausalLM.from_config(config).get_input_embeddings()
    except Exception:  # whatever a class's own code raises: code of its own on the Hub, a kernel that is not here
        return None
    # Gemma's buffer `embed_scale` has no value here; `scalar_embed_scale` is the number that it is made from.
    scale = getattr(embeddings, "scalar_embed_scale", getattr(embeddings, "embed_scale", 1.0))
    return None if isinstance(scale, torch.Tensor) else float(scale)
