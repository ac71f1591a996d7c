"""Whether a target can verify a tree: take a 4-D mask as it is, and positions that repeat."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache
from transformers import cache_utils as cu

from .recurrent import tolerance
from .rollback import ColumnSnapshot
from .target_cache import GrowingLayer
from .tree import Tree

_answers: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()  # by target and attention


def why_no_tree(runner: Any, anchors: torch.Tensor) -> str | None:
    """Why this target verifies chains only; `None` if it takes trees. Tried once per target and attention."""
    config = runner.target.config.get_text_config(decoder=True)
    name = type(runner.target).__name__
    kinds_of_layer = (cu.DynamicLayer, cu.DynamicSlidingWindowLayer, GrowingLayer)
    if not all(type(layer) in kinds_of_layer for layer in runner.cache.layers):
        return f"{name} has cache layers whose columns cannot be picked one by one"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attention implementation {config._attn_implementation!r} of {name} takes no 4-D mask"
    kinds = {*(getattr(config, "layer_types", None) or ()), *getattr(config, "attention_layers", ())}
    if getattr(config, "attention_chunk_size", None):
        kinds.add("chunked_attention")
    kinds -= {"full_attention", "sliding_attention", "global"}
    if kinds or runner.last_position is None:
        return f"{name} " + (f"has layers of type {sorted(kinds)}" if kinds else "takes no position ids")
    if not _has_windows_of(config, runner.cache):
        return f"{name} has sliding windows, but the cache was made without its config and does not show them"
    if runner.num_positions and runner.free_positions() < 2:
        return f"{name} has no positions left to try one at"
    answers = _answers.setdefault(runner.target, {})
    if config._attn_implementation not in answers:
        reason, is_certain = _try(runner, anchors)
        if not is_certain:
            return reason
        answers[config._attn_implementation] = reason
    return answers[config._attn_implementation]


def _has_windows_of(config: Any, cache: Any) -> bool:
    """Whether a cache's layers have the windows that the model's own cache has."""
    windows = [
        [getattr(layer, "sliding_window", None) for layer in layers]
        for layers in (DynamicCache(config=config).layers, cache.layers)
    ]
    return not any(windows[0]) or windows[0] == windows[1][: len(windows[0])]


def _try(runner: Any, anchors: torch.Tensor) -> tuple[str | None, bool]:
    """Verify two siblings; the second must give the logits it gives in a chain of its own.

    Returns:
        Why not, or `None`; and whether that is so for good.
    """
    name = type(runner.target).__name__
    length = runner.layout.length
    columns = ColumnSnapshot(runner.cache)
    try:
        alone = runner.verify(torch.cat([anchors, anchors], dim=1)).logits[:, -1]
        columns.restore()
        runner.layout.length = length
        second = runner.verify(torch.cat([anchors, torch.zeros_like(anchors), anchors], dim=1), _siblings(anchors))
        second = second.logits[:, -1]
        siblings_differ = not torch.allclose(alone, second, rtol=0, atol=tolerance(alone))
        is_certain = bool(alone.isfinite().all() and second.isfinite().all())
    except torch.OutOfMemoryError:
        return f"there is no memory to try one with {name}", False
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        first_line = str(error).partition("\n")[0]
        return f"{name} takes no 4-D mask ({first_line})", True
    finally:
        columns.restore()
        runner.layout.length = length
    return f"{name} ignores a 4-D mask" if siblings_differ else None, is_certain


def _siblings(anchors: torch.Tensor) -> Tree:
    """A root with two children, for every row."""
    batch_size = anchors.shape[0]
    parents = anchors.new_zeros(batch_size, 3)
    ancestors = torch.eye(3, dtype=torch.bool, device=anchors.device)
    ancestors[:, 0] = True
    return Tree(
        tokens=anchors.new_zeros(batch_size, 2),
        parents=parents,
        depths=anchors.new_tensor([[0, 1, 1]]).expand(batch_size, -1),
        ancestors=ancestors.expand(batch_size, -1, -1),
        log_probs=torch.zeros(batch_size, 2),
    )


__all__ = ["why_no_tree"]
