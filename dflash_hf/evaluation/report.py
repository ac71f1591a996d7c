"""A benchmark record as Markdown for readers, and as plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DASH = "-"


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        f"# {_pair(record)}",
        conditions(record),
        "## Speed",
        "Tokens per second while decoding, and the speed-up over plain `generate`: medians over prompts, with 95 % "
        "intervals from resampling the prompts. Methods took turns prompt by prompt.",
        table(_SPEED, record["rows"]),
        "## Acceptance",
        "Tokens that a round commits (accepted candidates and the target's own), and where decoding spends its time.",
        table(_ACCEPTANCE, [row for row in record["rows"] if row["acceptance_length"] is not None]),
        "## How fast it could be",
        how_best(record["best_possible"]),
        table(_BEST, record["best_possible"]),
        "## Outputs",
        outputs(record),
        *[f"![{caption}]({name})" for name, (caption, _) in PLOTS.items()],
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def how_best(best: Sequence[dict[str, Any]]) -> str:
    """What the best possible speed-up was worked out from."""
    if any(row.get("bare_verification") is not None for row in best):
        passes = (
            "verification as a bare forward pass of as many tokens, timed beside each prompt, behind it and half of "
            "its answer, draft and head as in the loop"
        )
    else:
        passes = "all three as in the loop, so that what was not reached is the overhead"
    return (
        f"Best: acceptance length x plain step / (draft + head + verification), with {passes}. Overhead: the share of "
        "a round outside the passes in the loop."
    )


def _pair(record: dict[str, Any]) -> str:
    draft = record["draft"]["name"] if record["draft"] else "no draft"
    return f"{record['target']['name']} with {draft}"


def conditions(record: dict[str, Any]) -> str:
    """What the figures hold for."""
    hardware, versions, settings = record["hardware"], record["versions"], record["settings"]
    where = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"
    sampling = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']}"
    lines = [
        f"* {where}; {record['dtype']}, batch size 1, {sampling}, at most {settings['max_new_tokens']} new tokens",
        f"* {record['date']}, commit {record['commit']}; "
        + ", ".join(f"{name} {value}" for name, value in versions.items()),
    ]
    for task, prompt in record["prompts"].items():
        kwargs = prompt["template_kwargs"] or "none"
        lines.append(
            f"* {task}: chat template arguments {kwargs}; its first prompt begins {prompt['first_prompt'][:60]!r}"
        )
    return "\n".join(lines)


Column = tuple[str, Callable[[dict[str, Any]], str]]


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table; empty without rows."""
    if not rows:
        return ""
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[_plain(cell(row)) for _, cell in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text that does not end a cell of a table."""
    return " ".join(text.replace("|", r"\|").split())


def _number(name: str, form: str = "{:.2f}", scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    return lambda row: DASH if row.get(name) is None else form.format(row[name] * scale)


def _interval(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        value, bounds = row[name], row[f"{name}_ci"]
        if value is None:
            return DASH
        around = f" ({form.format(bounds[0])} to {form.format(bounds[1])})" if bounds else ""
        return form.format(value) + around

    return cell


def _name(row: dict[str, Any]) -> str:
    return row["method"] if row["correct"] is not False else f"**WRONG** {row['method']}"


def _share(part: str) -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        total = sum(seconds for name, seconds in row["seconds"].items() if name != "prefill")
        return f"{row['seconds'][part] / total:.0%}" if total else DASH

    return cell


_TASK: Column = ("task", lambda row: row["task"])
_METHOD: Column = ("method", _name)
_SPEED: list[Column] = [
    _TASK,
    _METHOD,
    ("tokens/s", _interval("tokens_per_second", "{:.1f}")),
    ("speed-up", _interval("speedup", "{:.2f}")),
    ("first token, ms", _number("time_to_first_token", "{:.0f}", 1000)),
    ("peak memory, MiB", _number("peak_memory_mib", "{:.0f}")),
    ("prompts", lambda row: str(row["samples"])),
]
_ACCEPTANCE: list[Column] = [
    _TASK,
    _METHOD,
    ("acceptance length", _interval("acceptance_length", "{:.2f}")),
    ("by position", lambda row: " ".join(f"{share:.2f}" for share in row["by_position"]) or DASH),
    ("by place in the answer", lambda row: " ".join(f"{int(p[0])}+: {p[2]:.2f}" for p in row["by_place"])),
    ("draft", _share("draft")),
    ("head", _share("head")),
    ("target", _share("target")),
    ("elsewhere", _share("elsewhere")),
]
_BEST: list[Column] = [
    _TASK,
    ("method", lambda row: row["method"]),
    ("plain step, ms", _number("plain_step", "{:.1f}", 1000)),
    ("draft + head, ms", lambda row: f"{1000 * (row['draft_per_round'] + row['head_per_round']):.1f}"),
    ("verification, ms", _number("target_per_round", "{:.1f}", 1000)),
    ("bare verification, ms", _number("bare_verification", "{:.1f}", 1000)),
    ("elsewhere, ms", _number("elsewhere_per_round", "{:.1f}", 1000)),
    ("overhead", _number("overhead_share", "{:.1%}")),
    ("best speed-up", _number("best_speedup")),
    ("measured", _number("speedup")),
    ("reached", _number("reached", "{:.0%}")),
]


def outputs(record: dict[str, Any]) -> str:
    """What each output was held to, and what was left out."""
    lines = []
    for row in record["rows"]:
        counts = row["outputs"]
        said = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in counts.items() if number)
        lines.append(f"* {row['task']}, {_name(row)}: {said or 'nothing measured'}")
    loops = [flag.get("method") for flag in record["flagged"] if flag["kind"] == "repetitive"]
    repetitive = loops.count(None)
    skipped = sum(1 for flag in record["flagged"] if flag["kind"] == "skipped")
    if repetitive:
        lines.append(f"* {repetitive} prompts are in no figure: the target alone answered them with a loop")
    for method in dict.fromkeys(filter(None, loops)):
        lines.append(f"* {loops.count(method)} prompts are in no figure of {method}: it answered them with a loop")
    if skipped:
        lines.append(f"* {skipped} prompts were not measured: they are longer than the target's context")
    return "\n".join(lines)


def check_plots() -> None:
    """Refuse plots where Matplotlib is not installed.

    Raises:
        ValueError: Says how to go on.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("The plots need Matplotlib; run `pip install matplotlib`, or pass --no-plots.")


def draw_plots(record: dict[str, Any], folder: Path) -> None:
    """Write the PNG plots.

    Raises:
        ValueError: If Matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    for name, (caption, draw) in PLOTS.items():
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        draw(axes, record["rows"])
        axes.set_title(caption)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=7)
        figure.savefig(folder / name, dpi=120, metadata={"Software": None})


def _label(*names: str, between: str = ", ") -> str:
    """Names for a plot, where a pair of dollar signs would begin mathematics."""
    return between.join(names).replace("$", r"\$")


def _draw_speed(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    tasks, methods = _names(rows, "task"), _names(rows, "method")
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        mine = [row for row in rows if row["method"] == method and row["speedup"] is not None]
        places = [tasks.index(row["task"]) + (number - (len(methods) - 1) / 2) * width for row in mine]
        heights = [row["speedup"] for row in mine]
        bounds = [row["speedup_ci"] or [row["speedup"]] * 2 for row in mine]
        below = [max(0.0, height - low) for height, (low, _) in zip(heights, bounds, strict=True)]
        above = [max(0.0, high - height) for height, (_, high) in zip(heights, bounds, strict=True)]
        axes.bar(
            places,
            heights,
            width,
            yerr=[below, above] if mine else None,
            label=_label(method),
            error_kw={"linewidth": 0.8},
        )
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(tasks)), [_label(task) for task in tasks])
    axes.set_ylabel("speed-up over plain generate")


def _draw_positions(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        if row["by_position"]:
            places = range(1, len(row["by_position"]) + 1)
            axes.plot(places, row["by_position"], marker="o", markersize=3, label=_label(row["task"], row["method"]))
    axes.set_xlabel("place in the block (the anchor is 0)")
    axes.set_ylabel("share of rounds that accept it")
    axes.set_ylim(0, 1.02)


def _draw_places(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        if row["by_place"]:
            starts, means = [place[0] for place in row["by_place"]], [place[2] for place in row["by_place"]]
            axes.step(starts, means, where="post", marker="o", markersize=3, label=_label(row["task"], row["method"]))
    axes.set_xlabel("place in the answer, tokens")
    axes.set_ylabel("tokens per round")


def _draw_time(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    labels = [_label(row["task"], row["method"], between="\n") for row in rows]
    bottoms = [0.0] * len(rows)
    for part in ("draft", "head", "target", "elsewhere"):
        totals = [sum(s for name, s in row["seconds"].items() if name != "prefill") or 1.0 for row in rows]
        heights = [row["seconds"][part] / total for row, total in zip(rows, totals, strict=True)]
        axes.bar(range(len(rows)), heights, bottom=bottoms, label=part)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(rows)), labels, rotation=90, fontsize=6)
    axes.set_ylabel("share of decoding")


def _names(rows: Sequence[dict[str, Any]], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


PLOTS: dict[str, tuple[str, Callable[[Any, Sequence[dict[str, Any]]], None]]] = {
    "speedup.png": ("Speed-up by task and method", _draw_speed),
    "acceptance_by_position.png": ("Acceptance by place in the block", _draw_positions),
    "acceptance_by_place.png": ("Acceptance length by place in the answer", _draw_places),
    "time.png": ("Where the time of decoding goes", _draw_time),
}

__all__ = ["PLOTS", "check_plots", "draw_plots", "markdown"]
