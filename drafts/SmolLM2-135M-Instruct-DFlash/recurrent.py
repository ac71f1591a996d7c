"""Taking tokens back from recurrent and convolution states, which have no columns to crop.

The states are saved before a verification. Where a row accepts fewer tokens than were verified, its states are
computed again from the saved ones, by running nothing but the recurrent mixers over the accepted tokens, on the inputs
they had in the verification. Attention, feed-forward and head are not run again, and no model is known by name: a
mixer is the innermost module that updates the state of its layer in the cache.

Shapes: B batch, W verified positions.
"""

import copy
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch
from torch import nn
from transformers import cache_utils as cu

from .rollback import LINEAR, ColumnSnapshot, free_columns


class RecurrentStates:
    """The recurrent layers of a target's cache, with what it takes to rewind them.

    Args:
        target: The model; its mixers are found by a first forward under `watch`.
        cache: Its cache, after the prefill.
    """

    def __init__(self, target: nn.Module, cache: Any):
        self.cache = cache
        self.layers = {i: layer for i, layer in enumerate(cache.layers) if isinstance(layer, LINEAR)}
        self.saved: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
        self.calls: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        self.entered: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}
        self.thread = get_ident()
        self.handles = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            for module in target.modules()
            if getattr(module, "layer_idx", None) in self.layers
        ]
        for layer_idx, layer in self.layers.items():
            self._watch(layer_idx, layer)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() == self.thread:  # other threads may be generating with this target
            self.entered[module.layer_idx] = (module, args, kwargs)

    def _watch(self, layer_idx: int, layer: Any) -> None:
        """Note, at every update of a layer's state, the call of the module that is making it."""
        for name in ("update_conv_state", "update_recurrent_state"):
            update = getattr(type(layer), name)

            def noting(*args: Any, update: Any = update, **kwargs: Any) -> Any:
                self.calls[layer_idx] = self.entered[layer_idx]
                return update(layer, *args, **kwargs)

            setattr(layer, name, noting)

    def close(self) -> None:
        """Remove every hook."""
        for handle in self.handles:
            handle.remove()
        for layer in self.layers.values():
            for name in ("update_conv_state", "update_recurrent_state"):
                layer.__dict__.pop(name, None)

    def save(self) -> None:
        """Remember the states; updates write into them in place, so they are copied."""
        for layer_idx, layer in self.layers.items():
            self.saved[layer_idx] = (_cloned(layer.conv_states), _cloned(layer.recurrent_states))

    def restore(self) -> None:
        """Put back the states of the last `save`."""
        for layer_idx, (conv, recurrent) in self.saved.items():
            self.layers[layer_idx].conv_states = _cloned(conv)
            self.layers[layer_idx].recurrent_states = _cloned(recurrent)

    def keep(self, counts: Sequence[int], width: int) -> None:
        """Make the states those after the first `counts[b]` of the `width` tokens verified since `save`, per row."""
        for layer in self.layers.values():
            if layer.record_past:  # a layer with a sliding window, too, whose convolution kept more than it needs
                cu.LinearAttentionLayer.crop(layer, 0)
        for count in sorted(set(counts) - {width}):
            rows = [row for row, own in enumerate(counts) if own == count]
            self._replay(rows, count, width, len(counts))

    def _replay(self, rows: list[int], count: int, width: int, batch_size: int) -> None:
        index = torch.tensor(rows)
        for layer_idx, layer in self.layers.items():
            rewound = self._rewound(layer_idx, index)
            cache = copy.copy(self.cache)
            cache.layers = list(self.cache.layers)
            cache.layers[layer_idx] = rewound

            def cut(value: Any, cache: Any = cache) -> Any:
                return _cut(value, self.cache, cache, index, count, batch_size, width)

            if count > 0:
                if layer_idx not in self.calls:
                    continue  # a layer of this type that holds no state, such as a feed-forward one
                module, args, kwargs = self.calls[layer_idx]
                module(*map(cut, args), **{key: cut(value) for key, value in kwargs.items()})
            if rewound.record_past:
                cu.LinearAttentionLayer.crop(rewound, 0)
            _write_rows(layer.conv_states, rewound.conv_states, index, batch_size)
            _write_rows(layer.recurrent_states, rewound.recurrent_states, index, batch_size)

    def _rewound(self, layer_idx: int, index: torch.Tensor) -> Any:
        """A copy of a cache layer with the saved states of some rows."""
        layer = copy.copy(self.layers[layer_idx])
        for name in ("update_conv_state", "update_recurrent_state"):
            layer.__dict__.pop(name, None)
        conv, recurrent = self.saved[layer_idx]
        layer.conv_states = {key: None if s is None else s[index.to(s.device)] for key, s in conv.items()}
        layer.recurrent_states = {key: None if s is None else s[index.to(s.device)] for key, s in recurrent.items()}
        return layer


def _cloned(states: dict[int, Any]) -> dict[int, Any]:
    return {key: None if state is None else state.clone() for key, state in states.items()}


def _write_rows(states: dict[int, Any], rows: dict[int, Any], index: torch.Tensor, batch_size: int) -> None:
    """Overwrite some rows of a layer's states."""
    for key, state in rows.items():
        if state is None:
            continue
        if len(index) == batch_size:
            states[key] = state
        else:
            states[key][index.to(state.device)] = state


def _cut(value: Any, old: Any, new: Any, index: torch.Tensor, count: int, batch_size: int, width: int) -> Any:
    """An argument of a mixer's call, cut to some rows and to their first `count` tokens, with the cache exchanged."""
    if value is old:
        return new
    if isinstance(value, tuple):
        return tuple(_cut(part, old, new, index, count, batch_size, width) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() and value.shape[0] == batch_size and len(index) < batch_size:
        value = value[index.to(value.device)]
    if value.dim() > 1 and value.shape[1] == width:
        value = value[:, :count]
    return value


def check_multi_token_forward(runner: Any, anchors: torch.Tensor) -> None:
    """Refuse a model whose forward of several tokens forgets the cached state (some restart from zero).

    One token's logits are compared with those of the first of eight, once per model class (of fewer, where a static
    cache has no room for eight). A restart changes them by
    their own magnitude. Some kernels for one token differ by a thousandth from those for several (Zamba2's and
    Nemotron-H's leave out the step size's floor), which is no reason to refuse.

    Raises:
        ValueError: If they differ by more than that.
    """
    key = type(runner.target)
    width = min(8, free_columns(runner.cache))
    if key not in _continues_state and width > 1:
        one = _probe(runner, anchors)
        several = _probe(runner, anchors.expand(-1, width).contiguous())
        _continues_state[key] = _is_near(one, several)
    if not _continues_state.get(key, True):
        raise ValueError(
            f"{key.__name__} restarts from an empty state when it is given several tokens at once, so blocks cannot "
            "be verified with it; generate without `assistant_model`, or use a Transformers version that corrects it."
        )


_continues_state: dict[type, bool] = {}


def _probe(runner: Any, block: torch.Tensor) -> torch.Tensor:
    """Logits of the first of some tokens (B, V), leaving the cache as it was."""
    columns = ColumnSnapshot(runner.cache)
    runner.recurrent.save()
    logits = runner.verify(block).logits[:, 0]
    columns.restore()
    runner.recurrent.restore()
    runner.layout.length -= block.shape[1]
    return logits


def _is_near(one: torch.Tensor, several: torch.Tensor) -> bool:
    kernels = 0.02 * max(1.0, float(one.abs().max()))
    return torch.allclose(one, several, rtol=0, atol=max(kernels, tolerance(one)))


def tolerance(logits: torch.Tensor) -> float:
    """What rounding may do to logits: their own magnitude times a dtype's slack.

    Recurrent kernels compute in float32 even in a float64 model, so that is the finest there is.
    """
    slack = 1e-3 if logits.dtype in (torch.float64, torch.float32) else 0.06
    return slack * max(1.0, float(logits.abs().max()))


__all__ = ["RecurrentStates", "check_multi_token_forward", "tolerance"]
