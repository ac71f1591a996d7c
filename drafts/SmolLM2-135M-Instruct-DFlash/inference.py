"""Running a whole call under `torch.inference_mode`, where nobody can tell.

`generate` runs under `torch.no_grad`, so that what it makes may be used in training. Without the bookkeeping for that,
a forward of a few tokens is some 5 % shorter on a CPU. Autograd refuses tensors made in inference mode for ever, so
it is for calls whose tensors nobody keeps. What the caller does get, token ids and perhaps a cache, is copied outside.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .processors import BlockProcessor
from .sequences import Sequences
from .stopping import StopRule


def inference_mode_if_private(
    target: Any,
    draft: Any,
    cache: Any,
    sequences: Sequences,
    processor: BlockProcessor,
    stop_rule: StopRule,
    synced_gpus: bool,
) -> AbstractContextManager[Any]:
    """`torch.inference_mode()` if no tensor of this call outlives it, else a context that changes nothing.

    Tensors outlive it in scores and states that were asked for; in a cache that was handed over, or that the target
    keeps for its next call (static ones); in code of the caller's that is shown some (criteria, processors, forward
    hooks); in a model that is being trained, and in weights that are gathered from other processes for the forward.
    """
    is_kept = (
        sequences.records_tensors
        or getattr(cache, "_is_user_defined", False)
        or getattr(cache, "is_compileable", False)
        or not processor.is_pointwise
        or not stop_rule.is_rowwise
        or synced_gpus
        or target.training
        or draft.training
        or _is_watched(target)
        or _is_watched(draft)
    )
    return nullcontext() if is_kept else torch.inference_mode()


def make_ordinary(cache: Any) -> None:
    """Give a cache from a private call, which the caller will see, tensors that autograd takes."""

    def ordinary(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ordinary(item) for key, item in value.items()}
        return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value

    for layer in cache.layers:
        for name, value in vars(layer).items():
            setattr(layer, name, ordinary(value))


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """For what is shown to the caller in the middle of a private call: tensors as `generate` itself makes them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _is_watched(model: torch.nn.Module) -> bool:
    """Whether forward hooks see what the modules compute, and may keep it."""
    return any(
        _may_keep_tensors(hook)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in list(hooks.values())  # other threads may be adding hooks of their own
    )


def _may_keep_tensors(hook: Callable[..., Any]) -> bool:
    """True unless it is one of Transformers' own, which serve one forward, or says that it keeps none."""
    is_of_transformers = getattr(hook, "__module__", "").startswith("transformers.")
    return not (is_of_transformers or getattr(hook, "keeps_no_tensors", False))


__all__ = ["inference_mode_if_private", "make_ordinary", "ordinary_tensors"]
