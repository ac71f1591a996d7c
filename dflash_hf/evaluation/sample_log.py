"""`samples.jsonl`: what has been measured so far, one line per prompt, so that a killed benchmark resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .record import SCHEMA, SCHEMA_VERSION, check_version, write_text

LOCK = ".lock"
Key = tuple[str, int, int]


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which exists.

    Raises:
        ValueError: If another run is in it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"Another benchmark is measuring into {folder} (it holds {folder / LOCK}); wait for it, or name another "
            "--output."
        ) from None
    try:
        yield
    finally:
        lock.release()


class SampleLog:
    """Lines on disk, and the same in memory. Of two lines for one prompt the first counts.

    Args:
        path: The file; made if it is not there.
        run: Everything that must agree for another line to belong to the same run. JSON values.

    Raises:
        ValueError: If the file holds another run's lines, comes from another version, or is damaged.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = path
        self.run = json.loads(json.dumps(run))
        self._lines: dict[Key, dict[str, Any]] = {}
        if path.exists():
            self._resume()
        else:
            write_text(path, self._line({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "run": self.run}))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """One per prompt, as measured."""
        return list(self._lines.values())

    def _resume(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a killed run may have left half a line
        if not whole:
            raise ValueError(f"{self.path} has no first line to resume from; delete it, or choose another --output.")
        first, *lines = [self._parse(number, line) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)]
        check_version(first, self.path)
        if not isinstance(first.get("run"), dict):
            raise self._damaged(1, "it has no `run`")
        self._check_same_run(first["run"])
        for number, line in enumerate(lines, start=2):
            self._check_line(number, line)
            self._lines.setdefault(_key(line), line)
        if whole != content:
            write_text(self.path, whole.decode())

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line.decode())
        except (ValueError, RecursionError):
            raise self._damaged(number, "it is no JSON") from None
        if not isinstance(found, dict):
            raise self._damaged(number, f"it holds a {type(found).__name__}")
        return found

    def _check_line(self, number: int, line: dict[str, Any]) -> None:
        kinds = {"task": str, "index": int, "turn": int, "prompt_tokens": int}
        lacking = [name for name, kind in kinds.items() if not isinstance(line.get(name), kind)]
        if not lacking and not isinstance(line.get("skipped"), str):
            kinds = {"repetitive": bool, "prompt_ids": list, "date": str, "results": dict, "bare": dict}
            lacking = [name for name, kind in kinds.items() if not isinstance(line.get(name), kind)]
            lacking = lacking or self._lacking_results(line["results"], line["bare"])
        if lacking:
            raise self._damaged(number, f"it has no right `{lacking[0]}`")

    def _lacking_results(self, results: dict[str, Any], bare: dict[str, float]) -> list[str]:
        from dataclasses import fields

        from .measure import Measured

        for method in self.run.get("methods", {}):
            result = results.get(method)
            if not isinstance(result, dict):
                return [f"results.{method}"]
            lacking = [f"results.{method}.{each.name}" for each in fields(Measured) if each.name not in result]
            if lacking:
                return lacking
            if result["rounds"] and (missing := [width for width in result["widths"] if str(width) not in bare]):
                return [f"bare.{missing[0]}"]
        return []

    def _damaged(self, number: int, what: str) -> ValueError:
        return ValueError(
            f"Line {number} of {self.path} is damaged, {what}; remove that line, or measure into another --output."
        )

    def _check_same_run(self, before: dict[str, Any]) -> None:
        for field in dict.fromkeys([*self.run, *before]):
            now, then = self.run.get(field), before.get(field)
            if now != then:
                raise ValueError(
                    f"{self.path} holds a run whose `{field}` is {_brief(then)}, but this one's is {_brief(now)}; "
                    "give the same settings to resume it, or another --output."
                )

    def has(self, task: str, index: int, turn: int) -> bool:
        """Whether this prompt has been measured."""
        return self.find(task, index, turn) is not None

    def find(self, task: str, index: int, turn: int) -> dict[str, Any] | None:
        """The line of a prompt."""
        return self._lines.get((task, index, turn))

    def check_same_prompt(self, line: dict[str, Any], prompt_ids: list[int]) -> None:
        """Refuse to take a line's figures for those of another prompt.

        Raises:
            ValueError: If the line is not of these tokens.
        """
        if line.get("prompt_ids", prompt_ids) != prompt_ids or line["prompt_tokens"] != len(prompt_ids):
            raise ValueError(
                f"{self.path} holds prompt {line['index']} of {line['task']} with other text than it has now, so the "
                "task has changed since; measure it into another --output."
            )

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, on disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(line))
            file.flush()
            os.fsync(file.fileno())
        self._lines[_key(line)] = json.loads(json.dumps(line))

    @staticmethod
    def _line(value: dict[str, Any]) -> str:
        return json.dumps(value, ensure_ascii=False) + "\n"


def _key(line: dict[str, Any]) -> Key:
    return line["task"], line["index"], line["turn"]


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."


__all__ = ["SampleLog", "only_run"]
