"""The benchmark record: one JSON object, its schema below, its version checked wherever one is read.

    {
      "schema": "dflash-hf/benchmark",      always
      "schema_version": 1,                  raised whenever a field changes its meaning or goes away
      "date": "2026-11-29T23:00:00Z",       of the last measured prompt, UTC
      "commit": "6d4661e" | "unknown",      of the measuring code; "-dirty" behind it if the tree had changes
      "dtype": "bfloat16",
      "hardware": {"cpu", "cores", "threads", "memory_gib", "gpu", "gpus"},          gpu null on a CPU
      "versions": {"dflash_hf", "transformers", "torch", "python", "platform", ...},
      "target": {"name", "parameters"},
      "draft": {"name", "parameters", "block_size"} | null,
      "settings": {"max_new_tokens", "max_samples", "temperature", "warm_up_tokens", "seed", "fingerprints", ...},
      "prompts": {TASK: {"template_kwargs": {...}, "first_prompt_ids": [...], "first_prompt": "..."}},
      "rows": [ROW, ...],                   one per task and method, in the order measured
      "best_possible": [BEST, ...],         see `dflash_hf.evaluation.limits`; empty without a draft
      "flagged": [FLAG, ...]                outputs that are not plain generate's, and repetitions, one by one
    }

    ROW = {
      "task": "gsm8k", "method": "dflash",
      "method_settings": {"draft_tree_budget": 0},
      "samples": 128,                       prompts the figures below are made of
      "samples_repetitive": 2,              prompts left out of every figure: the target or the method fell into a loop
      "correct": true | null,               false if any output was wrong; null where it cannot be told (sampling)
      "outputs": {"identical": 127, "near_tie": 3, "wrong": 0, "not_compared": 0},      the repetitive ones, too
      "tokens_per_second": 51.3,            of decoding, median over prompts
      "tokens_per_second_ci": [48.9, 53.0], 95 %, bootstrap over prompts
      "tokens_per_second_pooled": 50.8,     all decoded tokens / all decoding time
      "speedup": 2.31, "speedup_ci": [..],  plain time per token / this one's, median over prompts; 1 for plain
      "speedup_pooled": 2.28,
      "time_to_first_token": 0.041,         seconds, median
      "prefill_tokens_per_second": 1200.0,
      "acceptance_length": 4.2,             tokens committed per round, over all rounds; null where nothing drafts
      "acceptance_length_ci": [4.0, 4.4],
      "acceptance_histogram": [n1, n2, ..], rounds that committed 1, 2, ... tokens
      "by_position": [p1, p2, ...],         share of rounds that accepted the proposal at place 1, 2, ... of the block
      "by_place": [[first, last, mean, rounds], ...],   acceptance length by place in the answer, in tokens
      "seconds": {"prefill", "draft", "head", "target", "elsewhere"},    totals; the last four make up decoding
      "peak_memory_mib": 812.0              of the process on a CPU (a high-water mark), of the device on a GPU
    }

Beside it lies `samples.jsonl`: a first line with everything that must agree for a run to be resumed, then one line per
prompt with each method's tokens, times and verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = "dflash-hf/benchmark"
SCHEMA_VERSION = 1


def check_version(found: dict[str, Any], source: Path) -> None:
    """Refuse what another version of this package wrote.

    Raises:
        ValueError: If the object is no benchmark record, or one of another schema version.
    """
    if found.get("schema") != SCHEMA:
        raise ValueError(
            f"{source} is not a benchmark record: its `schema` is {found.get('schema')!r}, not {SCHEMA!r}."
        )
    version = found.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{source} has `schema_version` {version} but this dflash-hf reads and writes {SCHEMA_VERSION}; measure "
            "again into another --output, or use the dflash-hf that wrote it."
        )


def read_record(path: Path) -> dict[str, Any]:
    """A finished record.

    Raises:
        ValueError: If the file is missing, is not JSON, lacks a field, or comes from another version.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a finished `dflash-hf benchmark` writes it.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); the file is damaged, run the benchmark again.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a benchmark record: it holds a {type(found).__name__}.")
    check_version(found, path)
    _check_fields(found, path)
    return found


# What a report is made of: the fields, and what each holds.
_TOP: dict[str, type | tuple[type, ...]] = {
    "date": str,
    "commit": str,
    "dtype": str,
    "hardware": dict,
    "versions": dict,
    "target": dict,
    "draft": (dict, type(None)),
    "settings": dict,
    "prompts": dict,
    "rows": list,
    "best_possible": list,
    "flagged": list,
}
_INSIDE = {
    "hardware": ("gpu", "cpu", "cores", "threads"),
    "settings": ("temperature", "max_new_tokens"),
    "target": ("name",),
    "draft": ("name",),
}
_ROW = (
    "task", "method", "samples", "correct", "outputs", "tokens_per_second", "tokens_per_second_ci", "speedup",
    "speedup_ci", "time_to_first_token", "acceptance_length", "acceptance_length_ci", "by_position", "by_place",
    "seconds", "peak_memory_mib",
)  # fmt: skip
_BEST = (
    "task", "method", "plain_step", "draft_per_round", "head_per_round", "target_per_round", "elsewhere_per_round",
    "overhead_share", "best_speedup", "speedup", "reached",
)  # fmt: skip
_EACH = {"rows": _ROW, "best_possible": _BEST, "flagged": ("kind",)}


def _check_fields(record: dict[str, Any], source: Path) -> None:
    wrong = next((name for name, kinds in _TOP.items() if not isinstance(record.get(name, ...), kinds)), None)
    if wrong is None:
        wrong = next(_lacking(record), None)
    if wrong is not None:
        raise ValueError(f"{source} is damaged: it has no right `{wrong}`; run the benchmark again.")


def _lacking(record: dict[str, Any]) -> Iterator[str]:
    """Paths of the fields that are not there."""
    inside = [(name, record[name] or dict.fromkeys(fields), fields) for name, fields in _INSIDE.items()]
    inside += [
        (f"prompts.{task}", each, ("template_kwargs", "first_prompt")) for task, each in record["prompts"].items()
    ]
    for name, fields in _EACH.items():
        inside += [(f"{name}[{i}]", each, fields) for i, each in enumerate(record[name])]
    for i, row in enumerate(record["rows"]):
        if isinstance(row, dict):
            inside.append((f"rows[{i}].seconds", row.get("seconds"), ("draft", "head", "target", "elsewhere")))
            inside.append((f"rows[{i}].outputs", row.get("outputs"), ()))
    for path, holder, fields in inside:
        if not isinstance(holder, dict):
            yield path
        else:
            yield from (f"{path}.{field}" for field in fields if field not in holder)


def write_text(path: Path, text: str) -> None:
    """Write aside and rename, so that a killed run leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write a record under the current schema."""
    write_text(path, json.dumps({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **record}, indent=2) + "\n")


__all__ = ["SCHEMA", "SCHEMA_VERSION", "check_version", "read_record", "write_record", "write_text"]
