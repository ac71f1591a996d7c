"""Whether a target can verify a tree: take a 4-D mask as it is, and positions that repeat."""

from typing import Any

import torch
from transformers import cache_utils as cu

from .recurrent import tolerance
from .rollback import ColumnSnapshot
from .target_cache import GrowingLayer
from .tree import Tree

_answers: dict[tuple[Any, ...], str | None] = {}


def why_no_tree(runner: Any, anchors: torch.Tensor) -> str | None:
    """Why this target verifies chains only; `None` if it takes trees. Tried once per model class and attention."""
    config = runner.target.config.get_text_config(decoder=True)
    name = type(runner.target).__name__
    kinds_of_layer = (cu.DynamicLayer, cu.DynamicSlidingWindowLayer, GrowingLayer)
    if not all(type(layer) in kinds_of_layer for layer in runner.cache.layers):
        return f"{name} has cache layers whose columns cannot be picked one by one"
    if config._attn_implementation not in ("eager", "sdpa"):
        return f"attention implementation {config._attn_implementation!r} of {name} takes no 4-D mask"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or runner.last_position is None:
        return f"{name} " + (f"has layers of type {sorted(kinds)}" if kinds else "takes no position ids")
    key = (type(runner.target), config._attn_implementation)
    if key not in _answers:
        _answers[key] = _try(runner, anchors)
    return _answers[key]


def _try(runner: Any, anchors: torch.Tensor) -> str | None:
    """Verify two siblings; the second must give the logits it gives in a chain of its own."""
    length = runner.length
    columns = ColumnSnapshot(runner.cache)
    try:
        alone = runner.verify(torch.cat([anchors, anchors], dim=1)).logits[:, -1]
        columns.restore()
        runner.length = length
        second = runner.verify(torch.cat([anchors, torch.zeros_like(anchors), anchors], dim=1), _siblings(anchors))
        siblings_differ = not torch.allclose(alone, second.logits[:, -1], rtol=0, atol=tolerance(alone))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"{type(runner.target).__name__} takes no 4-D mask ({str(error).splitlines()[0]})"
    finally:
        columns.restore()
        runner.length = length
    return f"{type(runner.target).__name__} ignores a 4-D mask" if siblings_differ else None


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
