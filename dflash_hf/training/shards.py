"""A folder of training sequences that is written over many sittings: Parquet shards, failures aside, one manifest.

Shard `k` answers rows `k * shard_size` to `(k + 1) * shard_size - 1` of the input and is renamed into place when it is
complete. What exists is therefore done and what does not is not: a run killed at any moment loses at most the shards
that it had in work, and no row is ever there twice.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .prompts import Failure
from .responses import Response

if TYPE_CHECKING:
    import pyarrow

MANIFEST_NAME = "manifest.json"
LOCK_NAME = ".writing.lock"
# A file may move, and a run may go over from a local target to a server: neither changes what is asked.
NOT_COMPARED = ("source", "dtype")
COUNTS_KEY = b"dflash_hf.counts"


def shard_path(folder: Path, index: int) -> Path:
    """Where the answers to the prompts of shard `index` are kept."""
    return folder / f"shard-{index:05d}.parquet"


def failures_path(folder: Path, index: int) -> Path:
    """Where the rows of shard `index` that failed are set aside, each with its reason."""
    return folder / "failures" / f"{index:05d}.jsonl"


def schema() -> pyarrow.Schema:
    """The columns of a shard. `input_ids` is prompt and answer, `prompt_length` tells where the answer starts."""
    import pyarrow as pa

    return pa.schema(
        [
            ("row", pa.int64()),
            ("input_ids", pa.list_(pa.int32())),
            ("prompt_length", pa.int32()),
            ("finish_reason", pa.string()),
            ("kind", pa.string()),
        ]
    )


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that a reader finds the old text or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def count(answers: Sequence[Response | Failure]) -> dict[str, int]:
    """What a shard adds to the manifest: sequences, their tokens, failures and how the answers ended."""
    counts: Counter[str] = Counter(sequences=0, prompt_tokens=0, response_tokens=0, failures=0)
    for answer in answers:
        if isinstance(answer, Failure):
            counts["failures"] += 1
            continue
        counts["sequences"] += 1
        counts["prompt_tokens"] += len(answer.prompt.token_ids)
        counts["response_tokens"] += len(answer.token_ids)
        counts[f"ended_by_{answer.finish_reason}"] += 1
    return dict(counts)


def write_shard(folder: Path, index: int, answers: Sequence[Response | Failure]) -> None:
    """Write one shard. Its failures go first: the shard's own rename is what declares its rows done."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if failures:
        lines = [json.dumps({"row": failure.row, "reason": failure.reason}) + "\n" for failure in failures]
        write_text_atomically(failures_path(folder, index), "".join(lines))
    rows = [
        {
            "row": answer.prompt.row,
            "input_ids": answer.prompt.token_ids + answer.token_ids,
            "prompt_length": len(answer.prompt.token_ids),
            "finish_reason": answer.finish_reason,
            "kind": answer.prompt.kind,
        }
        for answer in answers
        if isinstance(answer, Response)
    ]
    described = schema().with_metadata({COUNTS_KEY: json.dumps(count(answers)).encode()})
    path = shard_path(folder, index)
    aside = path.with_name(f".{path.name}.partial")
    pq.write_table(pa.Table.from_pylist(rows, schema=described), aside)
    os.replace(aside, path)


def shard_counts(path: Path) -> dict[str, int]:
    """The counts stored with a shard.

    Raises:
        ValueError: the file is no shard of ours, or damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
        return json.loads(metadata[COUNTS_KEY])
    except (OSError, pa.ArrowException, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is not a readable shard ({type(error).__name__}): delete it, and run again to make it anew"
        ) from error


def total_counts(folder: Path, shards: int) -> dict[str, int]:
    """The sum of the counts of all shards that are there."""
    total: Counter[str] = Counter()
    for index in range(shards):
        if (path := shard_path(folder, index)).is_file():
            total.update(shard_counts(path) | {"shards": 1})
    return dict(total)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the JSON that says how the folder's data was made."""
    write_text_atomically(folder / MANIFEST_NAME, json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The folder's manifest, or None where there is none.

    Raises:
        ValueError: the manifest is damaged.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON ({error}): name another --output folder") from error


def check_same_run(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to continue a folder with other settings than those it was begun with.

    Raises:
        ValueError: a setting differs; names it with both values.
    """
    for section in ("target", "input", "generation"):
        for name in sorted(stored.get(section, {}).keys() | wanted[section].keys()):
            before, now = stored.get(section, {}).get(name), wanted[section].get(name)
            if before != now and name not in NOT_COMPARED:
                raise ValueError(
                    f"{folder} was begun with {section}.{name}={before!r} and this run has {now!r}: give the same "
                    "settings to continue it, or name another --output folder"
                )
