"""The log of a benchmark: a killed run's half line is dropped, and a damaged one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_hf.evaluation.record import SCHEMA, SCHEMA_VERSION
from dflash_hf.evaluation.sample_log import SampleLog

RUN = {"methods": {"plain": {}}}
RESULT = {
    "tokens": [1], "prefill": 1.0, "decode": 1.0, "parts": {}, "first_tokens": 1, "decoded_tokens": 0, "rounds": [],
    "peak_memory_mib": None, "widths": [], "comparison": None, "repetitive": False,
}  # fmt: skip


def line(index: int, **changes: Any) -> dict[str, Any]:
    where = {"task": "é", "index": index, "turn": 0, "prompt_tokens": 2, "prompt_ids": [1, 2]}
    return {**where, "date": "today", "repetitive": False, "results": {"plain": RESULT}, "bare": {}, **changes}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of two lines."""
    log = SampleLog(tmp_path / "samples.jsonl", RUN)
    log.add(line(0))
    log.add(line(1))
    return log.path


def test_log_cut_inside_a_character_resumes(path: Path) -> None:
    before = path.read_bytes()
    half = json.dumps(line(2), ensure_ascii=False).encode()
    path.write_bytes(before + half[: half.index("é".encode()) + 1])
    assert SampleLog(path, RUN).lines == [line(0), line(1)]
    assert path.read_bytes() == before


def test_a_prompt_counts_once(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line(1, date="tomorrow")) + "\n")
    assert SampleLog(path, RUN).lines == [line(0), line(1)]


def test_strings_may_hold_the_line_ends_that_json_does_not_escape(path: Path) -> None:
    SampleLog(path, RUN).add(line(2, task="a\u2028b"))
    assert SampleLog(path, RUN).find("a\u2028b", 2, 0) is not None


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ([1], "Line 4 of {} is damaged, it holds a list; remove that line"),
        ({"task": "x"}, "Line 4 of {} is damaged, it has no right `index`"),
        ({"task": "x", "index": 0, "turn": 0, "prompt_tokens": 1}, "it has no right `repetitive`"),
        (line(2, results={}), "it has no right `results.plain`"),
        (line(2, bare=None), "it has no right `bare`"),
        (line(2, results={"plain": RESULT | {"rounds": [2], "widths": [4]}}, bare={"3": 0.1}), "right `bare.4`"),
        (line(2, results={"plain": {"tokens": [1]}}), "it has no right `results.plain.prefill`"),
    ],
)
def test_line_of_the_wrong_shape_is_named(path: Path, added: Any, message: str) -> None:
    with path.open("a") as file:
        file.write(json.dumps(added) + "\n")
    with pytest.raises(ValueError) as error:
        SampleLog(path, RUN)
    assert message.format(path) in str(error.value)


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (5, "Line 1 of {} is damaged, it holds a int"),
        ({"schema": SCHEMA, "schema_version": SCHEMA_VERSION}, "Line 1 of {} is damaged, it has no `run`"),
        ({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "run": "x"}, "Line 1 of {} is damaged, it has no `run`"),
    ],
)
def test_first_line_of_the_wrong_shape_is_named(path: Path, first: Any, message: str) -> None:
    path.write_text(json.dumps(first) + "\n")
    with pytest.raises(ValueError) as error:
        SampleLog(path, RUN)
    assert message.format(path) in str(error.value)
