"""Positions at which a target's rotary embedding changes, so that no verification reaches across one.

Two kinds of RoPE choose their frequencies by the largest position of a forward: `longrope` changes once, behind the
length of the first training; `dynamic` with every token behind the trained length. One-by-one decoding changes at the
token that gets there, a block would change with its last one.
"""

from typing import Any


class RopeLimits:
    """How many tokens one forward of a target may hold, by the position of the first.

    Args:
        config: Of the target's language model.
    """

    def __init__(self, config: Any):
        self.limits: list[tuple[int, bool]] = []  # a number of positions, and whether every one behind it changes
        parameters = getattr(config, "rope_parameters", None) or {}
        by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
        for rope in by_layer_type or [parameters]:
            if rope.get("rope_type") == "longrope":
                self.limits.append((rope["original_max_position_embeddings"], False))
            elif rope.get("rope_type") == "dynamic":
                self.limits.append((config.max_position_embeddings, True))

    @classmethod
    def of(cls, target: Any) -> "RopeLimits":
        """Those of a model."""
        return cls(target.config.get_text_config(decoder=True))

    def why_not_in_a_batch(self, max_length: int) -> str | None:
        """Why rows up to `max_length` tokens cannot keep a pace of their own; `None` if they can."""
        if any(limit < max_length - 1 for limit, _ in self.limits):  # the last token is not run
            return (
                "the target's rotary embedding follows the longest row of a batch, and drafted rows do not keep step"
            )
        return None

    def width_at(self, position: int) -> int | None:
        """Tokens that a forward may hold from `position` on; `None`: any number."""
        widths = [1 if changes else None for limit, changes in self.limits if position >= limit]
        widths += [limit - position for limit, _ in self.limits if position < limit]
        return min((width for width in widths if width is not None), default=None)


__all__ = ["RopeLimits"]
