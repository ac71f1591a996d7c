"""`samples.jsonl`: what has been measured so far, one line per prompt, so that a killed benchmark resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .record import SCHEMA, SCHEMA_VERSION, check_version, write_text


class SampleLog:
    """Lines on disk, and the same in memory.

    Args:
        path: The file; made if it is not there.
        run: Everything that must agree for another line to belong to the same run. JSON values.

    Raises:
        ValueError: If the file holds another run's lines, comes from another version, or is damaged.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path = path
        self.run = json.loads(json.dumps(run))
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self._resume()
        else:
            write_text(path, self._line({"schema": SCHEMA, "schema_version": SCHEMA_VERSION, "run": self.run}))

    def _resume(self) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # a killed run may have left half a line
        lines = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                raise ValueError(
                    f"Line {number} of {self.path} is damaged; remove that line, or measure into another --output."
                ) from None
        if not lines:
            raise ValueError(f"{self.path} has no first line to resume from; delete it, or choose another --output.")
        check_version(lines[0], self.path)
        self._check_same_run(lines[0]["run"])
        if whole != text:
            write_text(self.path, whole)
        self.lines = lines[1:]

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
        key = (task, index, turn)
        return next((line for line in self.lines if (line["task"], line["index"], line["turn"]) == key), None)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line, on disk before this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(line))
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(json.loads(json.dumps(line)))

    @staticmethod
    def _line(value: dict[str, Any]) -> str:
        return json.dumps(value, ensure_ascii=False) + "\n"


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."


__all__ = ["SampleLog"]
