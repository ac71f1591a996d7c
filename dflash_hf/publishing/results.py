"""A benchmark record as a card shows it: one row per task and method, and two plots.

The record is a JSON object with `rows`, each of them a measured pair of `task` and `method` with any of
`tokens_per_second`, `speedup`, `acceptance_length`, `acceptance_histogram` (how often a round committed 1, 2, ...
tokens) and `samples`; and with `hardware`, `versions`, `date`, `commit` and `dtype`, without which figures mean
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONDITIONS = ("hardware", "versions", "date", "commit", "dtype")
COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "acceptance_length": ("acceptance length", "{:.2f}"),
    "samples": ("prompts", "{:d}"),
}
NOT_MEASURED = "-"


@dataclass
class Results:
    """The measured rows, and the conditions they hold under."""

    rows: list[dict[str, Any]]
    conditions: dict[str, str]

    @property
    def columns(self) -> list[str]:
        """The fields that at least one row has."""
        return [name for name in COLUMNS if any(row.get(name) is not None for row in self.rows)]

    def table(self) -> list[list[str]]:
        """Header and cells as text. A cell without a measurement is a dash; a column without any is left out."""
        header = ["task", "method", *(COLUMNS[name][0] for name in self.columns)]
        cells = [[row["task"], row["method"], *(self._cell(row, name) for name in self.columns)] for row in self.rows]
        return [header, *cells]

    @staticmethod
    def _cell(row: dict[str, Any], name: str) -> str:
        return NOT_MEASURED if row.get(name) is None else COLUMNS[name][1].format(row[name])

    def drafting(self) -> list[dict[str, Any]]:
        """The rows in which the draft proposed something and its acceptance was measured."""
        return [row for row in self.rows if row.get("acceptance_length") is not None]

    def by_position(self) -> dict[str, list[float]]:
        """Per drafting row: the share of rounds that accepted the proposal at position 1, 2, ... of the block.

        A round that committed n tokens accepted n - 1 proposals; the n-th token is the target's own.
        """
        curves = {}
        for row in self.drafting():
            counts = row.get("acceptance_histogram")
            if counts and sum(counts):
                label = f"{row['task']}, {row['method']}"
                curves[label] = [sum(counts[position:]) / sum(counts) for position in range(1, len(counts))]
        return curves

    def best_speedups(self) -> tuple[float, float] | None:
        """The lowest and the highest, over tasks, of each task's best measured speed-up with the draft."""
        best: dict[str, float] = {}
        for row in self.drafting():
            if row.get("speedup") is not None:
                best[row["task"]] = max(best.get(row["task"], 0.0), row["speedup"])
        return (min(best.values()), max(best.values())) if best else None


def read_results(record: dict[str, Any]) -> Results:
    """The rows of a benchmark record that may stand on a card: those whose output was right.

    Raises:
        ValueError: If the record has no rows, a row lacks its task or method, or a condition is not stated.
    """
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError("The benchmark record has no `rows`; run `dflash-hf benchmark` anew or leave it out.")
    for field in CONDITIONS:
        if not record.get(field):
            raise ValueError(
                f"The benchmark record does not state its `{field}`, and a figure without it means nothing; add it."
            )
    for number, row in enumerate(rows):
        if not row.get("task") or not row.get("method"):
            raise ValueError(
                f"Row {number} of the benchmark record lacks `task` or `method`; add it or remove the row."
            )
    kept = [row for row in rows if row.get("correct", True)]
    return Results(kept, {field: _text(record[field]) for field in CONDITIONS})


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items() if item not in (None, ""))
    return str(value)


def draw_plots(results: Results, folder: Path) -> dict[str, str]:
    """PNG plots of acceptance in `folder`; file name -> what it shows. Same results, same bytes.

    Raises:
        ValueError: If there is something to draw and Matplotlib is not installed.
    """
    drawn = {}
    if results.drafting():
        drawn["acceptance_by_task.png"] = "Acceptance length by task"
    if results.by_position():
        drawn["acceptance_by_position.png"] = "Share of rounds that accept each position of the block"
    if not drawn:
        return {}
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("The card's plots need Matplotlib; run `pip install matplotlib`.") from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, caption in drawn.items():
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        draw = _draw_tasks if name == "acceptance_by_task.png" else _draw_positions
        draw(figure.subplots(), results)
        figure.axes[0].set_title(caption)
        figure.savefig(folder / name, dpi=110, metadata={"Software": None})
    return drawn


def _draw_tasks(axes: Any, results: Results) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in results.drafting()))
    methods = list(dict.fromkeys(row["method"] for row in results.drafting()))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        rows = [row for row in results.drafting() if row["method"] == method]
        places = [tasks.index(row["task"]) + (number - (len(methods) - 1) / 2) * width for row in rows]
        bars = axes.bar(places, [row["acceptance_length"] for row in rows], width, label=method)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("tokens per round")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.legend(fontsize=8)


def _draw_positions(axes: Any, results: Results) -> None:
    for label, shares in results.by_position().items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.set_xlabel("position in the block (the anchor is 0)")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)


__all__ = ["Results", "draw_plots", "read_results"]
