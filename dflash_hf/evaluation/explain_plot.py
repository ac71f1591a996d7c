"""The attention of one draft layer as a picture, the boundary between injected context and block marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models import Pair
    from .trace import Trace

MOST_LABELS = 72


def draw_attention(pair: Pair, trace: Trace, number: int, layer: int, path: Path) -> None:
    """Draw the weights of a layer in round `number`, the mean over its heads, as a PNG.

    Raises:
        ValueError: If Matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs Matplotlib; run `pip install matplotlib`.") from error
    seen = trace.rounds[number]
    context, block = seen.layouts[layer]
    order = sorted(range(len(context)), key=context.__getitem__)  # a sliding layer's ring buffer wraps
    in_order = [*order, *range(len(context), len(context) + len(block))]
    weights = seen.attention[layer].mean(dim=0)[:, in_order]  # (K, T)
    num_context = len(context)
    rows = _labels(pair, block, trace, number)
    columns = _labels(pair, sorted(context), trace, number) + rows
    figure = Figure(figsize=(min(5 + 0.16 * len(columns), 18), 1.8 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(weights.numpy(), aspect="auto", cmap="viridis", vmin=0)
    axes.axvline(num_context - 0.5, color="white", linewidth=2.5)
    axes.axvline(num_context - 0.5, color="crimson", linewidth=1.2)
    step = max(1, -(-len(columns) // MOST_LABELS))
    axes.set_xticks(range(0, len(columns), step), columns[::step], rotation=90, fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("keys: left of the line from the target's features, right of it from the block")
    axes.set_ylabel("queries: the block")
    axes.set_title(f"Draft layer {layer % len(seen.attention)}, round {number + 1}, mean over heads", fontsize=10)
    figure.colorbar(image, ax=axes, label="attention")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _labels(pair: Pair, positions: list[int], trace: Trace, number: int) -> list[str]:
    """Token and position; slots of the block behind the anchor are masks."""
    known = [*trace.prompt_ids, trace.first_token]
    for earlier in trace.rounds[:number]:
        known += earlier.committed
    texts = [repr(pair.tokenizer.decode([known[p]])) if p < len(known) else "MASK" for p in positions]
    # A dollar sign would start a formula.
    return [f"{text} {position}".replace("$", r"\$") for text, position in zip(texts, positions, strict=True)]


__all__ = ["draw_attention"]
