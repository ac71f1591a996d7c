"""Running a whole call under `torch.inference_mode`, where nobody can tell.

`generate` runs under `torch.no_grad`, so that what it makes may be used in training. Without the bookkeeping for that,
a forward of a few tokens is some 5 % shorter on a CPU. Autograd refuses tensors made in inference mode for ever, so
it is for calls whose tensors nobody keeps: the caller gets token ids, and they are made outside.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .processors import BlockProcessor
from .stopping import StopRule


def inference_mode_if_private(
    target: Any,
    draft: Any,
    cache: Any,
    generation_config: Any,
    processor: BlockProcessor,
    stop_rule: StopRule,
    synced_gpus: bool,
) -> AbstractContextManager[Any]:
    """`torch.inference_mode()` if no tensor of this call outlives it, else a context that changes nothing.

    Tensors outlive it in the returned scores, states and cache; in a cache that was handed over, or that the target
    keeps for its next call (static ones); in code of the caller's that is shown some (criteria, processors, forward
    hooks); in a model that is being trained, and in weights that are gathered from other processes for the forward.
    """
    is_kept = (
        generation_config.return_dict_in_generate
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


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """For what is shown to the caller in the middle of a private call: tensors as `generate` itself makes them."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _is_watched(model: torch.nn.Module) -> bool:
    """Whether forward hooks other than Transformers' own, which serve one forward, see what the modules compute."""
    return any(
        not getattr(hook, "__module__", "").startswith("transformers.")
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


__all__ = ["inference_mode_if_private", "ordinary_tensors"]
