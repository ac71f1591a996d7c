"""The only place that knows which Transformers version runs (5.17 and later are supported).

* The keyword of the key/value cache, in forwards, outputs and `generate`, was `past_key_values` (`cache_params` in
  Mamba-style models) and is `cache` from 5.24 on.
* `output_hidden_states=[...]` captures only the named states. Up to 5.22 the numbers are layers and the result leaves
  out the embeddings; from 5.23 on they are places in the full `hidden_states`, where layer `i` has place `i + 1`.
  Targets that do not know the list form take it for "all".
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.utils import GenerationMixin
from transformers.utils import output_capturing

_PREPARE_PARAMETERS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_KEY = "cache" if "cache" in _PREPARE_PARAMETERS else "past_key_values"
CACHE_KEYS = ("cache", "past_key_values", "cache_params")
_COUNTS_EMBEDDINGS = hasattr(output_capturing, "selected_hidden_states")


def get_cache(container: Any) -> Any:
    """The cache in a model output or in keyword arguments, under whichever name it goes there; `None` if absent."""
    for key in CACHE_KEYS:
        if container.get(key) is not None:
            return container[key]
    return None


def hidden_states_request(layer_ids: Sequence[int]) -> list[int] | bool:
    """The value of `output_hidden_states` that captures these layers' outputs (0-based; -1 is the embeddings)."""
    if _COUNTS_EMBEDDINGS:
        return [layer_id + 1 for layer_id in layer_ids]
    return True if -1 in layer_ids else list(layer_ids)


def layer_outputs(
    hidden_states: Sequence[torch.Tensor], layer_ids: Sequence[int], num_layers: int
) -> list[torch.Tensor]:
    """The outputs of these layers (B, S, H) out of a model's `hidden_states`."""
    first = len(hidden_states) - num_layers  # place of layer 0's output
    return [hidden_states[first + layer_id] for layer_id in layer_ids]


__all__ = ["CACHE_KEY", "CACHE_KEYS", "get_cache", "hidden_states_request", "layer_outputs"]
