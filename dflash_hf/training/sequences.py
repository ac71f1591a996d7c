"""Training sequences: what `dflash-hf data` wrote, or any rows of token ids and a prompt length; and their batches.

Shapes: B batch, S context, L taps, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from datasets import Dataset

    from .state_cache import StateCache

COLUMNS = ("input_ids", "prompt_length")


def load_sequences(source: str | Path, split: str = "train") -> Dataset:
    """Rows of a folder of Parquet shards, a Parquet or JSONL file, or a `datasets` name.

    Raises:
        ValueError: If there are no rows, or a column is missing.
    """
    from datasets import load_dataset

    path = Path(source)
    if path.is_dir():
        files = sorted(str(file) for file in path.glob("*.parquet"))
        if not files:
            raise ValueError(f"{path} holds no Parquet shards: make some with `dflash-hf data`")
        rows = load_dataset("parquet", data_files=files, split="train")
    elif path.is_file():
        reader = "parquet" if path.suffix == ".parquet" else "json"
        rows = load_dataset(reader, data_files=str(path), split="train")
    else:
        try:
            rows = load_dataset(str(source), split=split)
        except Exception as error:  # a dozen types, from the file system, the network and the Hub
            raise ValueError(
                f"the training data {source} is no folder or file here, and cannot be loaded as a data set of the Hub "
                f"({type(error).__name__}): make some with `dflash-hf data`, or name it with --train_data"
            ) from error
    missing = [name for name in COLUMNS if name not in rows.column_names]
    if missing:
        raise ValueError(
            f"{source} has no column {missing[0]!r} (it has {', '.join(rows.column_names)}): training needs token ids "
            "and prompt lengths, as `dflash-hf data` writes them"
        )
    if not len(rows):
        raise ValueError(f"{source} has no rows: make some with `dflash-hf data`")
    return rows


def usable_sequences(rows: Dataset, max_length: int, vocab_size: int) -> tuple[Dataset, dict[str, int]]:
    """Sequences that have something to train on, cut to `max_length` tokens, and a count of the others by reason.

    A response needs two tokens, one to be an anchor and one to be predicted; it need not fill a block.

    Raises:
        ValueError: If no sequence is left.
    """
    keep: list[dict[str, Any]] = []
    skipped: Counter[str] = Counter()
    for number, row in enumerate(rows.select_columns(list(COLUMNS))):
        token_ids, prompt_length = row["input_ids"] or [], row["prompt_length"]
        reason = unusable_because(token_ids, prompt_length, max_length, vocab_size)
        if reason is not None:
            skipped[reason] += 1
            continue
        token_ids = token_ids[:max_length]
        keep.append(
            {"input_ids": token_ids, "prompt_length": prompt_length, "sequence": number, "length": len(token_ids)}
        )
    if not keep:
        raise ValueError(f"none of the {len(rows)} sequences can be trained on: {dict(skipped)}")
    from datasets import Dataset as ArrowDataset

    return ArrowDataset.from_list(keep), dict(skipped)


def unusable_because(
    token_ids: Sequence[int], prompt_length: int | None, max_length: int, vocab_size: int
) -> str | None:
    """Why a sequence has nothing to train on; `None` if it has."""
    if prompt_length is None or not 0 <= prompt_length <= len(token_ids):
        return "prompt length outside the sequence"
    if len(token_ids) == prompt_length:
        return "empty response"
    if len(token_ids) - prompt_length < 2:
        return "response of one token"
    if max_length - prompt_length < 2:
        return "prompt fills the maximal length"
    if max(token_ids) >= vocab_size or min(token_ids) < 0:
        return "token outside the vocabulary"
    return None


class SequenceCollator:
    """Right-padded batches of sequences, with their tapped states where those are cached.

    Args:
        cache: Cached states of these very sequences; `None`: the trainer runs the target.
    """

    def __init__(self, cache: StateCache | None = None):
        self.cache = cache

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A padded batch.

        Returns:
            `input_ids`, `attention_mask` (B, S); `lengths`, `prompt_lengths`, `sequences` (B,); `states`
            (B, S, L * H).
        """
        lengths = torch.tensor([len(feature["input_ids"]) for feature in features])
        input_ids = torch.zeros(len(features), int(lengths.max()), dtype=torch.long)
        for row, feature in zip(input_ids, features, strict=True):
            row[: len(feature["input_ids"])] = torch.as_tensor(feature["input_ids"])
        batch = {
            "input_ids": input_ids,
            "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
            "lengths": lengths,
            "prompt_lengths": torch.tensor([feature["prompt_length"] for feature in features]),
            "sequences": torch.tensor([feature["sequence"] for feature in features]),
        }
        if self.cache is not None:
            batch["states"] = self.cache.batch(batch["sequences"].tolist(), input_ids.shape[1])
        return batch
