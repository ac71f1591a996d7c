"""Prompts for `dflash-hf data`: any `datasets` name, or local JSONL/Parquet, as chat messages ready to be answered.

A row holds `messages` (a conversation, whose earlier turns are kept) or `prompt` (one user turn). A closing assistant
turn is dropped, since the target is to give its own. Rows that cannot be used become a `Failure`, never an exception:
one bad row among a million must not end a night's run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
FILE_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for the target's answer; `token_ids` end where the answer begins."""

    row: int
    messages: list[Message]
    token_ids: list[int]
    kind: str = ""


@dataclass(frozen=True)
class Failure:
    """A row of the input that gave no training sequence, and why."""

    row: int
    reason: str


def load_rows(source: str, split: str = "train", config: str | None = None) -> Dataset:
    """The rows of a local JSONL/Parquet file, or of a dataset's split.

    Raises:
        ValueError: If there is no such file or dataset, its type is unknown, or it lacks `prompt` and `messages`.
    """
    rows = _load_file(Path(source)) if _is_path(source) else _load_named(source, split, config)
    if not {"prompt", "messages"} & set(rows.column_names):
        raise ValueError(
            f"{source} has the columns {sorted(rows.column_names)} but neither 'prompt' nor 'messages': rename the "
            "column that holds the prompts"
        )
    return rows


def _is_path(source: str) -> bool:
    return Path(source).suffix in FILE_READERS or Path(source).is_file()


def _load_file(path: Path) -> Dataset:
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    if not path.is_file():
        raise ValueError(f"the prompt file {path} does not exist: give a JSONL or Parquet file, or a dataset's name")
    if path.suffix not in FILE_READERS:
        raise ValueError(f"the prompt file {path} has the type {path.suffix!r} instead of {sorted(FILE_READERS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"the prompt file {path} is empty: give one row per line with 'prompt' or 'messages'")
    read = {"json": Dataset.from_json, "parquet": Dataset.from_parquet}[FILE_READERS[path.suffix]]
    try:
        return read(str(path))
    except (DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ or error
        raise ValueError(f"the prompt file {path} cannot be read: {cause}") from error


def _load_named(name: str, split: str, config: str | None) -> Dataset:
    from datasets import load_dataset

    try:
        return load_dataset(name, config, split=split)
    except (
        FileNotFoundError,
        ConnectionError,
        ValueError,
        RuntimeError,
    ) as error:  # offline errors come as all of these
        raise ValueError(
            f"the dataset {name!r} (config {config!r}, split {split!r}) cannot be loaded: give a name from the Hub "
            f"or a JSONL/Parquet file ({type(error).__name__}: {error})"
        ) from error


def fingerprint(rows: Iterable[dict[str, Any]]) -> str:
    """A hash of the prompts themselves, so that a resumed run notices an input that changed."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.get("prompt"), row.get("messages")], sort_keys=True).encode())
    return digest.hexdigest()


def read_messages(row: dict[str, Any]) -> list[Message]:
    """The conversation of a row up to the turn the target is to answer.

    Raises:
        ValueError: the row holds nothing to answer; the message says what is wrong.
    """
    given = row.get("messages")
    if given is None:
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"the prompt is {prompt!r}, not a text")
        return [{"role": "user", "content": prompt}]
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise ValueError(f"messages is a {type(given).__name__}, not a list of role/content pairs")
    messages = [{"role": message.get("role"), "content": message.get("content")} for message in given]
    for message in messages:
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"a message has the role {message['role']!r} and a {type(message['content']).__name__}")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "system" or not messages[-1]["content"].strip():
        raise ValueError("the conversation has no turn to answer")
    return messages


def tokenize_row(
    number: int,
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    max_prompt_tokens: int,
) -> Prompt | Failure:
    """A row as a prompt through the target's chat template, or the reason why it is none."""
    try:
        messages = read_messages(row)
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **template_kwargs
        )["input_ids"]
    except Exception as error:  # a template is a program from elsewhere: it may raise anything
        return Failure(number, f"{type(error).__name__}: {error}")
    if len(ids) > max_prompt_tokens:
        return Failure(number, f"the prompt has {len(ids)} tokens, more than max_prompt_tokens={max_prompt_tokens}")
    return Prompt(number, messages, list(ids), str(row.get("kind") or ""))
