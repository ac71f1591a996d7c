"""Checks between a draft, its target and the `generate` call, all before the first forward."""

from typing import Any

from transformers.utils import logging

from .settings import DraftSettings

logger = logging.get_logger(__name__)

# Families whose chat templates switch thinking on and off, so that a draft may know one mode only.
THINKING_FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
LONG_FACTOR = 2  # times the trained length; acceptance of a draft trained at 3K has fallen by a quarter at 16K


def check_pair(target: Any, draft: Any) -> None:
    """Refuse a draft that was not made for this target.

    Raises:
        ValueError: If hidden sizes, layers or vocabularies do not fit.
    """
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"{type(target).__name__} is an encoder-decoder model; a DFlash draft needs a decoder-only target."
        )
    text = target.config.get_text_config(decoder=True)
    config = draft.config
    if config.hidden_size != text.hidden_size:
        raise ValueError(
            f"`hidden_size` is {config.hidden_size} in the draft but {text.hidden_size} in the target; use the draft "
            "that was trained for this target."
        )
    num_layers = text.num_hidden_layers
    if max(config.target_layer_ids) >= num_layers:
        raise ValueError(
            f"`target_layer_ids` taps layer {max(config.target_layer_ids)} but the target has `num_hidden_layers` "
            f"{num_layers}, so its last layer is {num_layers - 1}; use the draft that was trained for this target."
        )
    if config.num_target_layers is not None and config.num_target_layers != num_layers:
        raise ValueError(
            f"`num_target_layers` is {config.num_target_layers} in the draft but the target has `num_hidden_layers` "
            f"{num_layers}; use the draft that was trained for this target."
        )
    rows = getattr(target.get_input_embeddings(), "num_embeddings", text.vocab_size)
    if config.mask_token_id >= rows:
        raise ValueError(
            f"`mask_token_id` is {config.mask_token_id} but the target's embedding has {rows} rows, 0 to {rows - 1}; "
            "use the draft's own target, or resize its embeddings to the size the draft was trained with."
        )
    own_tables = [name for name in ("own_embedding", "own_head") if getattr(config, name)]
    own_tables += ["proposes_stepwise"] if config.proposes_stepwise else []
    if own_tables and config.vocab_size != text.vocab_size:
        raise ValueError(
            f"`vocab_size` is {config.vocab_size} in the draft, which has tables of its own (`{own_tables[0]}`), but "
            f"{text.vocab_size} in the target; use the draft that was trained for this target."
        )
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{type(target).__name__} has no language-model head (`get_output_embeddings()` is None); load the "
            "target with a head, for example with `AutoModelForCausalLM`."
        )


def check_generation(target: Any, draft: Any, generation_config: Any, mode_kwargs: dict[str, Any]) -> None:
    """Refuse settings of a `generate` call that cannot be combined with a draft.

    Raises:
        ValueError: For a knob out of range, or `use_cache=False`.
    """
    DraftSettings.read(draft, generation_config)
    if generation_config.use_cache is False:
        raise ValueError(
            "`use_cache` is False but `assistant_model` is a draft, which verifies blocks against the target's "
            "cache; leave `use_cache` at True."
        )


def warn_of_poor_pair(target: Any, draft: Any, tokenizer: Any = None) -> None:
    """Warn, once, of a pair that works but is known to accept little."""
    text = target.config.get_text_config(decoder=True)
    can_think = text.model_type in THINKING_FAMILIES
    if tokenizer is not None:
        can_think = "enable_thinking" in str(getattr(tokenizer, "chat_template", None))
    if can_think and draft.config.trained_with_thinking is None:
        logger.warning_once(
            f"The target ({text.model_type}) may think before it answers, and the draft's config does not say whether "
            "the draft was trained for that (`trained_with_thinking`); if acceptance is low, switch `enable_thinking` "
            "in the chat template, or use a draft that was trained for the mode you want."
        )


def warn_of_long_context(draft: Any, prompt_length: int, generation_config: Any) -> None:
    """Warn, once, of a context far beyond what the draft was trained on, where its full layers see all of it."""
    config = draft.config
    if DraftSettings.read(draft, generation_config).context_length or "full_attention" not in config.layer_types:
        return
    if config.trained_length is not None and prompt_length > LONG_FACTOR * config.trained_length:
        name, limit = "trained_length", config.trained_length
    elif prompt_length > config.max_position_embeddings:
        name, limit = "max_position_embeddings", config.max_position_embeddings
    else:
        return
    logger.warning_once(
        f"The prompt has {prompt_length} tokens, far beyond the draft's `{name}` {limit}; acceptance falls there. "
        f"`draft.generation_config.draft_context_length = {limit}` lets the draft see the last {limit} tokens only."
    )


__all__ = ["check_generation", "check_pair", "warn_of_long_context", "warn_of_poor_pair"]
