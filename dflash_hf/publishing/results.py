"""A benchmark record (`dflash_hf.evaluation.record`) as a card shows it: a table and two plots of acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONDITIONS = ("hardware", "versions", "date", "commit", "dtype")
SHOWN_VERSIONS = ("dflash_hf", "transformers", "torch")
COLUMNS = {
    "tokens_per_second": ("tokens/s", "{:.1f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "acceptance_length": ("acceptance length", "{:.2f}"),
    "samples": ("prompts", "{:d}"),
}
# Cells whose 95 % confidence interval the record may carry.
INTERVALS = {"tokens_per_second": "{:.1f}", "speedup": "{:.2f}", "acceptance_length": "{:.2f}"}
NOT_MEASURED = "-"


@dataclass
class Results:
    """The rows that may stand on a card, how many may not, and the conditions they were measured under."""

    rows: list[dict[str, Any]]
    num_wrong: int
    conditions: dict[str, str]
    settings: dict[str, Any]

    @property
    def columns(self) -> list[str]:
        """The fields that at least one row has."""
        return [name for name in COLUMNS if any(row.get(name) is not None for row in self.rows)]

    def table(self) -> list[list[str]]:
        """Header and cells as text. A cell without a measurement is a dash; a column without any is left out."""
        header = ["task", "method", *(COLUMNS[name][0] for name in self.columns)]
        cells = [[row["task"], row["method"], *(_cell(row, name) for name in self.columns)] for row in self.rows]
        return [header, *cells]

    def drafting(self) -> list[dict[str, Any]]:
        """The rows of this draft."""
        dflash = (row for row in self.rows if row["method"].startswith("dflash"))
        return [row for row in dflash if row.get("acceptance_length") is not None]

    def by_position(self) -> dict[str, list[float]]:
        """Per row of this draft: the share of rounds that accepted the proposal at position 1, 2, ... of the block.

        Where the record has only the histogram: a round that committed n tokens accepted n - 1 proposals, the n-th
        token is the target's own.
        """
        curves = {}
        for row in self.drafting():
            shares, counts = row.get("by_position"), row.get("acceptance_histogram")
            if not shares and counts and sum(counts):
                shares = [sum(counts[position:]) / sum(counts) for position in range(1, len(counts))]
            if shares:
                curves[f"{row['task']}, {row['method']}"] = [float(share) for share in shares]
        return curves

    def best_speedups(self) -> tuple[float, float] | None:
        """The lowest and the highest, over tasks, of each task's best measured speed-up with this draft."""
        best: dict[str, float] = {}
        for row in self.drafting():
            if row.get("speedup") is not None:
                best[row["task"]] = max(best.get(row["task"], 0.0), row["speedup"])
        return (min(best.values()), max(best.values())) if best else None


def _cell(row: dict[str, Any], name: str) -> str:
    if row.get(name) is None:
        return NOT_MEASURED
    text = COLUMNS[name][1].format(row[name])
    interval = row.get(f"{name}_ci")
    if interval and name in INTERVALS:
        text += f" ({INTERVALS[name].format(interval[0])} to {INTERVALS[name].format(interval[1])})"
    return text


def read_results(record: dict[str, Any], source: Path) -> Results:
    """The rows of a benchmark record whose output was right, with their conditions.

    Raises:
        ValueError: If it is no record, of another version, without rows, or does not state its conditions.
    """
    from dflash_hf.evaluation.record import check_version

    check_version(record, source)
    rows = record.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{source} has no `rows`; let `dflash-hf benchmark` finish or leave the record out.")
    for field in CONDITIONS:
        if not record.get(field):
            raise ValueError(
                f"{source} does not state `{field}`, and a figure without it means nothing; measure again."
            )
    kept = [row for row in rows if row.get("correct") is not False]
    conditions = {
        "hardware": _hardware(record["hardware"]),
        "versions": ", ".join(
            f"{name} {record['versions'][name]}" for name in SHOWN_VERSIONS if name in record["versions"]
        ),
        "date": str(record["date"])[:10],
        "commit": str(record["commit"]),
        "dtype": str(record["dtype"]),
    }
    return Results(kept, len(rows) - len(kept), conditions, record.get("settings") or {})


def _hardware(hardware: dict[str, Any]) -> str:
    if hardware.get("gpu"):
        return f"{hardware.get('gpus') or 1} x {hardware['gpu']}"
    cores = f" ({hardware['cores']} cores)" if hardware.get("cores") else ""
    return f"{hardware.get('cpu') or 'a CPU'}{cores}"


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
    axes.margins(y=0.15)
    axes.legend(fontsize=8)


def _draw_positions(axes: Any, results: Results) -> None:
    from matplotlib.ticker import MaxNLocator

    for label, shares in results.by_position().items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position in the block (the anchor is 0)")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)


__all__ = ["Results", "draw_plots", "read_results"]
