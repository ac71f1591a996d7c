"""Checks between a draft, its target and the `generate` call, all before the first forward."""

from typing import Any

from .settings import DraftSettings


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
    if target.get_output_embeddings() is None:
        raise ValueError(
            f"{type(target).__name__} has no language-model head (`get_output_embeddings()` is None); load the "
            "target with a head, for example with `AutoModelForCausalLM`."
        )


def check_generation(target: Any, draft: Any, generation_config: Any, mode_kwargs: dict[str, Any]) -> None:
    """Refuse settings of a `generate` call that cannot be combined with a draft.

    Raises:
        ValueError: For a knob out of range, `use_cache=False`, or a beam search.
    """
    DraftSettings.read(draft, generation_config)
    if generation_config.use_cache is False:
        raise ValueError(
            "`use_cache` is False but `assistant_model` is a draft, which verifies blocks against the target's "
            "cache; leave `use_cache` at True."
        )
    if generation_config.num_return_sequences > 1 and not generation_config.do_sample:
        raise ValueError(
            f"`num_return_sequences` is {generation_config.num_return_sequences} but `do_sample` is False, which "
            "would return the same sequence each time; set `do_sample=True`."
        )


__all__ = ["check_generation", "check_pair"]
